/* A process's wall clock is off by as many seconds as the file CLOCK_OFFSET says: preloaded, it stands for a machine whose clock jumps. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static const volatile long *offset_s;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("CLOCK_OFFSET");
    int file = path ? open(path, O_RDONLY) : -1;
    void *mapped = file < 0 ? MAP_FAILED : mmap(NULL, sizeof *offset_s, PROT_READ, MAP_SHARED, file, 0);
    if (file >= 0) close(file);
    if (mapped != MAP_FAILED) offset_s = mapped;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = (int)syscall(SYS_clock_gettime, clock, now);
    if (clock == CLOCK_REALTIME && offset_s) now->tv_sec += *offset_s;
    return result;
}
