/* Where a thread allocates: its current context, or a stream's. */
#ifndef GPUSLICE_PLACE_H
#define GPUSLICE_PLACE_H

#include "policy/pool_accounts.h"

struct gs_place gs_current_place(void); /* `card` is NULL without a current context */
struct gs_place gs_stream_place(CUstream stream);
/* This thread's number if its own default stream is meant, else 0. */
uint64_t gs_own_stream(CUstream stream, bool own_stream);
bool gs_is_capturing(CUstream stream, bool own_stream);
struct gs_giver gs_giver_of(CUstream stream, bool own_stream);
void gs_contexts_changed(void);

/* Who wants to know of a current context on a card that had none, since it was created without a call that we intercept. */
typedef void (*gs_on_context)(struct gs_card *card, CUdevice device, CUcontext context);
#define GS_ON_CONTEXT(noticed)                                                                                                 \
    static const gs_on_context noticed##_on_context __attribute__((used, section("gs_on_context"))) = noticed

#endif
