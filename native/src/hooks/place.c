#include "hooks/place.h"

#include "policy/process_usage.h"
#include "system/at_fork.h"

enum { CU_STREAM_LEGACY = 1, CU_STREAM_PER_THREAD = 2 };

/* The linker defines these symbols as the start and the end of the section. */
extern const gs_on_context __start_gs_on_context[] __attribute__((visibility("hidden")));
extern const gs_on_context __stop_gs_on_context[] __attribute__((visibility("hidden")));

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
        for (const gs_on_context *on = __start_gs_on_context; on < __stop_gs_on_context; on++)
            (*on)(place.card, place.device, place.context);
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

/* Every thread has its own default stream, with the same handle: NULL in functions of that kind, CU_STREAM_PER_THREAD in all. */
uint64_t gs_own_stream(CUstream stream, bool own_stream)
{
    static _Atomic uint64_t last;
    static _Thread_local uint64_t number __attribute__((tls_model("initial-exec")));
    if ((uintptr_t)stream != CU_STREAM_PER_THREAD && !(own_stream && !stream))
        return 0;
    if (!number)
        number = atomic_fetch_add(&last, 1) + 1;
    return number;
}

bool gs_is_capturing(CUstream stream, bool own_stream)
{
    int status = 0;
    int result = own_stream ? DRIVER(cuStreamIsCapturing_ptsz)(stream, &status) : DRIVER(cuStreamIsCapturing)(stream, &status);
    return result == CUDA_SUCCESS && status != 0;
}

struct gs_giver gs_giver_of(CUstream stream, bool own_stream)
{
    uint64_t own = gs_own_stream(stream, own_stream);
    bool of_context = own || (uintptr_t)stream <= CU_STREAM_LEGACY;
    return (struct gs_giver){.stream = own      ? NULL
                                       : stream ? stream
                                                : (CUstream)(uintptr_t)CU_STREAM_LEGACY,
                             .context = of_context ? gs_current_place().context : NULL,
                             .own = own};
}
GS_AT_FORK(gs_contexts_changed);
