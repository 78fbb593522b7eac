/* The few things that we need from the kernel, by direct system calls: they require no libc symbol newer than the oldest
 * glibc that we load into, leave no descriptor open across exec and allocate nothing. errno belongs to the host program:
 * every function here preserves it. */
#ifndef GPUSLICE_OS_H
#define GPUSLICE_OS_H

#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* At the start of a block: errno is again what it was when the block is left, however it is left. */
#define GS_KEEP_ERRNO const int kept_errno __attribute__((cleanup(gs_restore_errno), unused)) = errno
static inline void gs_restore_errno(const int *kept) { errno = *kept; }

/* A descriptor, or a negative number, that is closed when the block is left. */
#define GS_CLOSED __attribute__((cleanup(gs_close)))
void gs_close(const int *file);

#define GS_NO_FILE (-1L)
#define GS_FILE_ERROR (-2L)

/* Bytes read, GS_NO_FILE, or GS_FILE_ERROR. At most `room` bytes. */
long gs_read_file(const char *path, char *buffer, size_t room);

/* Identifies a file, to distinguish it from a later one of the same name. */
struct gs_file {
    uint64_t device, inode;
};

/* A shared mapping of the file, which is created, and grown to `bytes`, if necessary. NULL if that fails, or if the path
 * is not a regular file without further hard links. */
void *gs_map_shared(const char *path, size_t bytes, struct gs_file *file);
const void *gs_map_to_read(const char *path, size_t bytes); /* NULL if it is no such file, or shorter */
/* What the path refers to now. If that cannot be found out, the file is assumed to be the same. */
enum gs_file_state { GS_FILE_SAME, GS_FILE_SHORT, GS_FILE_ANOTHER };
enum gs_file_state gs_file_state(const char *path, const struct gs_file *file, size_t bytes);
void gs_file_grow(const char *path, size_t bytes);
bool gs_may_write(size_t bytes);    /* so far into a file, by the limit of this process */
void *gs_map_private(size_t bytes); /* zeros */
void gs_unmap(void *address, size_t bytes);

uint64_t gs_monotonic_ns(void); /* the host's clock, whatever our time namespace */
uint64_t gs_realtime_us(void);
uint64_t gs_coarse_ns(void); /* as gs_monotonic_ns, but up to a few milliseconds old; almost free */
void gs_sleep_ns(uint64_t ns);
void gs_yield(void);

uint32_t gs_pid(void);
char *gs_append_number(char *at, uint32_t number); /* in decimal; returns the end */

struct gs_process {
    bool alive;           /* at least one of its threads is */
    uint64_t start_time;  /* field 22 of /proc/<pid>/stat, as the host sees it */
    uint64_t start_stack; /* 0 if the kernel does not show it */
};
struct gs_process gs_process(uint32_t pid);
bool gs_stack_is_random(void);   /* whether the stack starts at another address after exec */
uint64_t gs_pid_namespace(void); /* its inode; 0 if unknown */

/* A mutex within this process; never placed in the region. All zeros is unlocked.
 *
 * No thread calls a function of the driver that may wait while it holds one: the driver may wait for work that only goes on when
 * another thread gets this lock. That is every call but those that only ask, record or query, and any of NVML's (which wait for
 * no work). The one exception is a creation lock, which is held across the creation of a context and of nothing else: only
 * other creations wait for it. The simulated driver ends a process that does otherwise (sim/libcuda/gate.c). */
struct gs_lock {
    _Atomic uint32_t state; /* 0 free, 1 held, 2 held with threads waiting */
};
extern _Thread_local unsigned gs_locks
    __attribute__((tls_model("initial-exec"))); /* that this thread holds, creation locks apart */
void gs_lock_awaited(struct gs_lock *lock);
void gs_lock_passed_on(struct gs_lock *lock);

static inline void gs_lock(struct gs_lock *lock)
{
    uint32_t free = 0;
    if (!atomic_compare_exchange_strong_explicit(&lock->state, &free, 1, memory_order_acquire, memory_order_relaxed))
        gs_lock_awaited(lock);
    gs_locks++;
}

static inline void gs_unlock(struct gs_lock *lock)
{
    gs_locks--;
    if (atomic_exchange_explicit(&lock->state, 0, memory_order_release) == 2)
        gs_lock_passed_on(lock);
}

/* Holds a lock until the block is left, however it is left. */
#define GS_GUARD(lock) struct gs_lock *const guarded __attribute__((cleanup(gs_unguard), unused)) = gs_guarded(lock)
static inline void gs_unguard(struct gs_lock *const *lock) { gs_unlock(*lock); }
static inline struct gs_lock *gs_guarded(struct gs_lock *lock)
{
    gs_lock(lock);
    return lock;
}

#endif
