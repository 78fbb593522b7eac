/* Streams that give blocks back to a pool (policy/pool_givers.h). */
#include "policy/pool_givers.h"

#include <stddef.h>

static uint64_t last_given;

void gs_giver_mark(struct gs_giver *giver)
{
    CUcontext context = giver->context;
    GS_RELAX_CAPTURE;
    if (!context && DRIVER(cuStreamGetCtx)(giver->stream, &context) != CUDA_SUCCESS)
        DRIVER(cuCtxGetCurrent)(&context);
    GS_IN_CONTEXT(context);
    if (giver->event || DRIVER(cuEventCreate)(&giver->event, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS)
        giver->own ? DRIVER(cuEventRecord_ptsz)(giver->event, NULL) : DRIVER(cuEventRecord)(giver->event, giver->stream);
}

static bool is_capturing(const struct gs_giver *giver)
{
    int status = 0;
    return !giver->event && (DRIVER(cuStreamIsCapturing)(giver->stream, &status) != CUDA_SUCCESS || status);
}

/* Whether the stream has got to all that it was to free. */
static bool has_given(const struct gs_giver *giver)
{
    GS_RELAX_CAPTURE;
    int result = !giver->bytes  ? CUDA_SUCCESS
                 : giver->event ? DRIVER(cuEventQuery)(giver->event)
                                : DRIVER(cuStreamQuery)(giver->stream);
    return result != CUDA_ERROR_NOT_READY;
}

void gs_giver_forget(struct gs_giver *giver)
{
    if (giver->event)
        DRIVER(cuEventDestroy_v2)(giver->event);
    *giver = (struct gs_giver){0};
}

bool gs_giver_is_same(const struct gs_giver *one, const struct gs_giver *other)
{
    return one->stream == other->stream && one->own == other->own && one->context == other->context &&
           (one->own || !one->event);
}

void gs_givers_add(struct gs_giver givers[GS_GIVERS], const struct gs_giver *on, uint64_t bytes, bool in_use)
{
    struct gs_giver *to = givers, *end = givers + GS_GIVERS;
    for (struct gs_giver *each = givers; each < end && !gs_giver_is_same(to, on); each++)
        if (gs_giver_is_same(each, on) || each->last < to->last)
            to = each;
    if (!gs_giver_is_same(to, on)) {
        if (to->event && in_use) /* a thread may be waiting for it */
            return;
        gs_giver_forget(to);
        *to = *on;
    }
    to->bytes += bytes;
    to->last = ++last_given;
    if (to->own)
        gs_giver_mark(to);
}

struct gs_giver *gs_givers_newest(struct gs_giver givers[GS_GIVERS], uint64_t bytes, bool in_use)
{
    struct gs_giver *newest = NULL;
    for (struct gs_giver *each = givers; each < givers + GS_GIVERS; each++) {
        if (each->bytes < bytes || is_capturing(each))
            continue;
        if (!in_use && has_given(each))
            gs_giver_forget(each); /* these blocks are everybody's by now */
        else if (!newest || each->last > newest->last)
            newest = each;
    }
    return newest;
}

bool gs_givers_have_given(const struct gs_giver givers[GS_GIVERS])
{
    bool given = true;
    for (int i = 0; i < GS_GIVERS && given; i++)
        given = has_given(&givers[i]);
    return given;
}
