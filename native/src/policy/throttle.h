/* The share of compute: launches wait while the container has used up its credit. */
#ifndef GPUSLICE_THROTTLE_H
#define GPUSLICE_THROTTLE_H

#include "policy/core.h"

/* True once the driver is bound and no card has a share: then a launch is a launch. */
extern bool gs_launch_freely;

void gs_throttle_start(const struct gs_card *cards, uint32_t count);
void gs_throttle_forget(void); /* in a forked child */

/* What is launched: work of the same key is expected to take as long as last time. */
static inline uint64_t gs_work_key(const void *what, uint64_t blocks)
{
    return ((uint64_t)(uintptr_t)what ^ blocks * UINT64_C(0x9e3779b97f4a7c15)) * UINT64_C(0xff51afd7ed558ccd) >> 32;
}

/* Around every piece of work. */
struct gs_work {
    struct gs_place place; /* card NULL: not throttled */
    struct batch *batch;   /* that it is timed with; NULL: it is not */
    CUstream stream;
    uint64_t key;
    bool own_stream;
};
struct gs_work gs_work_begin(CUstream stream, bool own_stream, uint64_t key);
void gs_work_end(const struct gs_work *work, bool launched);

#define THROTTLED(call, stream, own_stream, key)                                                                       \
    do {                                                                                                               \
        if (gs_likely(__atomic_load_n(&gs_launch_freely, __ATOMIC_RELAXED)))                                           \
            return call;                                                                                               \
        struct gs_work work = gs_work_begin(stream, own_stream, key);                                                  \
        int result = call;                                                                                             \
        gs_work_end(&work, result == CUDA_SUCCESS);                                                                    \
        return result;                                                                                                 \
    } while (0)

#endif
