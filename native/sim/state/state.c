/* Mapping the state, the lock that no dead process can hold, and the table of processes. */
#include "state.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static struct sim_state *mapped;
static int witness_fd = -1; /* holds one locked byte per live slot; the kernel lets go when the process ends or execs */
static uint64_t identity;
static _Atomic uint32_t self_slot = SIM_PROCESSES;
static pthread_mutex_t attach_mutex = PTHREAD_MUTEX_INITIALIZER;
static _Atomic uint64_t last_reap_ns;

uint64_t sim_monotonic_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

uint64_t sim_realtime_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * 1000000u + (uint64_t)now.tv_nsec / 1000u;
}

uint64_t sim_start_time(int32_t pid)
{
    char path[48];
    char text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    ssize_t length = read(fd, text, sizeof text - 1);
    close(fd);
    if (length <= 0)
        return 0;
    text[length] = '\0';
    char *after_name = strrchr(text, ')'); /* the name may hold spaces and brackets */
    char life = 0;
    unsigned long long start = 0;
    if (!after_name || sscanf(after_name + 1,
                              " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu",
                              &life, &start) != 2)
        return 0;
    return life == 'Z' || life == 'X' ? 0 : start;
}

/* ------------------------------------------------------------------------------------------- mapping */

static void set_identity(void)
{
    int32_t pid = (int32_t)getpid();
    identity = (uint64_t)(uint32_t)pid << 32 | (uint32_t)sim_start_time(pid);
}

static void before_child_runs(void)
{
    sim_forget_self();
}

static struct sim_state *map_file(const char *path)
{
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return NULL;
    struct stat about;
    struct sim_state *state = NULL;
    if (fstat(fd, &about) == 0 && (uint64_t)about.st_size >= sizeof *state) {
        void *memory = mmap(NULL, sizeof *state, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        state = memory == MAP_FAILED ? NULL : memory;
    }
    close(fd);
    if (state && (state->magic != SIM_MAGIC || state->layout_version != SIM_LAYOUT_VERSION ||
                  state->layout_bytes != sizeof *state)) {
        munmap(state, sizeof *state);
        state = NULL;
    }
    return state;
}

static int open_witness(const char *path)
{
    char witness[4096];
    snprintf(witness, sizeof witness, "%s.alive", path);
    return open(witness, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
}

struct sim_state *sim_attach(void)
{
    pthread_mutex_lock(&attach_mutex);
    const char *path = getenv("GPUSLICE_SIM_STATE");
    if (!mapped && path && *path) {
        witness_fd = open_witness(path);
        set_identity();
        struct sim_state *state = witness_fd < 0 ? NULL : map_file(path);
        if (state)
            pthread_atfork(NULL, NULL, before_child_runs);
        __atomic_store_n(&mapped, state, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&attach_mutex);
    return mapped;
}

struct sim_state *sim_state(void)
{
    return __atomic_load_n(&mapped, __ATOMIC_ACQUIRE);
}

void sim_forget_self(void)
{
    /* The inherited descriptor shares the parent's locks: close it, so that they end with the parent. */
    const char *path = getenv("GPUSLICE_SIM_STATE");
    if (witness_fd >= 0)
        close(witness_fd);
    witness_fd = path && *path ? open_witness(path) : -1;
    atomic_store(&self_slot, SIM_PROCESSES);
    set_identity();
}

/* ------------------------------------------------------------------------------------------- the lock */

static bool owner_is_dead(uint64_t owner)
{
    uint64_t start = sim_start_time((int32_t)(owner >> 32));
    return start == 0 || (uint32_t)start != (uint32_t)owner;
}

static bool take_from(uint64_t owner)
{
    return atomic_compare_exchange_strong_explicit(&mapped->lock, &owner, identity, memory_order_acquire,
                                                   memory_order_relaxed);
}

/* A dead owner's lock is taken over by one compare-and-swap; whoever gets it puts the books in order. */
static bool take_from_the_dead(void)
{
    uint64_t owner = atomic_load_explicit(&mapped->lock, memory_order_relaxed);
    if (owner == 0 || owner == identity || !owner_is_dead(owner) || !take_from(owner))
        return false;
    atomic_fetch_or(&mapped->sequence, 1);
    mapped->recoveries++;
    sim_recover();
    return true;
}

void sim_lock(void)
{
    for (unsigned turns = 1; !take_from(0); turns++) {
        if (turns % 64 == 0)
            sched_yield();
        if (turns % 16384 == 0 && take_from_the_dead())
            return;
    }
    atomic_fetch_add_explicit(&mapped->sequence, 1, memory_order_acq_rel);
}

void sim_unlock(void)
{
    atomic_fetch_add_explicit(&mapped->sequence, 1, memory_order_acq_rel);
    atomic_store_explicit(&mapped->lock, 0, memory_order_release);
}

/* ------------------------------------------------------------------------------------- the processes */

static bool witness(uint32_t slot, int command, short type, short *found)
{
    struct flock lock = {.l_type = type, .l_whence = SEEK_SET, .l_start = (off_t)slot, .l_len = 1};
    if (fcntl(witness_fd, command, &lock) != 0)
        return false;
    if (found)
        *found = lock.l_type;
    return true;
}

static bool slot_is_alive(uint32_t slot)
{
    short found = F_UNLCK;
    if (slot == atomic_load_explicit(&self_slot, memory_order_relaxed))
        return true;
    return !witness(slot, F_OFD_GETLK, F_WRLCK, &found) || found != F_UNLCK;
}

static void empty_slot(uint32_t slot)
{
    for (uint32_t record = 1; record < mapped->record_high; record++)
        if (mapped->records[record].live && mapped->records[record].process == slot)
            sim_release_locked(record);
    sim_engine_forget(slot);
    atomic_store_explicit(&mapped->processes[slot].live, 0, memory_order_release);
    mapped->reaped++;
}

void sim_reap(void)
{
    for (uint32_t slot = 0; slot < mapped->process_high; slot++)
        if (mapped->processes[slot].live && !slot_is_alive(slot))
            empty_slot(slot);
}

void sim_reap_now(void)
{
    sim_lock();
    sim_reap();
    sim_unlock();
    atomic_store_explicit(&last_reap_ns, sim_monotonic_ns(), memory_order_relaxed);
}

void sim_reap_unless_done(uint64_t within_ns)
{
    if (sim_monotonic_ns() - atomic_load_explicit(&last_reap_ns, memory_order_relaxed) < within_ns)
        return;
    sim_reap();
    atomic_store_explicit(&last_reap_ns, sim_monotonic_ns(), memory_order_relaxed);
}

void sim_reap_sometimes(void)
{
    if (mapped->process_high == 1 && sim_self_if_any() == 0)
        return; /* nobody else was ever here */
    if (sim_monotonic_ns() - atomic_load_explicit(&last_reap_ns, memory_order_relaxed) > 1000000u)
        sim_reap_now();
}

static void fill_slot(struct sim_process *process)
{
    memset(process, 0, sizeof *process);
    process->pid = (int32_t)getpid();
    process->start_time = sim_start_time(process->pid);
    process->contained = getenv("NVIDIA_VISIBLE_DEVICES") != NULL;
    atomic_store_explicit(&process->live, 1, memory_order_release);
}

static uint32_t take_slot(void)
{
    sim_reap();
    for (uint32_t slot = 0; slot < SIM_PROCESSES; slot++) {
        if (mapped->processes[slot].live || !witness(slot, F_OFD_SETLK, F_WRLCK, NULL))
            continue;
        if (slot >= mapped->process_high)
            mapped->process_high = slot + 1;
        fill_slot(&mapped->processes[slot]);
        return slot;
    }
    return SIM_PROCESSES;
}

uint32_t sim_self_if_any(void)
{
    return atomic_load_explicit(&self_slot, memory_order_acquire);
}

uint32_t sim_self(void)
{
    uint32_t slot = sim_self_if_any();
    if (slot != SIM_PROCESSES)
        return slot;
    sim_lock();
    slot = sim_self_if_any();
    if (slot == SIM_PROCESSES) {
        slot = take_slot();
        atomic_store_explicit(&self_slot, slot, memory_order_release);
    }
    sim_unlock();
    return slot;
}
