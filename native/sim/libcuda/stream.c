/* Streams. A process's work on a card is done in the order of its calls, so a stream is a mark in that order. */
#include "driver.h"

static uint64_t last_id;

struct stream *stream_new(struct context *context, unsigned flags, int priority)
{
    const struct stream initial = {.device = context->device, .flags = flags, .priority = priority,
                                   .id = __atomic_add_fetch(&last_id, 1, __ATOMIC_RELAXED)};
    return object_new_as(OBJECT_STREAM, sizeof initial, context, &initial);
}

CUresult stream_of(CUstream handle, struct stream **stream)
{
    struct context *context;
    TRY(context_current(&context));
    if (!handle || handle == CU_STREAM_LEGACY)
        *stream = context->legacy_stream;
    else if (handle == CU_STREAM_PER_THREAD)
        *stream = context->per_thread_stream;
    else if (object_is(handle, OBJECT_STREAM))
        *stream = handle;
    else
        return CUDA_ERROR_INVALID_HANDLE;
    return *stream ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

void stream_wait(struct stream *stream)
{
    sim_engine_wait(stream->device->card, stream->mark);
    task_wait(stream->last_task);
    pools_settle(stream->device);
}

struct last_task {
    const struct device *device;
    uint64_t number;
};

static void find_last_task(struct object *object, void *with)
{
    struct last_task *last = with;
    const struct stream *stream = (struct stream *)object;
    uint64_t number = __atomic_load_n(&stream->last_task, __ATOMIC_RELAXED);
    if (stream->device == last->device && number > last->number)
        last->number = number;
}

void device_wait(struct device *device)
{
    struct last_task last = {device, 0};
    sim_engine_wait(device->card, sim_engine_mark(device->card));
    objects_each(OBJECT_STREAM, find_last_task, &last);
    task_wait(last.number); /* they run in order */
    pools_settle(device);
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
    bool finished = sim_engine_reached(stream->device->card, stream->mark) && task_done(stream->last_task);
    return finished ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
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

#define STREAM_VALUE(function, type, field)                                                                            \
    EXPORT CUresult function(CUstream handle, type *value)                                                             \
    {                                                                                                                  \
        struct stream *stream;                                                                                         \
        TRY(stream_of(handle, &stream));                                                                               \
        if (!value)                                                                                                    \
            return CUDA_ERROR_INVALID_VALUE;                                                                           \
        *value = (type)stream->field;                                                                                  \
        return CUDA_SUCCESS;                                                                                           \
    }                                                                                                                  \
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
    uint64_t task = task_add(stream->device->card, stream->mark, function, user_data);
    __atomic_store_n(&stream->last_task, task, __ATOMIC_RELAXED);
    return task ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
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

#define STREAM_ACCEPTS(function, ...)                                                                                  \
    EXPORT CUresult function(CUstream handle, __VA_ARGS__)                                                             \
    {                                                                                                                  \
        struct stream *stream;                                                                                         \
        return stream_of(handle, &stream);                                                                             \
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
#define STREAM_WORD(bits)                                                                                              \
    static CUresult write##bits(CUstream handle, CUdeviceptr address, uint##bits##_t value)                            \
    {                                                                                                                  \
        struct stream *stream;                                                                                         \
        TRY(stream_of(handle, &stream));                                                                               \
        bytes_fill(address, &value, sizeof value, 1);                                                                  \
        return CUDA_SUCCESS;                                                                                           \
    }                                                                                                                  \
    EXPORT CUresult cuStreamWriteValue##bits(CUstream s, CUdeviceptr a, uint##bits##_t value, UNUSED unsigned flags)   \
    {                                                                                                                  \
        return write##bits(s, a, value);                                                                               \
    }                                                                                                                  \
    EXPORT CUresult cuStreamWriteValue##bits##_v2(CUstream s, CUdeviceptr a, uint##bits##_t v, UNUSED unsigned flags)  \
    {                                                                                                                  \
        return write##bits(s, a, v);                                                                                   \
    }                                                                                                                  \
    STREAM_ACCEPTS(cuStreamWaitValue##bits, UNUSED CUdeviceptr a, UNUSED uint##bits##_t v, UNUSED unsigned flags)      \
    STREAM_ACCEPTS(cuStreamWaitValue##bits##_v2, UNUSED CUdeviceptr a, UNUSED uint##bits##_t v, UNUSED unsigned flags)
STREAM_WORD(32)
STREAM_WORD(64)
