/* Wraps every launch, which waits if its container has used up its share of compute. */
#ifndef GPUSLICE_LAUNCHES_H
#define GPUSLICE_LAUNCHES_H

#include "policy/throttle.h"

/* True once the driver is bound and no card has a compute share: launches then go straight to the driver. */
extern bool gs_launch_freely;

struct gs_work gs_launch_begin(CUstream stream, bool own_stream, uint64_t key);
#define THROTTLE(call, stream, own_stream, key)                                                                                \
    struct gs_work work = gs_launch_begin(stream, own_stream, key);                                                            \
    int result = call;                                                                                                         \
    gs_work_end(&work, result == CUDA_SUCCESS);                                                                                \
    return result;

/* A function that does work on the card: its parameters and arguments, whether it may go straight to the driver, how it is called
 * otherwise, its stream, and the key by which such work is known. What may wait is a function of its own: the other saves no
 * register. */
#define THROTTLED(symbol, parameters, arguments, straight, call, stream, own_stream, key)                                      \
    static __attribute__((noinline)) int throttled_##symbol parameters { THROTTLE(call, stream, own_stream, key) }             \
    int symbol parameters                                                                                                      \
    {                                                                                                                          \
        if (gs_likely(__atomic_load_n(&gs_launch_freely, __ATOMIC_RELAXED) && (straight)))                                     \
            return DRIVER(symbol) arguments;                                                                                   \
        return throttled_##symbol arguments;                                                                                   \
    }

/* A context was created and NVML does not show what this process holds: from now on kernels' code is measured. */
void gs_watch_kernels(void);

#endif
