#include "hooks/place.h"

#include "hooks/contexts.h"
#include "policy/driver_overhead.h"
#include "system/at_fork.h"

static uint32_t contexts_epoch = 1;

static _Thread_local struct {
    uint32_t epoch;
    struct gs_place place;
} seen __attribute__((tls_model("initial-exec")));

void gs_contexts_changed(void) { __atomic_add_fetch(&contexts_epoch, 1, __ATOMIC_RELEASE); }

struct gs_place gs_current_place(void)
{
    struct gs_place place = {0};
    uint32_t epoch = __atomic_load_n(&contexts_epoch, __ATOMIC_ACQUIRE);
    if (DRIVER(cuCtxGetCurrent)(&place.context) != CUDA_SUCCESS || !place.context)
        return place;
    if (seen.epoch == epoch && seen.place.context == place.context)
        return seen.place;
    if (DRIVER(cuCtxGetDevice)(&place.device) == CUDA_SUCCESS)
        place.card = gs_card_of_device(place.device);
    if (place.card && !gs_has_context(place.card))
        gs_context_noticed(place.card, place.device, place.context);
    if (place.card) {
        seen.place = place;
        seen.epoch = epoch;
    }
    return place;
}

struct gs_place gs_stream_place(CUstream stream)
{
    CUcontext context, popped;
    struct gs_place here = gs_current_place();
    /* 0, 1 and 2 are the default streams of the current context. */
    if ((uintptr_t)stream <= 2 || DRIVER(cuStreamGetCtx)(stream, &context) != CUDA_SUCCESS || context == here.context)
        return here;
    if (DRIVER(cuCtxPushCurrent_v2)(context) != CUDA_SUCCESS)
        return here;
    here = gs_current_place();
    DRIVER(cuCtxPopCurrent_v2)(&popped);
    return here;
}

/* NULL is the thread's own default stream in functions of that kind, and the context's in others; 1 and 2 are these by name. */
struct gs_giver gs_giver_of(CUstream stream, bool own_stream)
{
    uintptr_t name = (uintptr_t)stream ? (uintptr_t)stream : own_stream ? 2 : 1;
    return (struct gs_giver){.stream = (CUstream)name, .context = name <= 2 ? gs_current_place().context : NULL, .own = name == 2};
}
GS_AT_FORK(gs_contexts_changed);
