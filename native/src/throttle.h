/* The share of compute: launches wait while the container has used up its credit. */
#ifndef GPUSLICE_THROTTLE_H
#define GPUSLICE_THROTTLE_H

#include "core.h"

/* True once the driver is bound and no card has a share: then a launch is a launch. */
extern bool gs_launch_freely;

void gs_throttle_start(const struct gs_card *cards, uint32_t count);
void gs_throttle_forget(void); /* in a forked child */

enum gs_work_kind { GS_KERNEL, GS_GRAPH, GS_WORK_KINDS };

/* Around every piece of work. */
struct gs_work {
    struct gs_place place; /* card NULL: not throttled */
    struct batch *batch;   /* that it is timed with; NULL: it is not */
    CUstream stream;
    enum gs_work_kind kind;
    bool own_stream;
};
struct gs_work gs_work_begin(CUstream stream, bool own_stream, enum gs_work_kind kind);
void gs_work_end(const struct gs_work *work, bool launched);

#define THROTTLED(call, stream, own_stream, kind)                                                                      \
    do {                                                                                                               \
        if (gs_likely(__atomic_load_n(&gs_launch_freely, __ATOMIC_RELAXED)))                                           \
            return call;                                                                                               \
        struct gs_work work = gs_work_begin(stream, own_stream, kind);                                                 \
        int result = call;                                                                                             \
        gs_work_end(&work, result == CUDA_SUCCESS);                                                                    \
        return result;                                                                                                 \
    } while (0)

#endif
