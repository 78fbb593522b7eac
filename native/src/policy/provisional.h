/* A measurement by difference is valid until the driver's figure is known, and no longer. */
#ifndef GPUSLICE_PROVISIONAL_H
#define GPUSLICE_PROVISIONAL_H

#include "policy/cards.h"

/* What the container holds of a card, less what its processes are known to be charged too much. */
uint64_t gs_used_snapshot(struct gs_card *card);
/* Reserves these bytes if there is room according to the driver's figures. Waits for figures that may decide it. */
bool gs_reserve_by_figures(struct gs_card *card, uint64_t bytes);
/* Whether more is held than the limit allows, according to the driver's figures where they are available. */
bool gs_over_limit(struct gs_card *card);
/* Memory that another container lent and has freed since is held by this one alone, and is in its figures. Returns
 * whether that exceeds the limit: then nothing more is opened. */
bool gs_borrowed_too_much(struct gs_card *card);

#endif
