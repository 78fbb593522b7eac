#ifndef GPUSLICE_CONTEXTS_H
#define GPUSLICE_CONTEXTS_H

#include "policy/cards.h"

/* A context is current that we did not see being made: it is taken into the accounts. */
void gs_context_noticed(struct gs_card *card, CUdevice device, CUcontext context);

#endif
