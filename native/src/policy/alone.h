/* Launches that need not be timed, because no other container wants the card. Nothing here calls the clock or reads claims
 * by itself, so that tests can run it in virtual time. */
#ifndef GPUSLICE_ALONE_H
#define GPUSLICE_ALONE_H

#include "policy/card_queue.h"

#define GS_NOT_COUNTED INT64_MAX

/* Zeros: every launch is timed. */
struct gs_alone {
    uint64_t until_ns; /* atomic: when it ends */
    int64_t left_ns;   /* atomic: how much may be launched until then, by the estimates; GS_NOT_COUNTED without neighbours */
    uint64_t timed_ns; /* when a launch was last timed, and so published, since it last began; 0: none was */
};

/* Whether no neighbour has wanted the card for a while, and none that begins now takes itself to be alone: what this
 * container launched last was published. The card must have kept up with what went untimed before: nothing timed is in
 * flight behind it any more, and there was time for it. */
bool gs_alone_may_begin(const struct gs_alone *alone, const struct gs_queue *queue, const struct gs_neighbourhood *beside,
                        uint64_t now_ns);
/* `now_ns`: from before the neighbours' claims were read. */
void gs_alone_begin(struct gs_alone *alone, const struct gs_neighbourhood *beside, uint64_t now_ns);
/* Takes the launch out of what is left. May be called without the lock. */
bool gs_alone_affords(struct gs_alone *alone, const struct gs_queue *queue, uint64_t key);

#endif
