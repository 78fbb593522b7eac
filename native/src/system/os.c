#define _GNU_SOURCE
#include "system/os.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "system/at_fork.h"
#include "system/elf.h"
#include "system/text.h"

enum { ADDR_NO_RANDOMIZE = 0x0040000 };                      /* from linux/personality.h */
enum { FUTEX_WAIT_PRIVATE = 128, FUTEX_WAKE_PRIVATE = 129 }; /* from linux/futex.h; not every libc has these headers */

static int open_file(const char *path, int flags) { return (int)syscall(SYS_openat, AT_FDCWD, path, flags | O_CLOEXEC, 0666); }

void gs_close(const int *file)
{
    if (*file >= 0)
        syscall(SYS_close, *file);
}

static long read_all(int file, char *buffer, size_t room)
{
    size_t done = 0;
    while (done < room) {
        long got = syscall(SYS_read, file, buffer + done, room - done);
        if (got == 0)
            break;
        if (got < 0 && errno != EINTR)
            return GS_FILE_ERROR;
        if (got > 0)
            done += (size_t)got;
    }
    return (long)done;
}

long gs_read_file(const char *path, char *buffer, size_t room)
{
    GS_KEEP_ERRNO;
    int file GS_CLOSED = open_file(path, O_RDONLY);
    if (file < 0)
        return errno == ENOENT || errno == ENOTDIR ? GS_NO_FILE : GS_FILE_ERROR;
    return read_all(file, buffer, room);
}

/* On our platforms libc's structure is the kernel's. glibc before 2.33 does not export fstat(). */
static bool describe(int file, struct stat *found) { return syscall(SYS_fstat, file, found) == 0; }

/* A link that somebody put there must not make us open up the permissions of the file that it leads to. */
static bool is_plain(const struct stat *found) { return S_ISREG(found->st_mode) && found->st_nlink <= 1; }

/* Touching a mapped page for which a full disk has no block would end the host program with SIGBUS. */
static bool has_room(int file, size_t bytes)
{
    return syscall(SYS_fallocate, file, 0, (off_t)0, (off_t)bytes) == 0 || (errno != ENOSPC && errno != EDQUOT);
}

/* A program that writes beyond RLIMIT_FSIZE is not only refused: SIGXFSZ ends it. */
bool gs_may_write(size_t bytes)
{
    GS_KEEP_ERRNO;
    struct rlimit most;
    return syscall(SYS_prlimit64, 0, RLIMIT_FSIZE, NULL, &most) != 0 || most.rlim_cur >= bytes;
}

static bool reaches(int file, const struct stat *found, size_t bytes)
{
    return (uint64_t)found->st_size >= bytes || (gs_may_write(bytes) && syscall(SYS_ftruncate, file, bytes) == 0);
}

/* O_CREAT only for a file that does not exist: in a world-writable folder the kernel refuses it for another user's file, even
 * to root (fs.protected_regular, which systemd sets). */
static int open_or_make(const char *path, int flags)
{
    int file = open_file(path, flags);
    if (file < 0 && errno == ENOENT)
        file = open_file(path, flags | O_CREAT | O_EXCL);
    return file < 0 && errno == EEXIST ? open_file(path, flags) : file; /* created by somebody else meanwhile */
}

void *gs_map_shared(const char *path, size_t bytes, struct gs_file *identity)
{
    GS_KEEP_ERRNO;
    void *address = MAP_FAILED;
    struct stat found;
    int file GS_CLOSED = open_or_make(path, O_RDWR | O_NOFOLLOW | O_NONBLOCK);
    if (file >= 0 && describe(file, &found) && is_plain(&found)) {
        if (found.st_size == 0)
            syscall(SYS_fchmod, file, 0666); /* the container's other users write here too, whatever our umask */
        if (reaches(file, &found, bytes) && has_room(file, bytes))
            address = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        *identity = (struct gs_file){found.st_dev, found.st_ino};
    }
    return address == MAP_FAILED ? NULL : address;
}

const void *gs_map_to_read(const char *path, size_t bytes)
{
    GS_KEEP_ERRNO;
    void *address = MAP_FAILED;
    struct stat found;
    int file = open_file(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK);
    if (file >= 0 && describe(file, &found) && is_plain(&found) && (uint64_t)found.st_size >= bytes)
        address = mmap(NULL, bytes, PROT_READ, MAP_SHARED, file, 0);
    if (file >= 0)
        syscall(SYS_close, file);
    return address == MAP_FAILED ? NULL : address;
}

enum gs_file_state gs_file_state(const char *path, const struct gs_file *file, size_t bytes)
{
    GS_KEEP_ERRNO;
    struct stat found;
    if (syscall(SYS_newfstatat, AT_FDCWD, path, &found, AT_SYMLINK_NOFOLLOW) != 0)
        return errno == ENOENT ? GS_FILE_ANOTHER : GS_FILE_SAME;
    if (found.st_dev != file->device || found.st_ino != file->inode)
        return GS_FILE_ANOTHER;
    return (uint64_t)found.st_size < bytes ? GS_FILE_SHORT : GS_FILE_SAME;
}

void gs_file_grow(const char *path, size_t bytes)
{
    GS_KEEP_ERRNO;
    struct stat found;
    int file GS_CLOSED = open_file(path, O_RDWR | O_NOFOLLOW | O_NONBLOCK);
    if (file >= 0 && describe(file, &found) && is_plain(&found))
        reaches(file, &found, bytes);
}

void *gs_map_private(size_t bytes)
{
    GS_KEEP_ERRNO;
    void *address = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return address == MAP_FAILED ? NULL : address;
}

void gs_unmap(void *address, size_t bytes)
{
    GS_KEEP_ERRNO;
    munmap(address, bytes);
}

typedef int (*clock_function)(clockid_t, struct timespec *);

static int ask_kernel(clockid_t clock, struct timespec *now) { return (int)syscall(SYS_clock_gettime, clock, now); }

/* libc's or the vdso's function, which does not enter the kernel and preserves errno. It is looked up at run time: linked
 * by name it would require GLIBC_2.17 on x86-64, and an older loader would refuse to start the program. */
static clock_function find_clock(void)
{
    static clock_function found;
    clock_function clock = __atomic_load_n(&found, __ATOMIC_RELAXED);
    if (clock)
        return clock;
    clock = (clock_function)gs_elf_function("clock_gettime");
    clock = clock ? clock : ask_kernel;
    __atomic_store_n(&found, clock, __ATOMIC_RELAXED);
    return clock;
}

static uint64_t clock_ns(clockid_t clock)
{
    struct timespec now = {0};
    find_clock()(clock, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* ---- time namespaces ---- */

/* In a time namespace of its own, a container's clocks differ from the host's by an offset (time_namespaces(7)). Times in the
 * region, the claims and the figures are compared with those of the agent and of neighbours, so they are the host's. */
static struct {
    _Atomic bool known;
    int64_t monotonic_ns, boottime_ns;
} shifted GS_PER_PROCESS; /* a child may start in another time namespace */

/* The offset from the line of a clock: its name, seconds, nanoseconds. 0 if there is no such line. */
static int64_t shift_of(const char *text, const char *clock)
{
    const char *at = strstr(text, clock);
    int64_t parts[2] = {0, 0};
    at = at ? at + strlen(clock) : "";
    for (int i = 0; i < 2; i++) {
        while (*at == ' ')
            at++;
        int64_t sign = *at == '-' ? -1 : 1;
        at += *at == '-';
        parts[i] = sign * (int64_t)gs_text_number(&at);
    }
    return parts[0] * 1000000000 + parts[1];
}

/* /proc/self/timens_offsets shows the namespace for children, which is usually but not always our own. */
static bool is_own_namespace(void)
{
    struct stat own, of_children;
    return syscall(SYS_newfstatat, AT_FDCWD, "/proc/self/ns/time", &own, 0) == 0 &&
           syscall(SYS_newfstatat, AT_FDCWD, "/proc/self/ns/time_for_children", &of_children, 0) == 0 &&
           own.st_ino == of_children.st_ino;
}

static void find_shift(void)
{
    char text[256];
    GS_KEEP_ERRNO;
    long bytes = is_own_namespace() ? gs_read_file("/proc/self/timens_offsets", text, sizeof text - 1) : 0;
    text[bytes > 0 ? bytes : 0] = 0;
    __atomic_store_n(&shifted.monotonic_ns, shift_of(text, "monotonic"), __ATOMIC_RELAXED);
    __atomic_store_n(&shifted.boottime_ns, shift_of(text, "boottime"), __ATOMIC_RELAXED);
    atomic_store_explicit(&shifted.known, true, memory_order_release);
}

static uint64_t host_ns(clockid_t clock)
{
    if (!atomic_load_explicit(&shifted.known, memory_order_acquire))
        find_shift();
    return clock_ns(clock) - (uint64_t)__atomic_load_n(&shifted.monotonic_ns, __ATOMIC_RELAXED);
}

uint64_t gs_monotonic_ns(void) { return host_ns(CLOCK_MONOTONIC); }
uint64_t gs_realtime_us(void) { return clock_ns(CLOCK_REALTIME) / 1000; }
uint64_t gs_coarse_ns(void) { return host_ns(CLOCK_MONOTONIC_COARSE); }

/* The start time of a process as the host sees it, in clock ticks of 10 ms. */
static uint64_t host_ticks(uint64_t ticks)
{
    if (!atomic_load_explicit(&shifted.known, memory_order_acquire))
        find_shift();
    return ticks - (uint64_t)(__atomic_load_n(&shifted.boottime_ns, __ATOMIC_RELAXED) / 10000000);
}

void gs_sleep_ns(uint64_t ns)
{
    GS_KEEP_ERRNO;
    struct timespec time = {.tv_sec = (time_t)(ns / 1000000000u), .tv_nsec = (long)(ns % 1000000000u)};
    /* Not nanosleep(): it is a cancellation point, which the host program does not expect here. A signal ends the sleep early. */
    syscall(SYS_nanosleep, &time, NULL);
}

void gs_yield(void)
{
    GS_KEEP_ERRNO;
    sched_yield();
}

uint32_t gs_pid(void) { return (uint32_t)syscall(SYS_getpid); }

char *gs_append_number(char *at, uint32_t number)
{
    char digits[10];
    int count = 0;
    do
        digits[count++] = (char)('0' + number % 10);
    while (number /= 10);
    while (count)
        *at++ = digits[--count];
    return at;
}

/* The n-th field of the text, separated by blanks and counted from 0, as a number. */
static uint64_t field(const char *text, int n)
{
    while (n-- > 0) {
        while (*text && *text != ' ')
            text++;
        while (*text == ' ')
            text++;
    }
    return gs_text_number(&text);
}

static bool exists(uint32_t pid)
{
    GS_KEEP_ERRNO;
    return syscall(SYS_kill, pid, 0) == 0 || errno == EPERM;
}

/* Our own state is read from /proc/self: /proc may belong to another pid namespace, in which our pid is another process. */
static struct gs_process read_process(uint32_t pid)
{
    char path[32] = "/proc/self/stat", text[1024];
    if (pid != gs_pid())
        memcpy(gs_append_number(path + 6, pid), "/stat", 6);
    long bytes = gs_read_file(path, text, sizeof text - 1);
    if (bytes <= 0) /* it has ended, or /proc hides other users' processes, which must count as alive */
        return (struct gs_process){.alive = exists(pid)};
    text[bytes] = 0;
    /* The program's name may contain blanks and brackets: the other fields start after the last bracket, with field 3, the
     * state. */
    const char *behind = strrchr(text, ')');
    if (!behind || behind[1] != ' ')
        return (struct gs_process){.alive = true};
    /* A zombie with threads is a process whose main thread has ended: it still holds its memory. */
    char state = behind[2];
    bool alive = state == 'Z' ? field(behind + 2, 20 - 3) > 1 : state != 'X' && state != 'x';
    uint64_t stack = field(behind + 2, 28 - 3);
    return (struct gs_process){
        .alive = alive, .start_time = host_ticks(field(behind + 2, 22 - 3)), .start_stack = stack > 1 ? stack : 0};
}

struct gs_process gs_process(uint32_t pid)
{
    static struct gs_process self GS_PER_PROCESS;
    static _Atomic bool known GS_PER_PROCESS;
    if (pid != gs_pid())
        return read_process(pid);
    if (!atomic_load_explicit(&known, memory_order_acquire)) { /* two threads may both do it, with the same result */
        self = read_process(pid);
        atomic_store_explicit(&known, self.start_time != 0, memory_order_release);
    }
    return self;
}

/* It is not under a debugger, for example, or where the machine has address randomization turned off. */
bool gs_stack_is_random(void)
{
    char machine = '2';
    GS_KEEP_ERRNO;
    unsigned long flags = (unsigned long)syscall(SYS_personality, 0xffffffffUL);
    gs_read_file("/proc/sys/kernel/randomize_va_space", &machine, 1);
    return !(flags & ADDR_NO_RANDOMIZE) && machine != '0';
}

uint64_t gs_pid_namespace(void)
{
    static _Atomic uint64_t known GS_PER_PROCESS;
    char target[64]; /* pid:[4026531836] */
    GS_KEEP_ERRNO;
    if (known)
        return known;
    long length = syscall(SYS_readlinkat, AT_FDCWD, "/proc/self/ns/pid", target, sizeof target - 1);
    if (length <= 5)
        return 0;
    target[length] = 0;
    const char *inode = target + 5;
    return known = gs_text_number(&inode);
}

static void futex(_Atomic uint32_t *word, int operation, uint32_t value)
{
    GS_KEEP_ERRNO;
    syscall(SYS_futex, word, operation, value, NULL, NULL, 0);
}

_Thread_local unsigned gs_locks __attribute__((tls_model("initial-exec")));

/* For the simulated driver, which looks. */
__attribute__((visibility("default"))) unsigned gpuslice_locks_held(void);
unsigned gpuslice_locks_held(void) { return gs_locks; }

void gs_lock_awaited(struct gs_lock *lock)
{
    while (atomic_exchange_explicit(&lock->state, 2, memory_order_acquire) != 0)
        futex(&lock->state, FUTEX_WAIT_PRIVATE, 2);
}

void gs_lock_passed_on(struct gs_lock *lock) { futex(&lock->state, FUTEX_WAKE_PRIVATE, 1); }
