#define _GNU_SOURCE
#include "system/open_file_locks.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "system/os.h"

#define FIRST_BYTE (INT64_C(1) << 61)
#define ATTEMPTS 64
enum { OFD_GETLK = 36, OFD_SETLK = 37 }; /* of fcntl.h, where libc declares them */

/* The kernel's own structure, which is libc's on 64-bit platforms. */
static struct flock lock_of(int64_t byte)
{
    struct flock lock;
    memset(&lock, 0, sizeof lock);
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    lock.l_start = byte;
    lock.l_len = 1;
    return lock;
}

static bool find_path(struct gs_watch *watch, int descriptor)
{
    char link[40] = "/proc/thread-self/fd/"; /* of a first thread that ended /proc/self shows no descriptors */
    gs_append_number(link + sizeof "/proc/thread-self/fd/" - 1, (uint32_t)descriptor);
    long length = syscall(SYS_readlinkat, AT_FDCWD, link, watch->path, sizeof watch->path - 1);
    if (length <= 0 || length >= GS_WATCH_PATH_ROOM - 1)
        return false;
    watch->path[length] = 0;
    return watch->path[0] == '/';
}

/* Needs no descriptor. A file without a name can never be asked. */
static bool has_name(const struct gs_watch *watch)
{
    struct stat found;
    return syscall(SYS_newfstatat, AT_FDCWD, watch->path, &found, 0) == 0 && found.st_dev == watch->device &&
           found.st_ino == watch->inode;
}

static bool lock_some_byte(struct gs_watch *watch, int descriptor)
{
    watch->byte = FIRST_BYTE + (int64_t)(gs_monotonic_ns() & ((UINT64_C(1) << 60) - 1));
    for (int attempt = 0; attempt < ATTEMPTS; attempt++, watch->byte++) {
        struct flock lock = lock_of(watch->byte);
        if (syscall(SYS_fcntl, descriptor, OFD_SETLK, &lock) == 0)
            return true;
        if (errno != EAGAIN && errno != EACCES)
            return false;
    }
    return false;
}

bool gs_watch_begin(struct gs_watch *watch, int descriptor)
{
    int saved = errno;
    struct stat found;
    *watch = (struct gs_watch){0};
    bool watched = descriptor >= 0 && syscall(SYS_fstat, descriptor, &found) == 0 && find_path(watch, descriptor) &&
                   lock_some_byte(watch, descriptor);
    if (watched) {
        watch->device = found.st_dev;
        watch->inode = found.st_ino;
    }
    watched = watched && has_name(watch);
    errno = saved;
    return watched;
}

bool gs_watch_is_open(const struct gs_watch *watch)
{
    int saved = errno;
    struct stat found;
    struct flock lock = lock_of(watch->byte);
    int file = (int)syscall(SYS_openat, AT_FDCWD, watch->path, O_RDWR | O_CLOEXEC | O_NONBLOCK, 0);
    bool same = file >= 0 && syscall(SYS_fstat, file, &found) == 0 && found.st_dev == watch->device && found.st_ino == watch->inode;
    bool closed = same && syscall(SYS_fcntl, file, OFD_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
    if (file >= 0)
        syscall(SYS_close, file);
    errno = saved;
    return !closed;
}

/* ---- whether a process is there, by a lock on a file of ours ---- */

enum gs_held_byte gs_byte_is_held(const char *path, int64_t byte)
{
    int saved = errno;
    struct flock lock = lock_of(byte);
    int file = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0);
    bool known = file >= 0 && syscall(SYS_fcntl, file, OFD_GETLK, &lock) == 0;
    if (file >= 0)
        syscall(SYS_close, file);
    errno = saved;
    return !known ? GS_BYTE_UNKNOWN : lock.l_type == F_UNLCK ? GS_BYTE_FREE : GS_BYTE_HELD;
}

void *gs_hold_byte(const char *path, int64_t byte)
{
    int saved = errno;
    struct flock lock = lock_of(byte);
    void *address = MAP_FAILED;
    int file = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0);
    if (file >= 0 && syscall(SYS_fcntl, file, OFD_SETLK, &lock) == 0)
        address = mmap(NULL, 1, PROT_NONE, MAP_SHARED, file, 0);
    if (file >= 0)
        syscall(SYS_close, file);
    errno = saved;
    if (address == MAP_FAILED)
        return NULL;
    if (gs_byte_is_held(path, byte) == GS_BYTE_HELD)
        return address;
    gs_unmap(address, 1); /* overlayfs maps the file below it, which does not bear our lock */
    return NULL;
}
