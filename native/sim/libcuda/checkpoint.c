/* Checkpoints: a process's device memory leaves the card and comes back. Anyone who may can ask for it by pid.
 *
 * As NVIDIA's cuda-checkpoint describes it (github.com/NVIDIA/cuda-checkpoint, README): a locked process's calls wait;
 * work that was submitted, host functions too, is completed first; all of the card's resources are released, contexts'
 * own as well; drivers from 550 on, memory shared between processes from 610 on, managed memory not at all. The copy is in host
 * memory of the process itself, and so in its cgroup. A process whose restore met a full card is lost: no later restore
 * succeeds, and its calls never return (reported of driver 580.95; CU_PROCESS_STATE_FAILED of cuda.h). */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <time.h>

#include "driver.h"

enum { RUNNING, LOCKED, CHECKPOINTED, FAILED };
enum { PAGE_BYTES = 4096, PAGES_AT_ONCE = 1024 };
#define HOST_BYTES (UINT64_C(1) << 40) /* addresses; less where a process may not have as many */

/* ---- what a checkpoint copies to the host ---- */

static uint64_t room_bytes;

void checkpoint_make_room(void)
{
    for (uint64_t bytes = HOST_BYTES; !sim_host_address && bytes >= MIB; bytes /= 2) {
        void *room = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        sim_host_address = room == MAP_FAILED ? 0 : (uint64_t)(uintptr_t)room;
        room_bytes = bytes;
    }
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0); /* the copy is made by whoever asks for it */
}

/* Under the lock; NULL when the pid uses no card. */
static struct sim_process *process_of(int pid)
{
    struct sim_state *state = sim_state();
    for (uint32_t slot = 0; slot < state->process_high; slot++)
        if (state->processes[slot].live && sim_pid_here(slot) == pid)
            return &state->processes[slot];
    return NULL;
}

/* Writes to so many bytes of that process's host memory, a page each: they are charged to the process. */
static CUresult copy_to_host(int pid, uint64_t bytes)
{
    static const char something[PAGES_AT_ONCE] = {1};
    sim_lock();
    struct sim_process *process = process_of(pid);
    uint64_t at = process ? process->host_address : 0, end = at + bytes;
    if (process)
        process->host_bytes = bytes;
    sim_unlock();
    while (at && at < end) {
        struct iovec local = {(void *)(uintptr_t)something, 0}, remote[PAGES_AT_ONCE];
        unsigned pages = 0;
        for (; pages < PAGES_AT_ONCE && at < end; pages++, at += PAGE_BYTES)
            remote[pages] = (struct iovec){(void *)(uintptr_t)at, 1};
        local.iov_len = pages;
        if (process_vm_writev(pid, &local, 1, remote, pages, 0) != (ssize_t)pages)
            return errno == EPERM ? CUDA_ERROR_NOT_PERMITTED : CUDA_ERROR_OUT_OF_MEMORY;
    }
    return CUDA_SUCCESS;
}

void checkpoint_await(struct sim_process *self)
{
    while (__atomic_load_n(&self->checkpoint, __ATOMIC_RELAXED))
        clock_nanosleep(CLOCK_MONOTONIC, 0, &(struct timespec){.tv_nsec = 500000}, NULL);
    uint64_t bytes = __atomic_load_n(&self->host_bytes, __ATOMIC_RELAXED);
    if (bytes && __atomic_compare_exchange_n(&self->host_bytes, &bytes, 0, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        madvise((void *)(uintptr_t)sim_host_address, bytes < room_bytes ? bytes : room_bytes, MADV_DONTNEED);
}

/* ---- states ---- */

/* Under the lock. */
static bool has_work(uint32_t slot)
{
    struct sim_state *state = sim_state();
    for (uint32_t i = 0; i < state->queue_high; i++) {
        struct sim_queue *queue = &state->queues[i];
        if (!queue->live || queue->process != slot)
            continue;
        sim_engine_advance(queue->card, sim_monotonic_ns());
        if (queue->finished < queue->made)
            return true;
    }
    return false;
}

/* Under the lock: all that the process has on cards. False if it has memory of a kind that this driver cannot take off. */
static bool measure(uint32_t slot, uint64_t *bytes)
{
    const struct sim_state *state = sim_state();
    bool shares = strtoul(state->driver_version, NULL, 10) >= 610;
    *bytes = 0;
    for (uint32_t index = 1; index < state->record_high; index++) {
        const struct sim_record *record = &state->records[index];
        if (!record->live || record->process != slot)
            continue;
        if (record->kind == SIM_MANAGED || (!shares && sim_is_imported(index)))
            return false;
        *bytes += record->bytes;
    }
    return true;
}

/* Until the work that was submitted has ended, or for so long (0: for good). */
static CUresult wait_for_work(int pid, uint64_t longest_ns, uint64_t *bytes)
{
    for (uint64_t began_ns = sim_monotonic_ns();;) {
        sim_lock();
        sim_reap();
        const struct sim_process *process = process_of(pid);
        uint32_t slot = process ? (uint32_t)(process - sim_state()->processes) : 0;
        bool busy = process && has_work(slot), can_move = !process || measure(slot, bytes);
        sim_unlock();
        if (!can_move)
            return CUDA_ERROR_NOT_SUPPORTED;
        if (!busy)
            return CUDA_SUCCESS;
        if (longest_ns && sim_monotonic_ns() - began_ns > longest_ns)
            return CUDA_ERROR_NOT_READY;
        clock_nanosleep(CLOCK_MONOTONIC, 0, &(struct timespec){.tv_nsec = 500000}, NULL);
    }
}

/* From one state to another; memory moves on the way when there is something to do. */
static CUresult change(int pid, uint32_t from, uint32_t to, bool (*move)(uint32_t slot))
{
    TRY(driver_started());
    sim_lock();
    sim_reap();
    struct sim_process *process = process_of(pid);
    CUresult result = !process                                                      ? CUDA_ERROR_INVALID_VALUE
                      : process->checkpoint != from                                 ? CUDA_ERROR_ILLEGAL_STATE
                      : move && !move((uint32_t)(process - sim_state()->processes)) ? CUDA_ERROR_OUT_OF_MEMORY
                                                                                    : CUDA_SUCCESS;
    if (result == CUDA_SUCCESS)
        process->checkpoint = to;
    else if (result == CUDA_ERROR_OUT_OF_MEMORY)
        process->checkpoint = FAILED;
    sim_unlock();
    return result;
}

/* `arguments`: CUcheckpointLockArgs, of which the first word is timeoutMs. When that is over the process goes on running. */
EXPORT CUresult cuCheckpointProcessLock(int pid, const unsigned *arguments)
{
    uint64_t bytes, longest_ns = arguments ? *arguments * UINT64_C(1000000) : 0;
    TRY(change(pid, RUNNING, LOCKED, NULL));
    CUresult result = longest_ns ? wait_for_work(pid, longest_ns, &bytes) : CUDA_SUCCESS;
    if (result == CUDA_ERROR_NOT_READY)
        change(pid, LOCKED, RUNNING, NULL);
    return result == CUDA_ERROR_NOT_READY ? result : CUDA_SUCCESS;
}

/* "The GPU memory is copied to the host" (cuda-checkpoint's README), over the card's link: PCI Express carries 250 MB/s a lane in
 * its first generation, twice as much in each later one (PCI-SIG, PCI Express Base Specification). */
static void copy_over_links(int pid)
{
    const struct sim_state *state = sim_state();
    uint64_t longest_ns = 0;
    sim_lock();
    const struct sim_process *process = process_of(pid);
    for (uint32_t index = 1; process && index < state->record_high; index++) {
        static uint64_t bytes[SIM_CARDS]; /* under the lock */
        const struct sim_record *record = &state->records[index];
        if (index == 1)
            memset(bytes, 0, sizeof bytes);
        if (!record->live || record->process != (uint32_t)(process - state->processes))
            continue;
        const struct sim_card *card = &state->cards[record->card];
        uint64_t lanes = card->pcie_width == SIM_ABSENT ? 16 : card->pcie_width;
        uint64_t generation = card->pcie_generation == SIM_ABSENT ? 3 : card->pcie_generation;
        bytes[record->card] += record->bytes;
        uint64_t ns = bytes[record->card] * 4 / (lanes << (generation ? generation - 1 : 0));
        longest_ns = ns > longest_ns ? ns : longest_ns;
    }
    sim_unlock();
    clock_nanosleep(
        CLOCK_MONOTONIC, 0,
        &(struct timespec){.tv_sec = (time_t)(longest_ns / 1000000000u), .tv_nsec = (long)(longest_ns % 1000000000u)}, NULL);
}

static CUresult state_is(int pid, uint32_t wanted)
{
    sim_lock();
    const struct sim_process *process = process_of(pid);
    CUresult result = !process                        ? CUDA_ERROR_INVALID_VALUE
                      : process->checkpoint != wanted ? CUDA_ERROR_ILLEGAL_STATE
                                                      : CUDA_SUCCESS;
    sim_unlock();
    return result;
}

EXPORT CUresult cuCheckpointProcessCheckpoint(int pid, void *arguments)
{
    (void)arguments;
    may_wait("cuCheckpointProcessCheckpoint");
    uint64_t bytes = 0;
    TRY(driver_started());
    TRY(state_is(pid, LOCKED));
    TRY(wait_for_work(pid, 0, &bytes));
    TRY(copy_to_host(pid, bytes));
    copy_over_links(pid);
    return change(pid, LOCKED, CHECKPOINTED, sim_park);
}

EXPORT CUresult cuCheckpointProcessRestore(int pid, void *arguments)
{
    (void)arguments;
    may_wait("cuCheckpointProcessRestore");
    TRY(change(pid, CHECKPOINTED, LOCKED, sim_unpark));
    copy_over_links(pid);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCheckpointProcessUnlock(int pid, void *arguments)
{
    (void)arguments;
    return change(pid, LOCKED, RUNNING, NULL);
}

EXPORT CUresult cuCheckpointProcessGetState(int pid, int *found)
{
    TRY(driver_started());
    if (!found)
        return CUDA_ERROR_INVALID_VALUE;
    sim_lock();
    const struct sim_process *process = process_of(pid);
    if (process)
        *found = (int)process->checkpoint;
    sim_unlock();
    return process ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuCheckpointProcessGetRestoreThreadId(int pid, int *thread)
{
    TRY(driver_started());
    if (!thread)
        return CUDA_ERROR_INVALID_VALUE;
    *thread = pid;
    return CUDA_SUCCESS;
}
