/* The share of compute: launches wait while the container has used up its credit. */
#ifndef GPUSLICE_THROTTLE_H
#define GPUSLICE_THROTTLE_H

#include "policy/card_queue.h"
#include "policy/core.h"

/* True once the driver is bound and no card has a share: then a launch is a launch. */
extern bool gs_launch_freely;

/* `prefix`: before the paths in which the containers of a card meet. */
void gs_throttle_start(const struct gs_card *cards, uint32_t count, const char *prefix);
/* This process has a context on the card: its neighbours are told, long before its first launch. */
void gs_throttle_meet(struct gs_card *card);
void gs_throttle_forget(void); /* in a forked child */

/* Around every piece of work. */
struct gs_work {
    struct gs_place place; /* card NULL: not throttled */
    struct gs_batch *batch; /* that it is timed with; NULL: it is not */
    struct gs_stream stream;
    uint64_t key;
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
