/* What was measured by difference holds until the driver's figure is heard, and no longer. */
#ifndef GPUSLICE_PROVISIONAL_H
#define GPUSLICE_PROVISIONAL_H

#include "policy/cards.h"

/* What the container holds of a card, less what its processes are seen to be charged too much. */
uint64_t gs_used_as_known(struct gs_card *card);
/* Takes room for these bytes that is there by the driver's figures. Waits for them where they may decide. */
bool gs_reserve_as_known(struct gs_card *card, uint64_t bytes);
/* Whether what is held passes the limit, by the driver's figures where they are to be had. */
bool gs_over_limit(struct gs_card *card);
/* What another container lent and has freed since is held here alone, and in this container's figures. Whether that passes the
 * limit: then nothing more is opened. */
bool gs_borrowed_too_much(struct gs_card *card);

#endif
