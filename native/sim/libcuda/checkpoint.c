/* Checkpoints: a process's device memory leaves the card and comes back. Anyone who may can ask for it by pid.
 *
 * As NVIDIA's cuda-checkpoint describes it (github.com/NVIDIA/cuda-checkpoint, README): a locked process's calls wait;
 * work that was submitted, host functions too, is completed first; all of the card's resources are released, contexts'
 * own as well; drivers from 550 on, memory shared between processes from 610 on. */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "driver.h"

enum { RUNNING, LOCKED, CHECKPOINTED };

/* Under the lock; NULL when the pid uses no card. */
static struct sim_process *process_of(int pid)
{
    struct sim_state *state = sim_state();
    for (uint32_t slot = 0; slot < state->process_high; slot++)
        if (state->processes[slot].live && sim_pid_here(slot) == pid)
            return &state->processes[slot];
    return NULL;
}

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

static bool shares_memory(uint32_t slot)
{
    const struct sim_state *state = sim_state();
    for (uint32_t index = 1; index < state->record_high; index++)
        if (state->records[index].live && state->records[index].process == slot && sim_is_imported(index))
            return true;
    return false;
}

static CUresult wait_for_work(int pid)
{
    for (;;) {
        sim_lock();
        sim_reap();
        const struct sim_process *process = process_of(pid);
        bool busy = process && has_work((uint32_t)(process - sim_state()->processes));
        bool shared = process && shares_memory((uint32_t)(process - sim_state()->processes));
        sim_unlock();
        if (shared && strtoul(sim_state()->driver_version, NULL, 10) < 610)
            return CUDA_ERROR_NOT_SUPPORTED;
        if (!busy)
            return CUDA_SUCCESS;
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
    sim_unlock();
    return result;
}

EXPORT CUresult cuCheckpointProcessLock(int pid, void *arguments)
{
    (void)arguments;
    return change(pid, RUNNING, LOCKED, NULL);
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

EXPORT CUresult cuCheckpointProcessCheckpoint(int pid, void *arguments)
{
    (void)arguments;
    may_wait("cuCheckpointProcessCheckpoint");
    TRY(driver_started());
    TRY(wait_for_work(pid));
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
