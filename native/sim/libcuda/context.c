/* Contexts: each takes its share of the card. Primary contexts are counted, others are made and destroyed. */
#include <string.h>

#include "driver.h"

#define STACK_DEPTH 64

static _Thread_local struct context *stack[STACK_DEPTH];
static _Thread_local unsigned depth;
/* The top of the stack again, where every call finds it in one load. */
static _Thread_local struct context *top __attribute__((tls_model("initial-exec")));
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static uint64_t last_id;

static const uint64_t default_limits[LIMITS] = {1024, 1048576, 8388608, 2, 2048, 64, 0, 0, 0, 0};

bool context_is(const struct context *context)
{
    return object_is(context, OBJECT_CONTEXT);
}

CUresult context_current(struct context **context)
{
    TRY(driver_ready());
    if (!top)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (!context_is(top) || !top->active)
        return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    *context = top;
    return device_fault(top->device);
}

struct context *context_new(struct device *device, unsigned flags, unsigned api_version)
{
    struct context *context = object_new(OBJECT_CONTEXT, sizeof *context, NULL);
    if (!context)
        return NULL;
    context->device = device;
    context->flags = flags;
    context->api_version = api_version;
    context->id = __atomic_add_fetch(&last_id, 1, __ATOMIC_RELAXED);
    return context;
}

CUresult context_activate(struct context *context, uint64_t bytes)
{
    TRY(device_fault(context->device));
    context->object.record = sim_charge(context->device->card, SIM_CONTEXT, bytes, 0);
    if (!context->object.record)
        return CUDA_ERROR_OUT_OF_MEMORY;
    memcpy(context->limits, default_limits, sizeof default_limits);
    context->legacy_stream = stream_new(context, 0, 0);
    context->per_thread_stream = stream_new(context, 0, 0);
    context->active = true;
    return CUDA_SUCCESS;
}

static void drop_allocations(const struct context *context)
{
    memory_lock();
    for (struct allocation *next, *each = allocation_first(); each; each = next) {
        next = each->next;
        if (each->context == context)
            allocation_drop(each);
    }
    memory_unlock();
}

static void context_deactivate(struct context *context)
{
    context->active = false;
    kept_drop_all(context);
    drop_allocations(context);
    modules_unload(context);
    for (enum object_kind kind = OBJECT_STREAM; kind < OBJECT_KINDS; kind++)
        objects_free_owned(kind, context);
    sim_release(context->limit_record);
    sim_release(context->object.record);
    context->limit_record = context->object.record = 0;
}

/* ------------------------------------------------------------------------------------ the current one */

static void drop_top(void)
{
    depth--;
    top = depth ? stack[depth - 1] : NULL;
}

EXPORT CUresult cuCtxPushCurrent_v2(CUcontext context)
{
    TRY(driver_ready());
    if (!context_is(context) || depth == STACK_DEPTH)
        return CUDA_ERROR_INVALID_CONTEXT;
    stack[depth++] = context;
    top = context;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxPopCurrent_v2(CUcontext *context)
{
    TRY(driver_ready());
    if (!depth)
        return CUDA_ERROR_INVALID_CONTEXT;
    drop_top();
    if (context)
        *context = stack[depth];
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSetCurrent(CUcontext context)
{
    TRY(driver_ready());
    if (context && !context_is(context))
        return CUDA_ERROR_INVALID_CONTEXT;
    if (context && !depth)
        depth = 1;
    if (context)
        stack[depth - 1] = top = context;
    else if (depth)
        drop_top();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetCurrent(CUcontext *context)
{
    TRY(driver_ready());
    if (!context)
        return CUDA_ERROR_INVALID_VALUE;
    *context = top;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxPushCurrent(CUcontext context) { return cuCtxPushCurrent_v2(context); }
EXPORT CUresult cuCtxPopCurrent(CUcontext *context) { return cuCtxPopCurrent_v2(context); }

/* ------------------------------------------------------------------------------- made and destroyed */

static CUresult create_current(CUcontext *made, unsigned flags, unsigned api_version, CUdevice ordinal)
{
    struct device *device;
    TRY(device_of(ordinal, &device));
    if (!made || flags & ~(unsigned)CU_CTX_FLAGS_MASK)
        return CUDA_ERROR_INVALID_VALUE;
    struct context *context = context_new(device, flags, api_version);
    CUresult result = context ? context_activate(context, card_of(device)->context_bytes) : CUDA_ERROR_OUT_OF_MEMORY;
    if (result != CUDA_SUCCESS) {
        if (context)
            object_free(context);
        return result;
    }
    *made = context;
    return cuCtxPushCurrent_v2(context);
}

EXPORT CUresult cuCtxCreate(CUcontext *made, unsigned flags, CUdevice ordinal)
{
    return create_current(made, flags, 3010, ordinal);
}

EXPORT CUresult cuCtxCreate_v2(CUcontext *made, unsigned flags, CUdevice ordinal)
{
    return create_current(made, flags, 3020, ordinal);
}

EXPORT CUresult cuCtxCreate_v3(CUcontext *made, void *affinity, int affinity_count, unsigned flags, CUdevice ordinal)
{
    if (affinity_count < 0 || (affinity_count && !affinity))
        return CUDA_ERROR_INVALID_VALUE;
    return create_current(made, flags, 3020, ordinal);
}

EXPORT CUresult cuCtxCreate_v4(CUcontext *made, void *parameters, unsigned flags, CUdevice ordinal)
{
    (void)parameters;
    return create_current(made, flags, 3020, ordinal);
}

EXPORT CUresult cuCtxDestroy_v2(CUcontext context)
{
    TRY(driver_ready());
    if (!context_is(context) || context->primary)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (top == context)
        drop_top();
    context_deactivate(context);
    object_free(context);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxDestroy(CUcontext context) { return cuCtxDestroy_v2(context); }

EXPORT CUresult cuCtxAttach(CUcontext *context, unsigned flags)
{
    struct context *current;
    if (!context || flags)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(context_current(&current));
    *context = current;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxDetach(CUcontext context) { return cuCtxDestroy_v2(context); }

/* ----------------------------------------------------------------------------------- primary contexts */

static CUresult retain(struct device *device, CUcontext *context)
{
    if (!device->primary->active) {
        device->primary->flags = device->primary_flags;
        TRY(context_activate(device->primary, card_of(device)->context_bytes));
    }
    device->primary_references++;
    *context = device->primary;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice ordinal)
{
    struct device *device;
    if (!context)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(device_of(ordinal, &device));
    pthread_mutex_lock(&mutex);
    CUresult result = retain(device, context);
    pthread_mutex_unlock(&mutex);
    return result;
}

static void end_primary(struct device *device)
{
    if (!device->primary->active)
        return;
    pools_empty(device);
    graph_memory_empty(device);
    context_deactivate(device->primary);
}

EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice ordinal)
{
    struct device *device;
    CUresult result = CUDA_SUCCESS;
    TRY(device_of(ordinal, &device));
    pthread_mutex_lock(&mutex);
    if (!device->primary_references)
        result = CUDA_ERROR_INVALID_CONTEXT;
    else if (--device->primary_references == 0)
        end_primary(device);
    pthread_mutex_unlock(&mutex);
    return result;
}

/* Everything in the context goes; who retained it still holds the references. */
EXPORT CUresult cuDevicePrimaryCtxReset_v2(CUdevice ordinal)
{
    struct device *device;
    TRY(device_of(ordinal, &device));
    pthread_mutex_lock(&mutex);
    end_primary(device);
    device->primary_references = 0;
    pthread_mutex_unlock(&mutex);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice ordinal, unsigned flags)
{
    struct device *device;
    TRY(device_of(ordinal, &device));
    if (flags & ~(unsigned)CU_CTX_FLAGS_MASK)
        return CUDA_ERROR_INVALID_VALUE;
    device->primary_flags = flags;
    device->primary->flags = flags;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice ordinal, unsigned *flags, int *active)
{
    struct device *device;
    TRY(device_of(ordinal, &device));
    if (!flags || !active)
        return CUDA_ERROR_INVALID_VALUE;
    *flags = device->primary_flags;
    *active = device->primary->active;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRelease(CUdevice ordinal) { return cuDevicePrimaryCtxRelease_v2(ordinal); }
EXPORT CUresult cuDevicePrimaryCtxReset(CUdevice ordinal) { return cuDevicePrimaryCtxReset_v2(ordinal); }
EXPORT CUresult cuDevicePrimaryCtxSetFlags(CUdevice ordinal, unsigned flags)
{
    return cuDevicePrimaryCtxSetFlags_v2(ordinal, flags);
}

/* -------------------------------------------------------------------------------------- what it is like */

static CUresult current_or(CUcontext given, struct context **context)
{
    TRY(driver_ready());
    if (!given)
        return context_current(context);
    *context = given;
    return context_is(given) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

EXPORT CUresult cuCtxGetDevice_v2(CUdevice *device, CUcontext given)
{
    struct context *context;
    TRY(current_or(given, &context));
    if (!device)
        return CUDA_ERROR_INVALID_VALUE;
    *device = context->device->ordinal;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetDevice(CUdevice *device) { return cuCtxGetDevice_v2(device, NULL); }

EXPORT CUresult cuCtxSynchronize_v2(CUcontext given)
{
    struct context *context;
    TRY(current_or(given, &context));
    device_wait(context->device);
    return device_fault(context->device);
}

EXPORT CUresult cuCtxSynchronize(void) { return cuCtxSynchronize_v2(NULL); }

EXPORT CUresult cuCtxGetFlags(unsigned *flags)
{
    struct context *context;
    TRY(context_current(&context));
    if (!flags)
        return CUDA_ERROR_INVALID_VALUE;
    *flags = context->flags;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSetFlags(unsigned flags)
{
    struct context *context;
    TRY(context_current(&context));
    context->flags = flags;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetId(CUcontext given, unsigned long long *id)
{
    struct context *context;
    TRY(current_or(given, &context));
    if (!id)
        return CUDA_ERROR_INVALID_VALUE;
    *id = context->id;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetApiVersion(CUcontext given, unsigned *version)
{
    struct context *context;
    TRY(current_or(given, &context));
    if (!version)
        return CUDA_ERROR_INVALID_VALUE;
    *version = context->api_version;
    return CUDA_SUCCESS;
}

/* printf and malloc heaps above their defaults are taken from the card. */
static uint64_t heap_bytes(const struct context *context)
{
    uint64_t bytes = 0;
    for (int limit = 1; limit <= 2; limit++)
        if (context->limits[limit] > default_limits[limit])
            bytes += context->limits[limit] - default_limits[limit];
    return sim_round(bytes);
}

EXPORT CUresult cuCtxSetLimit(int limit, size_t value)
{
    struct context *context;
    TRY(context_current(&context));
    if (limit < 0 || limit >= LIMITS)
        return CUDA_ERROR_UNSUPPORTED_LIMIT;
    uint64_t before = context->limits[limit];
    context->limits[limit] = value;
    uint64_t bytes = heap_bytes(context);
    sim_release(context->limit_record);
    context->limit_record = bytes ? sim_charge(context->device->card, SIM_LIMIT, bytes, 0) : 0;
    if (!bytes || context->limit_record)
        return CUDA_SUCCESS;
    context->limits[limit] = before;
    bytes = heap_bytes(context);
    context->limit_record = bytes ? sim_charge(context->device->card, SIM_LIMIT, bytes, 0) : 0;
    return CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuCtxGetLimit(size_t *value, int limit)
{
    struct context *context;
    TRY(context_current(&context));
    if (!value)
        return CUDA_ERROR_INVALID_VALUE;
    if (limit < 0 || limit >= LIMITS)
        return CUDA_ERROR_UNSUPPORTED_LIMIT;
    *value = context->limits[limit];
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    struct context *context;
    TRY(context_current(&context));
    if (least)
        *least = 0;
    if (greatest)
        *greatest = -5;
    return CUDA_SUCCESS;
}

static CUresult get_setting(int *out, size_t offset)
{
    struct context *context;
    TRY(context_current(&context));
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = *(const int *)((const char *)context + offset);
    return CUDA_SUCCESS;
}

static CUresult set_setting(int value, size_t offset)
{
    struct context *context;
    TRY(context_current(&context));
    *(int *)((char *)context + offset) = value;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetCacheConfig(int *config) { return get_setting(config, offsetof(struct context, cache_config)); }
EXPORT CUresult cuCtxSetCacheConfig(int config) { return set_setting(config, offsetof(struct context, cache_config)); }
EXPORT CUresult cuCtxGetSharedMemConfig(int *c) { return get_setting(c, offsetof(struct context, shared_config)); }
EXPORT CUresult cuCtxSetSharedMemConfig(int c) { return set_setting(c, offsetof(struct context, shared_config)); }

EXPORT CUresult cuCtxResetPersistingL2Cache(void)
{
    struct context *context;
    return context_current(&context);
}

static CUresult peer(CUcontext given)
{
    struct context *context;
    TRY(context_current(&context));
    return context_is(given) && given->device != context->device ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

EXPORT CUresult cuCtxEnablePeerAccess(CUcontext given, unsigned flags)
{
    return flags ? CUDA_ERROR_INVALID_VALUE : peer(given);
}

EXPORT CUresult cuCtxDisablePeerAccess(CUcontext given) { return peer(given); }
