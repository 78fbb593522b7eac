/* Other processes' memory that is open here, by address. */
#ifndef GPUSLICE_OPENED_H
#define GPUSLICE_OPENED_H

#include "policy/cards.h"

/* The driver returns the same address each time, and each opening needs a closing. The memory is on its maker's card,
 * which need not be the current one: programs with several cards open their peers' buffers like this. Returns that
 * card. */
struct gs_card *gs_opened_add(struct gs_place place, CUdeviceptr address);
/* Closes it on the card on which it was opened, whichever card is current now. */
void gs_opened_remove(CUdeviceptr address);
/* A destroyed context closes what was opened in it. */
void gs_opened_drop_context(CUcontext context);

#endif
