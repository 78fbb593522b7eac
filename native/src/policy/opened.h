/* Other processes' memory that is open here, by address. */
#ifndef GPUSLICE_OPENED_H
#define GPUSLICE_OPENED_H

#include "policy/cards.h"

/* The driver gives the same address each time; each opening wants a closing. The memory is its maker's card's, which need
 * not be the current one's: programs of several cards open their peers' buffers like this. That card. */
struct gs_card *gs_opened_add(struct gs_place place, CUdeviceptr address);
/* Whatever is current now: it was opened on the card that was current then. */
void gs_opened_remove(CUdeviceptr address);
/* A context that goes closes what was opened in it. */
void gs_opened_drop_context(CUcontext context);

#endif
