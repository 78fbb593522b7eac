/* The few things asked of the kernel. Bare system calls: no versioned libc symbol newer than the oldest glibc we
 * load into, no descriptor that survives exec, no allocation. errno is the host program's: every entry keeps it. */
#ifndef GPUSLICE_OS_H
#define GPUSLICE_OS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define GS_NO_FILE (-1L)
#define GS_FILE_ERROR (-2L)

/* Bytes read, GS_NO_FILE, or GS_FILE_ERROR. At most `room` bytes. */
long gs_read_file(const char *path, char *buffer, size_t room);

/* Which file it was, to tell it from a later one of the same name. */
struct gs_file {
    uint64_t device, inode;
};

/* A shared mapping of the file, made and grown to `bytes` if need be; NULL if it cannot be had, or is no plain file of
 * this one name. */
void *gs_map_shared(const char *path, size_t bytes, struct gs_file *file);
/* What stands under the name now. What cannot be found out is taken for the same. */
enum gs_file_state { GS_FILE_SAME, GS_FILE_SHORT, GS_FILE_ANOTHER };
enum gs_file_state gs_file_state(const char *path, const struct gs_file *file, size_t bytes);
void gs_file_grow(const char *path, size_t bytes);
bool gs_may_write(size_t bytes); /* so far into a file, by the limit of this process */
void *gs_map_private(size_t bytes); /* zeros */
void gs_unmap(void *address, size_t bytes);

uint64_t gs_monotonic_ns(void); /* the host's, in whatever time namespace we are */
uint64_t gs_realtime_us(void);
uint64_t gs_coarse_ns(void); /* as gs_monotonic_ns, a few milliseconds old at most, nearly free */
void gs_sleep_ns(uint64_t ns);
void gs_yield(void);

uint32_t gs_pid(void);
char *gs_append_number(char *at, uint32_t number); /* decimal digits; where they end */

struct gs_process {
    bool alive; /* any of its threads is */
    uint64_t start_time; /* field 22 of /proc/<pid>/stat, as the host sees it */
    uint64_t start_stack; /* 0 when the kernel does not tell */
};
struct gs_process gs_process(uint32_t pid);
bool gs_stack_is_random(void); /* whether this program's stack begins elsewhere than the next one's of this process */
uint64_t gs_pid_namespace(void); /* inode; 0 when unknown */

/* A lock of this process, not of the region. Zero is unlocked. */
struct gs_lock {
    _Atomic uint32_t state; /* 0 free, 1 held, 2 held and awaited */
};
void gs_lock_awaited(struct gs_lock *lock);
void gs_lock_passed_on(struct gs_lock *lock);

static inline void gs_lock(struct gs_lock *lock)
{
    uint32_t free = 0;
    if (!atomic_compare_exchange_strong_explicit(&lock->state, &free, 1, memory_order_acquire, memory_order_relaxed))
        gs_lock_awaited(lock);
}

static inline void gs_unlock(struct gs_lock *lock)
{
    if (atomic_exchange_explicit(&lock->state, 0, memory_order_release) == 2)
        gs_lock_passed_on(lock);
}

#endif
