/* What keeps physical memory allocated without a mapping (objects.c): tiles of sparse arrays, multicast groups, logical endpoints. */
#include "hooks/objects.h"
#include "policy/reserve.h"

#define OFFSET_STEP_BITS 16 /* the granularity of offsets into a group; in these steps they fit into an entry's `kind` */

static _Atomic uint64_t last_pin;

/* A function, and what follows if it succeeds: one by which the driver may release memory, or one that it takes none with. */
#define RELEASE(symbol, parameters, call, then)                                                                                \
    int symbol parameters                                                                                                      \
    {                                                                                                                          \
        gs_releasing_begins();                                                                                                 \
        int result = DRIVER(symbol) call;                                                                                      \
        if (result == CUDA_SUCCESS)                                                                                            \
            then;                                                                                                              \
        gs_releasing_ends();                                                                                                   \
        return result;                                                                                                         \
    }
#define BIND(symbol, parameters, call, then)                                                                                   \
    int symbol parameters                                                                                                      \
    {                                                                                                                          \
        int result = DRIVER(symbol) call;                                                                                      \
        if (result == CUDA_SUCCESS)                                                                                            \
            then;                                                                                                              \
        return result;                                                                                                         \
    }

/* ---- sparse arrays ---- */

static uint64_t mixed(uint64_t hash, uint64_t word) { return (hash ^ word) * UINT64_C(0x9e3779b97f4a7c15) ^ hash >> 29; }

static uint64_t tile_of(const CUarrayMapInfo *info)
{
    const unsigned int *words = (const unsigned int *)&info->subresource.sparseLevel;
    uint64_t hash = mixed(gs_key(info->resource), (uint64_t)info->subresourceType + 1);
    if (info->subresourceType != 0) {
        hash = mixed(hash, info->subresource.miptail.layer + 1);
        return mixed(hash, info->subresource.miptail.offset) | 1;
    }
    for (int i = 0; i < 8; i++)
        hash = mixed(hash, words[i] + 1);
    return hash | 1;
}

static void note_tile(const CUarrayMapInfo *info)
{
    if (info->memOperationType == CU_MEM_OPERATION_TYPE_MAP)
        gs_object_pin((struct gs_entry){
            .key = tile_of(info), .bytes = gs_key(info->resource), .owner = gs_object_of_handle(info->memHandle)});
    else
        gs_object_unpin(tile_of(info));
}

static void note_tiles(const CUarrayMapInfo *list, unsigned int count)
{
    for (unsigned int i = 0; i < count; i++)
        note_tile(&list[i]);
}

RELEASE(cuMemMapArrayAsync, (CUarrayMapInfo * list, unsigned count, CUstream stream), (list, count, stream),
        note_tiles(list, count))
RELEASE(cuMemMapArrayAsync_ptsz, (CUarrayMapInfo * list, unsigned count, CUstream stream), (list, count, stream),
        note_tiles(list, count))

/* ---- groups and endpoints ---- */

/* Each device of a group binds its own memory at the same offset, so the offset alone does not identify a pin. */
static void bind(uint64_t holder, uint32_t card, uint64_t offset, uint64_t object)
{
    if (holder && object)
        gs_object_pin((struct gs_entry){.key = atomic_fetch_add(&last_pin, 1) << 1 | UINT64_C(1) << 63,
                                        .bytes = holder,
                                        .owner = object,
                                        .kind = (uint32_t)(offset >> OFFSET_STEP_BITS),
                                        .card = card});
}

static void bind_addresses(uint64_t holder, uint32_t card, uint64_t offset, CUdeviceptr address, uint64_t bytes)
{
    CUdeviceptr at = address, end = address + bytes, next;
    for (uint64_t object; at < end && (object = gs_physical_behind(at, &next)); at = next)
        bind(holder, card < GPUSLICE_CARDS ? card : gs_object_card(object), offset + (at - address), object);
}

static uint32_t index_of(CUdevice device)
{
    struct gs_card *card = gs_card_of_device(device);
    return card ? card->index : GPUSLICE_CARDS;
}

static void unbind(uint64_t holder, CUdevice device, uint64_t offset, uint64_t bytes)
{
    gs_object_unpin_range((struct gs_pins){.holder = holder,
                                           .from = offset >> OFFSET_STEP_BITS,
                                           .to = (offset + bytes + (1u << OFFSET_STEP_BITS) - 1) >> OFFSET_STEP_BITS,
                                           .card = index_of(device)});
}

/* The first version names no device: the memory's own. */
static void bind_group_to(CUmemGenericAllocationHandle group, uint64_t offset, CUmemGenericAllocationHandle handle)
{
    uint64_t object = gs_object_of_handle(handle);
    bind(gs_object_of_handle(group), gs_object_card(object), offset, object);
}

#define GROUP CUmemGenericAllocationHandle group
#define HANDLE CUmemGenericAllocationHandle handle
#define REST size_t bytes, unsigned long long flags

BIND(cuMulticastCreate, (CUmemGenericAllocationHandle * group, const void *properties), (group, properties),
     gs_object_made(*group, NULL, 0, GS_GROUP))
BIND(cuMulticastBindMem, (GROUP, size_t at, HANDLE, size_t offset, REST), (group, at, handle, offset, bytes, flags),
     bind_group_to(group, at, handle))
BIND(cuMulticastBindMem_v2, (GROUP, CUdevice device, size_t at, HANDLE, size_t offset, REST),
     (group, device, at, handle, offset, bytes, flags),
     bind(gs_object_of_handle(group), index_of(device), at, gs_object_of_handle(handle)))
BIND(cuMulticastBindAddr, (GROUP, size_t at, CUdeviceptr address, REST), (group, at, address, bytes, flags),
     bind_addresses(gs_object_of_handle(group), GPUSLICE_CARDS, at, address, bytes))
BIND(cuMulticastBindAddr_v2, (GROUP, CUdevice device, size_t at, CUdeviceptr address, REST),
     (group, device, at, address, bytes, flags),
     bind_addresses(gs_object_of_handle(group), index_of(device), at, address, bytes))
RELEASE(cuMulticastUnbind, (GROUP, CUdevice device, size_t at, size_t bytes), (group, device, at, bytes),
        unbind(gs_object_of_handle(group), device, at, bytes))

static uint64_t holder_of(CUlogicalEndpointId endpoint) { return mixed(13, endpoint) | UINT64_C(1) << 63; }

#define ENDPOINT CUlogicalEndpointId endpoint, CUdevice device, uint64_t at

BIND(cuLogicalEndpointBindMem, (ENDPOINT, HANDLE, uint64_t offset, uint64_t bytes, unsigned long long flags),
     (endpoint, device, at, handle, offset, bytes, flags),
     bind(holder_of(endpoint), index_of(device), at, gs_object_of_handle(handle)))
BIND(cuLogicalEndpointBindAddr, (ENDPOINT, void *address, uint64_t bytes, unsigned long long flags),
     (endpoint, device, at, address, bytes, flags),
     bind_addresses(holder_of(endpoint), index_of(device), at, (CUdeviceptr)(uintptr_t)address, bytes))
RELEASE(cuLogicalEndpointUnbind, (ENDPOINT, uint64_t bytes), (endpoint, device, at, bytes),
        unbind(holder_of(endpoint), device, at, bytes))
RELEASE(cuLogicalEndpointDestroy, (CUlogicalEndpointId endpoint), (endpoint), gs_object_holder_ends(holder_of(endpoint)))
