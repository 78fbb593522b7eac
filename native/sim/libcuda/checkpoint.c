/* Checkpoints: a process's device memory leaves the card and comes back. Anyone who may can ask for it by pid. */
#include "driver.h"

enum { RUNNING, LOCKED, CHECKPOINTED };

/* Under the lock; NULL when the pid uses no card. */
static struct sim_process *process_of(int pid)
{
    struct sim_state *state = sim_state();
    for (uint32_t slot = 0; slot < state->process_high; slot++)
        if (state->processes[slot].live && state->processes[slot].pid == pid)
            return &state->processes[slot];
    return NULL;
}

/* From one state to another; memory moves on the way when there is something to do. */
static CUresult change(int pid, uint32_t from, uint32_t to, bool (*move)(uint32_t slot))
{
    TRY(driver_ready());
    sim_lock();
    sim_reap();
    struct sim_process *process = process_of(pid);
    CUresult result = !process                             ? CUDA_ERROR_INVALID_VALUE
                      : process->checkpoint != from        ? CUDA_ERROR_ILLEGAL_STATE
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

EXPORT CUresult cuCheckpointProcessCheckpoint(int pid, void *arguments)
{
    (void)arguments;
    return change(pid, LOCKED, CHECKPOINTED, sim_park);
}

EXPORT CUresult cuCheckpointProcessRestore(int pid, void *arguments)
{
    (void)arguments;
    return change(pid, CHECKPOINTED, LOCKED, sim_unpark);
}

EXPORT CUresult cuCheckpointProcessUnlock(int pid, void *arguments)
{
    (void)arguments;
    return change(pid, LOCKED, RUNNING, NULL);
}

EXPORT CUresult cuCheckpointProcessGetState(int pid, int *found)
{
    TRY(driver_ready());
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
    TRY(driver_ready());
    if (!thread)
        return CUDA_ERROR_INVALID_VALUE;
    *thread = pid;
    return CUDA_SUCCESS;
}
