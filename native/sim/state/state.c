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
static char state_path[4000]; /* as it was when this process attached: its environment may change */
static int witness_fd = -1;   /* holds one locked byte per live slot; the kernel lets go when the process ends or execs */
static int number_fd = -1;    /* holds the bytes by which others learn this process's pid in their own namespace */
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
    if (!after_name ||
        sscanf(after_name + 1, " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu", &life,
               &start) != 2)
        return 0;
    return life == 'X' ? 0 : start;
}

/* ------------------------------------------------------------------------------------------- mapping */

static int open_beside(const char *suffix)
{
    char path[4096];
    snprintf(path, sizeof path, "%s%s", state_path, suffix);
    return open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
}

/* A byte of the witness file, locked while this process (or, after exec, this program) lives. */
static bool witness(uint64_t byte, int command, short type, short *found)
{
    struct flock lock = {.l_type = type, .l_whence = SEEK_SET, .l_start = (off_t)byte, .l_len = 1};
    if (fcntl(witness_fd, command, &lock) != 0)
        return false;
    if (found)
        *found = lock.l_type;
    return true;
}

/* Numbers of processes mean nothing in another PID namespace, so each process that attaches gets one of this file. */
static void set_identity(struct sim_state *state)
{
    identity = atomic_fetch_add(&state->attached, 1) + 1;
    witness(SIM_PROCESSES + identity, F_OFD_SETLK, F_WRLCK, NULL);
}

static void before_child_runs(void) { sim_forget_self(); }

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
    if (state &&
        (state->magic != SIM_MAGIC || state->layout_version != SIM_LAYOUT_VERSION || state->layout_bytes != sizeof *state)) {
        munmap(state, sizeof *state);
        state = NULL;
    }
    return state;
}

struct sim_state *sim_attach(void)
{
    pthread_mutex_lock(&attach_mutex);
    const char *path = getenv("GPUSLICE_SIM_STATE");
    if (!mapped && path && *path) {
        snprintf(state_path, sizeof state_path, "%s", path);
        witness_fd = open_beside(".alive");
        struct sim_state *state = witness_fd < 0 ? NULL : map_file(path);
        if (state) {
            set_identity(state);
            pthread_atfork(NULL, NULL, before_child_runs);
        }
        __atomic_store_n(&mapped, state, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&attach_mutex);
    return mapped;
}

struct sim_state *sim_state(void) { return __atomic_load_n(&mapped, __ATOMIC_ACQUIRE); }

void sim_forget_self(void)
{
    /* The inherited descriptor shares the parent's locks: close it, so that they end with the parent. */
    if (witness_fd >= 0)
        close(witness_fd);
    witness_fd = open_beside(".alive");
    atomic_store(&self_slot, SIM_PROCESSES);
    if (mapped)
        set_identity(mapped);
}

/* ------------------------------------------------------------------------------------------- the lock */

static bool owner_is_dead(uint64_t owner)
{
    short found = F_UNLCK;
    return witness(SIM_PROCESSES + owner, F_OFD_GETLK, F_WRLCK, &found) && found == F_UNLCK;
}

static bool take_from(uint64_t owner)
{
    return atomic_compare_exchange_strong_explicit(&mapped->lock, &owner, identity, memory_order_acquire, memory_order_relaxed);
}

/* A dead owner's lock is taken over by one compare-and-swap; the one that gets it puts the accounts in order. */
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

/* ---- numbers of processes in this one's namespace */

/* Asked of the kernel once for each process: a list of processes, whose driver would not look into /proc, asks for each of them. */
static uint64_t namespace_here(void)
{
    static _Atomic uint64_t known;
    static _Atomic pid_t asked_by;
    struct stat about;
    if (asked_by != getpid()) {
        known = stat("/proc/self/ns/pid", &about) == 0 ? (uint64_t)about.st_ino : 0;
        asked_by = getpid();
    }
    return known;
}

/* POSIX locks, unlike the witness's, name their owner, and the kernel translates the number for the process that asks. A process
 * loses them when it closes any descriptor of the file, so it never does. */
static int32_t pid_by_lock(uint32_t slot)
{
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)slot, .l_len = 1};
    if (number_fd < 0)
        number_fd = open_beside(".pids");
    return fcntl(number_fd, F_GETLK, &lock) == 0 && lock.l_type != F_UNLCK && lock.l_pid > 0 ? lock.l_pid : 0;
}

static void lock_number(uint32_t slot)
{
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)slot, .l_len = 1};
    if (number_fd < 0)
        number_fd = open_beside(".pids");
    fcntl(number_fd, F_SETLK, &lock);
}

int32_t sim_pid_here(uint32_t slot)
{
    const struct sim_process *process = &mapped->processes[slot];
    return process->pid_namespace == namespace_here() ? process->pid : pid_by_lock(slot);
}

bool sim_in_own_namespace(void)
{
    uint64_t here = namespace_here();
    return here && mapped->pid_namespace && here != mapped->pid_namespace;
}

/* ---- the table */

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

/* ---- memory that nobody's process holds (rmobjexportimport.c of NVIDIA's open kernel modules: a kernel client of its own
 * keeps an exported object until its descriptor is closed, "even if the source rm client gets destroyed") */

/* One file, as /dev/nvidiactl is, whose open files are told apart by their offset: nobody reads or writes there. A lock
 * belongs to the open file behind a descriptor, so it lasts while any process has a copy of that. */
#define EXPORT_BYTES 4096

static struct flock lock_of_export(uint64_t number)
{
    return (struct flock){.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)(number * EXPORT_BYTES), .l_len = 1};
}

static void drop_closed_exports(void)
{
    int file = mapped->exports ? open_beside(".exports") : -1;
    for (uint32_t index = 1; file >= 0 && mapped->exports && index < mapped->record_high; index++) {
        const struct sim_record *record = &mapped->records[index];
        if (!record->live || record->process != SIM_NOBODY)
            continue;
        struct flock lock = lock_of_export(record->address);
        if (fcntl(file, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK)
            continue;
        sim_release_locked(index);
        mapped->exports--;
    }
    if (file >= 0) /* else no descriptor is left to ask with */
        close(file);
}

/* A descriptor of the memory behind a record: `content` for those that import it, behind the record that keeps it. */
int sim_export(uint32_t target, const void *content, size_t bytes)
{
    uint64_t number = atomic_fetch_add(&mapped->exported, 1) + 1;
    struct flock lock = lock_of_export(number);
    off_t place = lock.l_start;
    int file = open_beside(".exports");
    struct sim_kept kept = {0};
    bool written = file >= 0 && fcntl(file, F_OFD_SETLK, &lock) == 0;
    if (written)
        kept = sim_keep(target, number);
    written = written && kept.record && pwrite(file, &kept, sizeof kept, place) == (ssize_t)sizeof kept &&
              pwrite(file, content, bytes, place + (off_t)sizeof kept) == (ssize_t)bytes &&
              lseek(file, place, SEEK_SET) == place;
    if (!written && file >= 0) {
        close(file);
        return -1;
    }
    return file;
}

bool sim_exported(int file, struct sim_kept *kept, void *content, size_t bytes)
{
    off_t place = lseek(file, 0, SEEK_CUR);
    return place > 0 && pread(file, kept, sizeof *kept, place) == (ssize_t)sizeof *kept &&
           pread(file, content, bytes, place + (off_t)sizeof *kept) == (ssize_t)bytes;
}

void sim_reap(void)
{
    for (uint32_t slot = 0; slot < mapped->process_high; slot++)
        if (mapped->processes[slot].live && !slot_is_alive(slot))
            empty_slot(slot);
    drop_closed_exports();
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
    if (mapped->process_high == 1 && sim_self_if_any() == 0 && !mapped->exports)
        return; /* nobody else was ever here */
    if (sim_monotonic_ns() - atomic_load_explicit(&last_reap_ns, memory_order_relaxed) > 1000000u)
        sim_reap_now();
}

uint64_t sim_host_address;

static void fill_slot(struct sim_process *process)
{
    memset(process, 0, sizeof *process);
    process->pid = (int32_t)getpid();
    process->start_time = sim_start_time(process->pid);
    process->pid_namespace = namespace_here();
    process->contained = getenv("NVIDIA_VISIBLE_DEVICES") != NULL;
    sim_cgroups_of(process->pid, process->cgroups);
    process->host_address = sim_host_address;
    atomic_store_explicit(&process->live, 1, memory_order_release);
}

/* What this library held when it was closed with dlclose and is now opened again: the descriptor that says so is still
 * open, and nobody knows its number any more. */
static bool is_ours(const struct sim_process *process)
{
    return process->live && process->pid == (int32_t)getpid() && process->pid_namespace == namespace_here() &&
           process->start_time == sim_start_time(process->pid);
}

static uint32_t take_slot(void)
{
    sim_reap();
    for (uint32_t slot = 0; slot < SIM_PROCESSES; slot++) {
        bool ours = slot < mapped->process_high && is_ours(&mapped->processes[slot]);
        if (ours)
            empty_slot(slot);
        else if (mapped->processes[slot].live || !witness(slot, F_OFD_SETLK, F_WRLCK, NULL))
            continue;
        if (slot >= mapped->process_high)
            mapped->process_high = slot + 1;
        fill_slot(&mapped->processes[slot]);
        lock_number(slot);
        return slot;
    }
    return SIM_PROCESSES;
}

uint32_t sim_self_if_any(void) { return atomic_load_explicit(&self_slot, memory_order_acquire); }

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
