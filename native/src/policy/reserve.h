/* Reserve, call, settle: the container's limit is checked before the driver is asked for memory. */
#ifndef GPUSLICE_RESERVE_H
#define GPUSLICE_RESERVE_H

#include "policy/cards.h"

/* On success, the call is in flight until it is settled. */
bool gs_reserve(struct gs_card *card, uint64_t bytes);
bool gs_reserve_quietly(struct gs_card *card, uint64_t bytes); /* a refusal is not counted */

#endif
