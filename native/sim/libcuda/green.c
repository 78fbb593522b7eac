/* Green contexts: a part of a device's multiprocessors, with streams of their own. Each retains the device's primary
 * context, and memory and code made in it are that one's: they stay when the green context is destroyed (CUDA driver API,
 * "Green Contexts": created "with respect to" the primary context, which cuGreenCtxDestroy releases; "any resources
 * provisioned for this green context" go, which are multiprocessors). A small share of the card is taken for each. */
#include <stdlib.h>
#include <string.h>

#include "driver.h"

#define GREEN_PART 8 /* of what a whole context takes */
enum { RESOURCE_SM = 1 };

typedef struct {
    int type;
    unsigned char padding[92];
    struct {
        unsigned count, minimum, alignment, flags;
    } sm;
    unsigned char rest[32];
} CUdevResource;

_Static_assert(sizeof(CUdevResource) == 144, "as in NVIDIA's header");

struct green_context {
    struct object object;
    struct context *context;
    CUdevResource resource;
};

static unsigned smallest_part(const struct device *device)
{
    return card_of(device)->capability_major >= 9 ? 8 : card_of(device)->capability_major == 8 ? 4 : 2;
}

static CUresult describe(CUdevResource *resource, int type, const struct device *device, unsigned count)
{
    if (!resource)
        return CUDA_ERROR_INVALID_VALUE;
    if (type != RESOURCE_SM)
        return CUDA_ERROR_NOT_SUPPORTED;
    memset(resource, 0, sizeof *resource);
    resource->type = type;
    resource->sm.count = count;
    resource->sm.minimum = resource->sm.alignment = smallest_part(device);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetDevResource(CUdevice ordinal, CUdevResource *resource, int type)
{
    struct device *device;
    TRY(device_of(ordinal, &device));
    return describe(resource, type, device, card_of(device)->multiprocessor_count);
}

EXPORT CUresult cuCtxGetDevResource(CUcontext context, CUdevResource *resource, int type)
{
    TRY(driver_ready());
    if (!context_is(context))
        return CUDA_ERROR_INVALID_CONTEXT;
    return cuDeviceGetDevResource(context->device->ordinal, resource, type);
}

EXPORT CUresult cuDevSmResourceSplitByCount(CUdevResource *groups, unsigned *count, const CUdevResource *of,
                                            CUdevResource *rest, unsigned flags, unsigned least)
{
    (void)flags;
    TRY(driver_ready());
    if (!count || !of || of->type != RESOURCE_SM || !of->sm.minimum)
        return CUDA_ERROR_INVALID_VALUE;
    unsigned step = of->sm.minimum;
    unsigned size = least ? (least + step - 1) / step * step : step;
    unsigned fit = of->sm.count / size;
    unsigned made = groups && *count < fit ? *count : fit;
    for (unsigned i = 0; groups && i < made; i++) {
        groups[i] = *of;
        groups[i].sm.count = size;
    }
    *count = made;
    if (rest) {
        *rest = *of;
        rest->sm.count = of->sm.count - made * size;
    }
    return CUDA_SUCCESS;
}

/* A description is a copy that lives as long as the process: the interface has no call to end one. */
EXPORT CUresult cuDevResourceGenerateDesc(CUdevResource **description, const CUdevResource *resources, unsigned count)
{
    TRY(driver_ready());
    if (!description || !resources || !count)
        return CUDA_ERROR_INVALID_VALUE;
    *description = malloc(sizeof **description);
    if (!*description)
        return CUDA_ERROR_OUT_OF_MEMORY;
    **description = resources[0];
    for (unsigned i = 1; i < count; i++)
        (*description)->sm.count += resources[i].sm.count;
    return CUDA_SUCCESS;
}

static CUresult green_of(CUgreenCtx green)
{
    TRY(driver_ready());
    return object_is(green, OBJECT_GREEN) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

EXPORT CUresult cuGreenCtxCreate(CUgreenCtx *made, const CUdevResource *description, CUdevice ordinal, unsigned flags)
{
    struct device *device;
    TRY(device_of(ordinal, &device));
    if (!made || !description || flags != 1)
        return CUDA_ERROR_INVALID_VALUE;
    struct green_context *green = object_new(OBJECT_GREEN, sizeof *green, NULL);
    struct context *context = green ? context_new(device, 0, 3020) : NULL;
    CUcontext primary = NULL;
    CUresult result = context ? primary_retain(device, &primary) : CUDA_ERROR_OUT_OF_MEMORY;
    if (result == CUDA_SUCCESS)
        result = context_activate(context, card_of(device)->context_bytes / GREEN_PART);
    if (result != CUDA_SUCCESS) {
        if (primary)
            cuDevicePrimaryCtxRelease_v2(ordinal);
        if (context)
            object_free(context);
        if (green)
            object_free(green);
        return result;
    }
    context->memory = primary;
    green->context = context;
    green->resource = *description;
    *made = green;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGreenCtxDestroy(CUgreenCtx green)
{
    TRY(green_of(green));
    CUdevice ordinal = green->context->device->ordinal;
    CUresult result = cuCtxDestroy_v2(green->context);
    object_free(green);
    return result == CUDA_SUCCESS ? cuDevicePrimaryCtxRelease_v2(ordinal) : result;
}

EXPORT CUresult cuCtxFromGreenCtx(CUcontext *context, CUgreenCtx green)
{
    TRY(green_of(green));
    if (!context)
        return CUDA_ERROR_INVALID_VALUE;
    *context = green->context;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGreenCtxGetDevResource(CUgreenCtx green, CUdevResource *resource, int type)
{
    TRY(green_of(green));
    return describe(resource, type, green->context->device, green->resource.sm.count);
}

EXPORT CUresult cuGreenCtxGetId(CUgreenCtx green, unsigned long long *id)
{
    TRY(green_of(green));
    if (!id)
        return CUDA_ERROR_INVALID_VALUE;
    *id = green->context->id;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGreenCtxStreamCreate(CUstream *made, CUgreenCtx green, unsigned flags, int priority)
{
    TRY(green_of(green));
    if (!made || flags != 1)
        return CUDA_ERROR_INVALID_VALUE;
    *made = stream_new(green->context, flags, priority);
    return *made ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

struct green_search {
    const struct context *context;
    CUgreenCtx found;
};

static void find_green(struct object *object, void *with)
{
    struct green_search *search = with;
    if (((struct green_context *)object)->context == search->context)
        search->found = (struct green_context *)object;
}

EXPORT CUresult cuStreamGetGreenCtx(CUstream handle, CUgreenCtx *green)
{
    struct stream *stream;
    TRY(stream_of(handle, &stream));
    if (!green)
        return CUDA_ERROR_INVALID_VALUE;
    struct green_search search = {stream->object.owner, NULL};
    objects_each(OBJECT_GREEN, find_green, &search);
    *green = search.found;
    return CUDA_SUCCESS;
}
