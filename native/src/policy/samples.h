/* NVML's samples of which processes worked on a card, and which of their PIDs is ours. */
#ifndef GPUSLICE_SAMPLES_H
#define GPUSLICE_SAMPLES_H

#include "policy/cards.h"
#include "policy/share.h"

/* What this process did on the card since the last sample that it read. */
struct gs_activity {
    uint64_t busy_ns; /* finished work */
    uint64_t idle_ns; /* how long nothing has been in flight */
};

/* To be called before this process's first work on a card: work there is then somebody else's. */
void gs_samples_begin(const struct gs_card *card);
/* False if NVML cannot tell, or has nothing newer than what was seen. `whole`: no sample was missed since the last
 * one. */
bool gs_sample(const struct gs_card *card, const struct gs_activity *activity, bool whole, struct gs_share_sample *sum);

#endif
