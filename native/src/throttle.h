/* The share of compute: launches wait while the container has used up its credit. */
#ifndef GPUSLICE_THROTTLE_H
#define GPUSLICE_THROTTLE_H

#include "core.h"

/* True once the driver is bound and no card has a share: then a launch is a launch. */
extern bool gs_launch_freely;

void gs_throttle_start(const struct gs_card *cards, uint32_t count);

/* Around every piece of work. The mark tells what was begun. */
struct gs_work {
    struct gs_card *card;
    CUevent start;
};
struct gs_work gs_work_begin(CUstream stream, bool own_stream);
void gs_work_end(struct gs_work work, CUstream stream, bool own_stream);

#define THROTTLED(call, stream, own_stream)                                                                            \
    do {                                                                                                               \
        if (gs_likely(__atomic_load_n(&gs_launch_freely, __ATOMIC_RELAXED)))                                           \
            return call;                                                                                               \
        struct gs_work work = gs_work_begin(stream, own_stream);                                                       \
        int result = call;                                                                                             \
        gs_work_end(work, stream, own_stream);                                                                         \
        return result;                                                                                                 \
    } while (0)

#endif
