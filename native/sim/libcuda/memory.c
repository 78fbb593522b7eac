/* Memory that is allocated and freed at once: linear, pitched, managed, and host memory beside it. */
#include <stdlib.h>
#include <string.h>

#include "driver.h"
#include "graph.h"

#define PITCH 512u

static CUresult allocate(uint64_t bytes, enum allocation_kind kind, enum sim_kind kept_as, CUdeviceptr *address)
{
    struct context *context;
    if (!address || !bytes)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(context_current(&context));
    if (bytes > UINT64_C(1) << 48)
        return CUDA_ERROR_OUT_OF_MEMORY;
    may_wait("cuMemAlloc");
    gate_pass("allocate");
    memory_lock();
    struct allocation *made = allocation_new(bytes, kind, context);
    if (made && kind == ALLOCATION_MANAGED)
        sim_charge_up_to(context->device->card, kept_as, sim_round(bytes), made->address, &made->record);
    else if (made)
        made->record = sim_charge(context->device->card, kept_as, sim_round(bytes), made->address);
    if (made && !made->record) {
        allocation_drop(made);
        made = NULL;
    }
    if (made)
        *address = made->address;
    memory_unlock();
    gate_pass("allocated");
    return made ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes)
{
    TRY(capture_permits());
    return allocate(bytes, ALLOCATION_PLAIN, SIM_PLAIN, address);
}

/* The interface before CUDA 3.2 had 32 bits for sizes and addresses. */
EXPORT CUresult cuMemAlloc(unsigned *address, unsigned bytes)
{
    CUdeviceptr wide;
    TRY(cuMemAlloc_v2(&wide, bytes));
    *address = (unsigned)wide;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAllocPitch_v2(CUdeviceptr *address, size_t *pitch, size_t width, size_t height, unsigned element)
{
    if (!pitch || !width || !height || (element != 4 && element != 8 && element != 16))
        return CUDA_ERROR_INVALID_VALUE;
    size_t row = (width + PITCH - 1) / PITCH * PITCH;
    if (row < width || height > UINT64_MAX / row)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(cuMemAlloc_v2(address, row * height));
    *pitch = row;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAllocManaged(CUdeviceptr *address, size_t bytes, unsigned flags)
{
    if (flags != 1 && flags != 2)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(allocate(bytes, ALLOCATION_MANAGED, SIM_MANAGED, address));
    memory_lock();
    allocation_at(*address)->touched = true; /* the program writes to it itself */
    memory_unlock();
    return CUDA_SUCCESS;
}

static CUresult free_locked(struct allocation *found, CUdeviceptr address, uint64_t stream, uint64_t mark)
{
    if (found && found->kind == ALLOCATION_CHUNK)
        return block_free(found, address, stream, mark);
    if (found && found->kind == ALLOCATION_GRAPH && found->address == address)
        return graph_memory_free(found);
    if (!found || found->address != address || (found->kind != ALLOCATION_PLAIN && found->kind != ALLOCATION_MANAGED))
        return CUDA_ERROR_INVALID_VALUE;
    allocation_drop(found);
    return CUDA_SUCCESS;
}

CUresult memory_free(CUdeviceptr address, struct stream *on)
{
    uint64_t mark = on ? stream_mark(on) : 0;
    memory_lock();
    CUresult result = free_locked(allocation_at(address), address, on ? on->id : 0, sim_engine_reached(mark) ? 0 : mark);
    memory_unlock();
    gate_pass("freed");
    return result;
}

/* Waits until nothing uses the memory any more (CUDA C++ Best Practices Guide and Programming Guide, "Stream Ordered Memory
 * Allocator", introduction: cudaFree makes the card synchronise across all streams). Of a pool's block "the driver assumes that
 * all accesses to the allocation are finished and performs no further synchronization" (the same chapter, on cudaFree). */
EXPORT CUresult cuMemFree_v2(CUdeviceptr address)
{
    TRY(driver_ready());
    if (!address)
        return CUDA_SUCCESS;
    may_wait("cuMemFree");
    memory_lock();
    const struct allocation *found = allocation_at(address);
    bool waits = found && (found->kind == ALLOCATION_PLAIN || found->kind == ALLOCATION_MANAGED);
    struct context *context = waits ? found->context : NULL;
    memory_unlock();
    if (context)
        context_wait(context);
    return memory_free(address, NULL);
}

EXPORT CUresult cuMemFree(unsigned address) { return cuMemFree_v2(address); }

static uint64_t least(uint64_t one, uint64_t other) { return one < other ? one : other; }

EXPORT CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes)
{
    struct context *context;
    TRY(context_current(&context));
    sim_reap_sometimes();
    uint32_t card = context->device->card;
    struct sim_allowance allowed = sim_allowance(sim_cgroups_here(), card);
    if (free_bytes)
        *free_bytes = least(sim_free_bytes(card), allowed.shown == SIM_NO_LIMIT ? SIM_NO_LIMIT : allowed.left);
    if (total_bytes)
        *total_bytes = least(sim_usable_bytes(card), allowed.shown);
    return CUDA_SUCCESS;
}

static bool range_of(const struct allocation *found, uint64_t *start, uint64_t *bytes)
{
    if (found && found->kind == ALLOCATION_CHUNK)
        return block_range(found, start, bytes);
    if (!found || *start >= found->address + found->bytes)
        return false;
    *start = found->address;
    *bytes = found->bytes;
    return true;
}

EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *bytes, CUdeviceptr address)
{
    uint64_t start = address, length = 0;
    TRY(driver_ready());
    memory_lock();
    bool found = range_of(allocation_at(address), &start, &length);
    memory_unlock();
    if (!found)
        return CUDA_ERROR_NOT_FOUND;
    if (base)
        *base = start;
    if (bytes)
        *bytes = length;
    return CUDA_SUCCESS;
}
