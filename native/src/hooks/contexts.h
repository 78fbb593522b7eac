#ifndef GPUSLICE_CONTEXTS_H
#define GPUSLICE_CONTEXTS_H

#include "policy/cards.h"

/* Adds to the accounts a current context that was created without a call that we intercept. */
void gs_context_noticed(struct gs_card *card, CUdevice device, CUcontext context);

#endif
