/* Reserve, call, settle: the container's limit is checked before the driver is asked for memory. */
#ifndef GPUSLICE_RESERVE_H
#define GPUSLICE_RESERVE_H

#include "policy/cards.h"

/* On success, the call is in flight until it is settled. */
bool gs_reserve(struct gs_card *card, uint64_t bytes);
bool gs_reserve_quietly(struct gs_card *card, uint64_t bytes); /* a refusal is not counted */

/* What the container holds of a card, less what its processes are known to be charged too much: a measurement by difference is valid
 * until the driver's figure is known, and no longer. */
uint64_t gs_used_by_figures(struct gs_card *card);
/* Whether more is held than the limit allows, according to the driver's figures where they are available. */
bool gs_over_limit(struct gs_card *card);
/* Memory that another container lent and has freed since is held by this one alone, and is in its figures. Returns
 * whether that exceeds the limit: then nothing more is opened. */
bool gs_borrowed_too_much(struct gs_card *card);

#endif
