#define _GNU_SOURCE
#include "system/open_file_locks.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "system/os.h"

enum { OFD_GETLK = 36, OFD_SETLK = 37 }; /* from fcntl.h, which not every libc has them in */

/* On 64-bit platforms libc's structure is the kernel's. */
static struct flock lock_of(struct gs_bytes bytes, short type)
{
    struct flock lock;
    memset(&lock, 0, sizeof lock);
    lock.l_type = type;
    lock.l_whence = SEEK_SET;
    lock.l_start = bytes.first;
    lock.l_len = bytes.count;
    return lock;
}

bool gs_lock_bytes(int descriptor, struct gs_bytes bytes, bool shared)
{
    GS_KEEP_ERRNO;
    struct flock lock = lock_of(bytes, shared ? F_RDLCK : F_WRLCK);
    return syscall(SYS_fcntl, descriptor, OFD_SETLK, &lock) == 0;
}

enum gs_held_byte gs_find_lock(int descriptor, struct gs_bytes within, struct gs_bytes *found)
{
    GS_KEEP_ERRNO;
    struct flock lock = lock_of(within, F_WRLCK);
    bool known = syscall(SYS_fcntl, descriptor, OFD_GETLK, &lock) == 0;
    *found = (struct gs_bytes){lock.l_start, lock.l_len};
    return !known ? GS_BYTE_UNKNOWN : lock.l_type == F_UNLCK ? GS_BYTE_FREE : GS_BYTE_HELD;
}

/* ---- whether a process exists, shown by its lock on a byte of our file ---- */

static int open_region(const char *path)
{
    return (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0);
}

enum gs_held_byte gs_byte_is_held(const char *path, int64_t byte)
{
    GS_KEEP_ERRNO;
    struct gs_bytes found;
    int file GS_CLOSED = open_region(path);
    return file >= 0 ? gs_find_lock(file, (struct gs_bytes){byte, 1}, &found) : GS_BYTE_UNKNOWN;
}

void *gs_hold_byte(const char *path, int64_t byte)
{
    GS_KEEP_ERRNO;
    void *address = MAP_FAILED;
    int file = open_region(path);
    if (file >= 0 && gs_lock_bytes(file, (struct gs_bytes){byte, 1}, false))
        address = mmap(NULL, 1, PROT_NONE, MAP_SHARED, file, 0);
    if (file >= 0)
        syscall(SYS_close, file);
    if (address == MAP_FAILED)
        return NULL;
    if (gs_byte_is_held(path, byte) == GS_BYTE_HELD)
        return address;
    gs_unmap(address, 1); /* on overlayfs the mapping is of the underlying file, which does not have our lock */
    return NULL;
}
