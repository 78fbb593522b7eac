/* Streams. Each is a sequence of work; different ones run at the same time as far as the card has room (state/engine.c).
 *
 * The legacy stream waits for all blocking streams of its context and they for it (CUDA C++ Programming Guide, "Implicit
 * Synchronization" and "Legacy default stream"); those made with CU_STREAM_NON_BLOCKING keep out of that.
 */
#include <stdlib.h>

#include "driver.h"

#define NON_BLOCKING 1u

static uint64_t last_id;

struct stream *stream_new(struct context *context, unsigned flags, int priority)
{
    const struct stream initial = {.device = context->device,
                                   .flags = flags,
                                   .priority = priority,
                                   .id = __atomic_add_fetch(&last_id, 1, __ATOMIC_RELAXED)};
    if (!(flags & NON_BLOCKING))
        __atomic_add_fetch(&context->blocking_streams, 1, __ATOMIC_RELAXED);
    return object_new_as(OBJECT_STREAM, sizeof initial, context, &initial);
}

/* Each thread has one of its own in every context. */
static struct stream *per_thread_stream(struct context *context)
{
    static _Thread_local struct stream *last SIM_NEAR;
    static _Thread_local uint64_t id SIM_NEAR;
    if (object_lives(last, OBJECT_STREAM) && last->id == id && last->object.owner == context)
        return last;
    last = stream_new(context, 0, 0);
    if (last) {
        last->per_thread = true;
        id = last->id;
    }
    return last;
}

/* How CUDA_DEVICE_MAX_CONNECTIONS spreads streams over a card's work queues: in turn. */
static uint32_t connection_of(const struct stream *stream)
{
    static _Atomic unsigned connections;
    if (!connections) {
        const char *said = getenv("CUDA_DEVICE_MAX_CONNECTIONS");
        long count = said ? strtol(said, NULL, 10) : 8;
        connections = count<1 ? 1 : count>(long) SIM_CONNECTIONS ? SIM_CONNECTIONS : (unsigned)count;
    }
    return (uint32_t)(stream->id % connections);
}

static void put_behind(struct stream *stream, uint64_t mark)
{
    if (!mark)
        return;
    __atomic_store_n(&stream->mark, mark, __ATOMIC_RELEASE);
    uint64_t *last = &stream->object.owner->memory->marks[connection_of(stream)], before = *last;
    while (before < mark && !__atomic_compare_exchange_n(last, &before, mark, false, __ATOMIC_RELEASE, __ATOMIC_RELAXED))
        ;
}

void stream_await(struct stream *stream, uint64_t mark)
{
    if (!mark || mark == stream->mark)
        return;
    sim_engine_seal(mark);
    put_behind(stream, sim_engine_await(stream->device->card, connection_of(stream), mark));
}

struct meeting {
    const struct stream *legacy;
    uint32_t count;
    uint64_t marks[64];
};

static void collect(struct object *object, void *with)
{
    struct meeting *meeting = with;
    struct stream *stream = (struct stream *)object;
    uint64_t mark = __atomic_load_n(&stream->mark, __ATOMIC_ACQUIRE);
    if (stream->legacy || stream->flags & NON_BLOCKING || object->owner != meeting->legacy->object.owner ||
        mark == stream->awaited_by_legacy || meeting->count == sizeof meeting->marks / sizeof *meeting->marks)
        return;
    stream->awaited_by_legacy = mark;
    meeting->marks[meeting->count++] = mark;
}

/* What implicit synchronisation puts before the next work of this stream. */
static void meet(struct stream *stream)
{
    const struct context *context = stream->object.owner;
    if (stream->flags & NON_BLOCKING || context->blocking_streams < 2)
        return;
    if (!stream->legacy) {
        uint64_t mark = __atomic_load_n(&context->legacy_stream->mark, __ATOMIC_ACQUIRE);
        if (mark != stream->awaited_legacy)
            stream_await(stream, mark);
        stream->awaited_legacy = mark;
        return;
    }
    struct meeting meeting = {.legacy = stream};
    do {
        meeting.count = 0;
        objects_each(OBJECT_STREAM, collect, &meeting);
        for (uint32_t i = 0; i < meeting.count; i++)
            stream_await(stream, meeting.marks[i]);
    } while (meeting.count);
}

void stream_work(struct stream *stream, uint64_t duration_ns, uint32_t width)
{
    static _Atomic int launch_blocking = -1;
    if (launch_blocking < 0) {
        const char *said = getenv("CUDA_LAUNCH_BLOCKING");
        launch_blocking = said && strtol(said, NULL, 10) != 0;
    }
    may_wait("a launch"); /* for room in the queue */
    meet(stream);
    if (duration_ns)
        put_behind(stream,
                   sim_engine_work(stream->device->card, connection_of(stream), (uint32_t)stream->id, duration_ns, width));
    if (launch_blocking)
        sim_engine_wait(stream->mark);
}

uint64_t stream_mark(struct stream *stream)
{
    meet(stream);
    uint64_t mark = __atomic_load_n(&stream->mark, __ATOMIC_ACQUIRE);
    sim_engine_seal(mark);
    return mark;
}

CUresult stream_of(CUstream handle, struct stream **stream)
{
    struct context *context;
    TRY(context_current(&context));
    if (!handle || handle == CU_STREAM_LEGACY)
        *stream = context->legacy_stream;
    else if (handle == CU_STREAM_PER_THREAD)
        *stream = per_thread_stream(context);
    else if (object_is(handle, OBJECT_STREAM))
        *stream = handle;
    else
        return CUDA_ERROR_INVALID_HANDLE;
    return *stream ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

void stream_wait(struct stream *stream)
{
    may_wait("cuStreamSynchronize");
    sim_engine_wait(stream_mark(stream));
    pools_settle(stream->device);
}

uint64_t stream_hold(struct stream *stream)
{
    may_wait("cuLaunchHostFunc");
    meet(stream);
    uint64_t held = sim_engine_hold(stream->device->card, connection_of(stream));
    put_behind(stream, held);
    return held;
}

void context_wait(struct context *context)
{
    for (uint32_t i = 0; i < SIM_CONNECTIONS; i++)
        sim_engine_wait(__atomic_load_n(&context->memory->marks[i], __ATOMIC_ACQUIRE));
}

EXPORT CUresult cuStreamCreateWithPriority(CUstream *made, unsigned flags, int priority)
{
    struct context *context;
    TRY(context_current(&context));
    if (!made || flags & ~1u)
        return CUDA_ERROR_INVALID_VALUE;
    *made = stream_new(context, flags, priority > 0 ? 0 : priority < -5 ? -5 : priority);
    return *made ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuStreamCreate(CUstream *made, unsigned flags) { return cuStreamCreateWithPriority(made, flags, 0); }

EXPORT CUresult cuStreamDestroy_v2(CUstream stream)
{
    TRY(driver_ready());
    if (!object_is(stream, OBJECT_STREAM))
        return CUDA_ERROR_INVALID_HANDLE;
    object_free(stream); /* its work goes on by itself */
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamDestroy(CUstream stream) { return cuStreamDestroy_v2(stream); }

EXPORT CUresult cuStreamSynchronize(CUstream handle)
{
    struct stream *stream;
    TRY(stream_of(handle, &stream));
    if (stream->capturing)
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    stream_wait(stream);
    return device_fault(stream->device);
}

EXPORT CUresult cuStreamSynchronize_ptsz(CUstream handle) { return cuStreamSynchronize(PER_THREAD(handle)); }

EXPORT CUresult cuStreamQuery(CUstream handle)
{
    struct stream *stream;
    TRY(stream_of(handle, &stream));
    if (stream->capturing)
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    meet(stream);
    return sim_engine_reached(stream->mark) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

EXPORT CUresult cuStreamQuery_ptsz(CUstream handle) { return cuStreamQuery(PER_THREAD(handle)); }

static CUresult get_context(CUstream handle, CUcontext *context)
{
    struct stream *stream;
    TRY(stream_of(handle, &stream));
    if (!context)
        return CUDA_ERROR_INVALID_VALUE;
    *context = stream->object.owner;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamGetCtx(CUstream stream, CUcontext *context) { return get_context(stream, context); }
EXPORT CUresult cuStreamGetCtx_ptsz(CUstream s, CUcontext *context) { return get_context(PER_THREAD(s), context); }

EXPORT CUresult cuStreamGetCtx_v2(CUstream stream, CUcontext *context, CUgreenCtx *green)
{
    if (green)
        *green = NULL;
    return get_context(stream, context);
}

EXPORT CUresult cuStreamGetCtx_v2_ptsz(CUstream stream, CUcontext *context, CUgreenCtx *green)
{
    return cuStreamGetCtx_v2(PER_THREAD(stream), context, green);
}

#define STREAM_VALUE(function, type, field)                                                                                    \
    EXPORT CUresult function(CUstream handle, type *value)                                                                     \
    {                                                                                                                          \
        struct stream *stream;                                                                                                 \
        TRY(stream_of(handle, &stream));                                                                                       \
        if (!value)                                                                                                            \
            return CUDA_ERROR_INVALID_VALUE;                                                                                   \
        *value = (type)stream->field;                                                                                          \
        return CUDA_SUCCESS;                                                                                                   \
    }                                                                                                                          \
    EXPORT CUresult function##_ptsz(CUstream handle, type *value) { return function(PER_THREAD(handle), value); }
STREAM_VALUE(cuStreamGetFlags, unsigned, flags)
STREAM_VALUE(cuStreamGetPriority, int, priority)
STREAM_VALUE(cuStreamGetId, unsigned long long, id)
STREAM_VALUE(cuStreamGetDevice, CUdevice, device->ordinal)

/* ----------------------------------------------------------------------------------- host functions */

EXPORT CUresult cuLaunchHostFunc(CUstream handle, CUhostFn function, void *user_data)
{
    struct stream *stream;
    TRY(stream_of(handle, &stream));
    if (!function)
        return CUDA_ERROR_INVALID_VALUE;
    if (stream->capturing)
        return capture_host(stream, function, user_data);
    return task_add(stream, function, user_data);
}

EXPORT CUresult cuLaunchHostFunc_ptsz(CUstream handle, CUhostFn function, void *user_data)
{
    return cuLaunchHostFunc(PER_THREAD(handle), function, user_data);
}

/* The newer form may spin or sleep while it waits: the same here. */
EXPORT CUresult cuLaunchHostFunc_v2(CUstream handle, CUhostFn function, void *user_data, unsigned mode)
{
    return mode > 1 ? CUDA_ERROR_INVALID_VALUE : cuLaunchHostFunc(handle, function, user_data);
}

EXPORT CUresult cuLaunchHostFunc_v2_ptsz(CUstream handle, CUhostFn function, void *user_data, unsigned mode)
{
    return cuLaunchHostFunc_v2(PER_THREAD(handle), function, user_data, mode);
}

struct callback {
    struct object object;
    CUstream handle;
    CUstreamCallback function;
    void *user_data;
};

static void call_back(void *given)
{
    struct callback *callback = given;
    callback->function(callback->handle, CUDA_SUCCESS, callback->user_data);
    object_free(callback);
}

EXPORT CUresult cuStreamAddCallback(CUstream handle, CUstreamCallback function, void *user_data, unsigned flags)
{
    struct callback *callback;
    if (!function || flags)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(driver_ready());
    callback = object_new(OBJECT_CALLBACK, sizeof *callback, NULL);
    if (!callback)
        return CUDA_ERROR_OUT_OF_MEMORY;
    callback->handle = handle;
    callback->function = function;
    callback->user_data = user_data;
    return cuLaunchHostFunc(handle, call_back, callback);
}

EXPORT CUresult cuStreamAddCallback_ptsz(CUstream handle, CUstreamCallback function, void *user_data, unsigned flags)
{
    return cuStreamAddCallback(PER_THREAD(handle), function, user_data, flags);
}

/* -------------------------------------------------------------------------- what changes no behaviour */

#define STREAM_ACCEPTS(function, ...)                                                                                          \
    EXPORT CUresult function(CUstream handle, __VA_ARGS__)                                                                     \
    {                                                                                                                          \
        struct stream *stream;                                                                                                 \
        return stream_of(handle, &stream);                                                                                     \
    }
#define UNUSED __attribute__((unused))
STREAM_ACCEPTS(cuStreamAttachMemAsync, UNUSED CUdeviceptr address, UNUSED size_t length, UNUSED unsigned flags)
STREAM_ACCEPTS(cuStreamAttachMemAsync_ptsz, UNUSED CUdeviceptr address, UNUSED size_t length, UNUSED unsigned flags)
STREAM_ACCEPTS(cuStreamSetAttribute, UNUSED int attribute, UNUSED const void *value)
STREAM_ACCEPTS(cuStreamSetAttribute_ptsz, UNUSED int attribute, UNUSED const void *value)
STREAM_ACCEPTS(cuStreamGetAttribute, UNUSED int attribute, UNUSED void *value)
STREAM_ACCEPTS(cuStreamGetAttribute_ptsz, UNUSED int attribute, UNUSED void *value)

EXPORT CUresult cuStreamCopyAttributes(CUstream to, CUstream from)
{
    struct stream *stream;
    TRY(stream_of(to, &stream));
    return stream_of(from, &stream);
}

EXPORT CUresult cuStreamCopyAttributes_ptsz(CUstream to, CUstream from) { return cuStreamCopyAttributes(to, from); }

/* Values written and awaited by streams: writing happens at once, so waiting finds what was written before. */
#define STREAM_WORD(bits)                                                                                                      \
    static CUresult write##bits(CUstream handle, CUdeviceptr address, uint##bits##_t value)                                    \
    {                                                                                                                          \
        struct stream *stream;                                                                                                 \
        TRY(stream_of(handle, &stream));                                                                                       \
        bytes_fill(address, &value, sizeof value, 1);                                                                          \
        return CUDA_SUCCESS;                                                                                                   \
    }                                                                                                                          \
    EXPORT CUresult cuStreamWriteValue##bits(CUstream s, CUdeviceptr a, uint##bits##_t value, UNUSED unsigned flags)           \
    {                                                                                                                          \
        return write##bits(s, a, value);                                                                                       \
    }                                                                                                                          \
    EXPORT CUresult cuStreamWriteValue##bits##_v2(CUstream s, CUdeviceptr a, uint##bits##_t v, UNUSED unsigned flags)          \
    {                                                                                                                          \
        return write##bits(s, a, v);                                                                                           \
    }                                                                                                                          \
    STREAM_ACCEPTS(cuStreamWaitValue##bits, UNUSED CUdeviceptr a, UNUSED uint##bits##_t v, UNUSED unsigned flags)              \
    STREAM_ACCEPTS(cuStreamWaitValue##bits##_v2, UNUSED CUdeviceptr a, UNUSED uint##bits##_t v, UNUSED unsigned flags)
STREAM_WORD(32)
STREAM_WORD(64)
