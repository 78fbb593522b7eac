/* Primary contexts: one a device, shared and counted by all who retain it. */
#include "driver.h"

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

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

CUresult primary_retain(struct device *device, CUcontext *context)
{
    pthread_mutex_lock(&mutex);
    CUresult result = retain(device, context);
    pthread_mutex_unlock(&mutex);
    return result;
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice ordinal)
{
    struct device *device;
    if (!context)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(device_of(ordinal, &device));
    return primary_retain(device, context);
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
