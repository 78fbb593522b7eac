/* Events: marks in a stream's work, with the moment at which they were passed. */
#include <string.h>

#include "driver.h"
#include "graph.h"

#define DISABLE_TIMING 2u

struct event {
    struct object object;
    struct device *device;
    unsigned flags;
    bool recorded;
    uint64_t mark, time_ns;
    struct graph *capturing;
    struct node *captured_last;
};

static CUresult event_of(CUevent handle, struct event **event)
{
    TRY(driver_ready());
    if (!object_is(handle, OBJECT_EVENT))
        return CUDA_ERROR_INVALID_HANDLE;
    *event = handle;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventCreate(CUevent *made, unsigned flags)
{
    struct context *context;
    TRY(context_current(&context));
    if (!made || flags & ~7u || ((flags & 4) && !(flags & DISABLE_TIMING)))
        return CUDA_ERROR_INVALID_VALUE;
    struct event *event = object_new(OBJECT_EVENT, sizeof *event, context);
    if (!event)
        return CUDA_ERROR_OUT_OF_MEMORY;
    event->device = context->device;
    event->flags = flags;
    *made = event;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventDestroy_v2(CUevent handle)
{
    struct event *event;
    TRY(event_of(handle, &event));
    object_free(event);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventDestroy(CUevent handle) { return cuEventDestroy_v2(handle); }

EXPORT CUresult cuEventRecordWithFlags(CUevent handle, CUstream on, unsigned flags)
{
    struct event *event;
    struct stream *stream;
    TRY(event_of(handle, &event));
    TRY(stream_of(on, &stream));
    if (flags & ~1u)
        return CUDA_ERROR_INVALID_VALUE;
    if (event->object.owner->memory != stream->object.owner->memory) /* "must be from the same context" */
        return CUDA_ERROR_INVALID_HANDLE;
    event->capturing = stream->capturing;
    event->captured_last = stream->captured_last;
    if (stream->capturing)
        return CUDA_SUCCESS;
    event->device = stream->device;
    event->recorded = true;
    event->mark = stream_mark(stream);
    event->time_ns = sim_engine_reached(event->mark) ? sim_monotonic_ns() : 0;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventRecord(CUevent event, CUstream stream) { return cuEventRecordWithFlags(event, stream, 0); }
EXPORT CUresult cuEventRecord_ptsz(CUevent event, CUstream s) { return cuEventRecordWithFlags(event, PER_THREAD(s), 0); }

EXPORT CUresult cuEventRecordWithFlags_ptsz(CUevent event, CUstream stream, unsigned flags)
{
    return cuEventRecordWithFlags(event, PER_THREAD(stream), flags);
}

EXPORT CUresult cuEventQuery(CUevent handle)
{
    struct event *event;
    TRY(capture_permits());
    TRY(event_of(handle, &event));
    if (event->capturing)
        return capture_asked(event->capturing);
    if (!event->recorded)
        return CUDA_SUCCESS;
    TRY(device_fault(event->device));
    return sim_engine_reached(event->mark) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

EXPORT CUresult cuEventSynchronize(CUevent handle)
{
    struct event *event;
    TRY(event_of(handle, &event));
    if (event->capturing)
        return capture_asked(event->capturing);
    if (!event->recorded)
        return CUDA_SUCCESS;
    may_wait("cuEventSynchronize");
    sim_engine_wait(event->mark);
    pools_settle(event->device);
    return device_fault(event->device);
}

/* A moment that was not asked for before too many others is taken to be now. */
static uint64_t time_of(struct event *event)
{
    if (!event->time_ns)
        event->time_ns = sim_engine_time(event->mark);
    if (!event->time_ns)
        event->time_ns = sim_monotonic_ns();
    return event->time_ns;
}

EXPORT CUresult cuEventElapsedTime(float *milliseconds, CUevent from, CUevent to)
{
    struct event *start, *end;
    TRY(event_of(from, &start));
    TRY(event_of(to, &end));
    if (!milliseconds)
        return CUDA_ERROR_INVALID_VALUE;
    if (!start->recorded || !end->recorded || (start->flags | end->flags) & DISABLE_TIMING)
        return CUDA_ERROR_INVALID_HANDLE;
    TRY(cuEventQuery(from));
    TRY(cuEventQuery(to));
    *milliseconds = (float)((double)((int64_t)time_of(end) - (int64_t)time_of(start)) / 1e6);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventElapsedTime_v2(float *milliseconds, CUevent from, CUevent to)
{
    return cuEventElapsedTime(milliseconds, from, to);
}

/* A captured event draws the waiting stream into the capture. */
EXPORT CUresult cuStreamWaitEvent(CUstream handle, CUevent on, unsigned flags)
{
    struct event *event;
    struct stream *stream;
    TRY(stream_of(handle, &stream));
    TRY(event_of(on, &event));
    if (flags & ~1u)
        return CUDA_ERROR_INVALID_VALUE;
    if (event->capturing && !stream->capturing) {
        stream->capturing = event->capturing;
        stream->captured_last = event->captured_last;
    }
    may_wait("cuStreamWaitEvent"); /* for room in the queue */
    if (!stream->capturing)
        stream_await(stream, event->mark);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamWaitEvent_ptsz(CUstream handle, CUevent event, unsigned flags)
{
    return cuStreamWaitEvent(PER_THREAD(handle), event, flags);
}

/* --------------------------------------------------------------------------------------- other processes */

EXPORT CUresult cuIpcGetEventHandle(CUipcEventHandle *out, CUevent handle)
{
    struct event *event;
    TRY(event_of(handle, &event));
    if (!out || !(event->flags & 4))
        return CUDA_ERROR_INVALID_VALUE;
    memset(out, 0, sizeof *out);
    memcpy(out, &event->device->card, sizeof event->device->card);
    return CUDA_SUCCESS;
}

/* An event of another process counts as reached: processes do not wait for each other here. */
EXPORT CUresult cuIpcOpenEventHandle(CUevent *made, CUipcEventHandle handle)
{
    (void)handle;
    return cuEventCreate(made, 4 | DISABLE_TIMING);
}
