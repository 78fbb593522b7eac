/* Reserve, call, settle: before the driver is asked for memory, the container's limit is. */
#ifndef GPUSLICE_RESERVE_H
#define GPUSLICE_RESERVE_H

#include "policy/cards.h"

/* Where it succeeds, the call is in flight until it is settled. */
bool gs_reserve(struct gs_card *card, uint64_t bytes);
bool gs_reserve_quietly(struct gs_card *card, uint64_t bytes); /* a refusal is not counted */

#endif
