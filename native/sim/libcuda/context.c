/* Contexts: each takes its share of the card. Primary contexts are counted, others are made and destroyed. */
#include <string.h>
#include <time.h>

#include "driver.h"

#define STACK_DEPTH 64

static _Thread_local struct context *stack[STACK_DEPTH];
static _Thread_local unsigned depth;
/* The top of the stack again, where every call finds it in one load. */
static _Thread_local struct context *top SIM_NEAR;
static uint64_t last_id;

const uint64_t default_limits[LIMITS] = {1024, 1048576, 8388608, 2, 2048, 64, 0, 0, 0, 0};

bool context_is(const struct context *context) { return object_is(context, OBJECT_CONTEXT); }

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
    context->memory = context;
    context->flags = flags;
    context->api_version = api_version;
    context->id = __atomic_add_fetch(&last_id, 1, __ATOMIC_RELAXED);
    return context;
}

/* A context comes in many allocations over tens to hundreds of milliseconds (GPU-Virt-Bench publishes 83 ms for an RTX 3080),
 * during which others allocate too: in steps here. */
uint32_t charge_slowly(const struct device *device, enum sim_kind kind, uint64_t bytes, uint64_t duration_ns)
{
    enum { STEPS = 4 };
    uint64_t step = duration_ns && bytes ? sim_round(bytes / STEPS + 1) : bytes + !bytes;
    uint64_t steps = bytes / step + (bytes % step != 0);
    const struct timespec pause = {.tv_sec = (time_t)(duration_ns / steps / 1000000000u),
                                   .tv_nsec = (long)(duration_ns / steps % 1000000000u)};
    if (kind == SIM_MODULE) /* "might require context synchronization" (CUDA Programming Guide, "Lazy Loading") */
        may_wait("loading code");
    uint32_t record = sim_charge(device->card, kind, bytes < step ? bytes : step, 0);
    for (uint64_t taken = step; record && duration_ns; taken += step) {
        clock_nanosleep(CLOCK_MONOTONIC, 0, &pause, NULL);
        if (taken >= bytes)
            break;
        if (!sim_grow(record, bytes - taken < step ? bytes - taken : step)) {
            sim_release(record);
            record = 0;
        }
    }
    return record;
}

CUresult context_activate(struct context *context, uint64_t bytes)
{
    TRY(device_fault(context->device));
    context->object.record = charge_slowly(context->device, SIM_CONTEXT, bytes, card_of(context->device)->context_ns);
    if (!context->object.record)
        return CUDA_ERROR_OUT_OF_MEMORY;
    memcpy(context->limits, default_limits, sizeof default_limits);
    context->blocking_streams = 0;
    context->legacy_stream = stream_new(context, 0, 0);
    if (!context->legacy_stream)
        return CUDA_ERROR_OUT_OF_MEMORY;
    context->legacy_stream->legacy = true;
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

/* Its kernels cannot be stopped in their midst, so that its end waits for them. */
void context_deactivate(struct context *context)
{
    may_wait("a context's end");
    gate_pass("context-ends");
    context_wait(context);
    context->active = false;
    kept_drop_all(context);
    drop_allocations(context);
    modules_unload(context);
    for (enum object_kind kind = OBJECT_STREAM; kind < OBJECT_KINDS; kind++)
        objects_free_owned(kind, context);
    array_pages_drop(context);
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
