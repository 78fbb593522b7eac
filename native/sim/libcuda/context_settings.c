/* What a context is like, and how it is set. */
#include <stddef.h>

#include "driver.h"

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
    may_wait("cuCtxSynchronize");
    context_wait(context);
    pools_settle(context->device);
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
