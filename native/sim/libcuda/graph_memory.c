/* Memory of graphs. A node owns addresses from the start and physical memory from the first launch on: a device keeps
 * a reserve for all of its graphs, as high as they ever needed together, until it is trimmed. */
#include <string.h>

#include "graph.h"

enum { RESERVES = 4096 };

struct reserve {
    uint32_t record;
    uint64_t bytes;
};

struct graph_memory {
    struct reserve parts[RESERVES];
    unsigned count;
    uint64_t reserved, used;
};

static struct graph_memory memory_of[SIM_CARDS]; /* by ordinal, under memory_lock */

/* Memory for a node that starts to live: out of the reserve, which grows if it must. */
static bool take_memory(struct device *device, uint64_t bytes)
{
    struct graph_memory *memory = &memory_of[device->ordinal];
    uint64_t missing = memory->used + bytes > memory->reserved ? memory->used + bytes - memory->reserved : 0;
    if (missing) {
        uint32_t record = memory->count < RESERVES ? sim_charge(device->card, SIM_GRAPH, missing, 0) : 0;
        if (!record)
            return false;
        memory->parts[memory->count++] = (struct reserve){record, missing};
        memory->reserved += missing;
    }
    memory->used += bytes;
    if (memory->used > device->graph_used_high)
        device->graph_used_high = memory->used;
    if (memory->reserved > device->graph_reserved_high)
        device->graph_reserved_high = memory->reserved;
    return true;
}

bool graph_memory_live(struct allocation *allocation)
{
    if (!allocation->live && take_memory(allocation->device, sim_round(allocation->bytes)))
        allocation->live = true;
    return allocation->live;
}

CUresult graph_memory_free(struct allocation *allocation)
{
    if (!allocation->live)
        return CUDA_ERROR_INVALID_VALUE;
    allocation->live = false;
    memory_of[allocation->device->ordinal].used -= sim_round(allocation->bytes);
    return CUDA_SUCCESS;
}

static void trim(struct graph_memory *memory, uint64_t keep)
{
    for (unsigned i = memory->count; i-- > 0;) {
        if (memory->reserved - memory->parts[i].bytes < keep)
            continue;
        sim_release(memory->parts[i].record);
        memory->reserved -= memory->parts[i].bytes;
        memory->parts[i] = memory->parts[--memory->count];
    }
}

EXPORT CUresult cuDeviceGraphMemTrim(CUdevice ordinal)
{
    struct device *device;
    may_wait("cuDeviceGraphMemTrim");
    TRY(capture_permits());
    TRY(device_of(ordinal, &device));
    memory_lock();
    trim(&memory_of[ordinal], memory_of[ordinal].used);
    memory_unlock();
    return CUDA_SUCCESS;
}

void graph_memory_empty(struct device *device)
{
    memory_lock();
    for (struct allocation *each = allocation_first(); each; each = each->next)
        if (each->kind == ALLOCATION_GRAPH && each->device == device)
            each->live = false;
    memory_of[device->ordinal].used = 0;
    trim(&memory_of[device->ordinal], 0);
    memory_unlock();
}

EXPORT CUresult cuDeviceGetGraphMemAttribute(CUdevice ordinal, int attribute, void *value)
{
    struct device *device;
    TRY(capture_permits());
    TRY(device_of(ordinal, &device));
    if (!value || attribute < 0 || attribute > 3)
        return CUDA_ERROR_INVALID_VALUE;
    memory_lock();
    const uint64_t values[] = {memory_of[ordinal].used, device->graph_used_high, memory_of[ordinal].reserved,
                               device->graph_reserved_high};
    memory_unlock();
    memcpy(value, &values[attribute], sizeof values[attribute]);
    return CUDA_SUCCESS;
}

/* The high-water marks can be set to 0, which brings them down to what is. */
EXPORT CUresult cuDeviceSetGraphMemAttribute(CUdevice ordinal, int attribute, void *value)
{
    struct device *device;
    TRY(device_of(ordinal, &device));
    if (!value || (attribute != 1 && attribute != 3))
        return CUDA_ERROR_INVALID_VALUE;
    if (attribute == 1)
        device->graph_used_high = memory_of[ordinal].used;
    else
        device->graph_reserved_high = memory_of[ordinal].reserved;
    return CUDA_SUCCESS;
}
