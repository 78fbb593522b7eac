/* What keeps physical memory allocated without a mapping: tiles of a sparse array, members of a multicast group, memory
 * bound to a logical endpoint. Each is a pin: a reference that ends when its place is reused or its holder is destroyed. */
#include "hooks/physical.h"
#include "policy/held.h"
#include "system/at_fork.h"

#define OFFSET_STEP_BITS 16 /* the granularity of offsets into a group; in these steps they fit into an entry's `kind` */
#define AT_ONCE 64

static struct gs_table pins; /* place → object, in `owner`; `bytes` is the holder */
static _Atomic uint64_t last_pin;
static bool pins_exist;

static void forget(void) { gs_table_forget(&pins); }
GS_AT_FORK(forget);

static void unpin_place(uint64_t place)
{
    struct gs_entry entry = {0};
    bool pinned = gs_table_take(&pins, place, &entry);
    if (pinned)
        gs_physical_drop(entry.owner);
}

static void unpin(uint64_t holder);
static void lend_members(uint64_t group);

static void pin(struct gs_entry place)
{
    static const struct gs_members members = {.release = unpin, .lend = lend_members};
    if (!place.owner)
        return;
    gs_physical_has_members(&members);
    gs_physical_hold(place.owner);
    unpin_place(place.key); /* mapping a place again releases its old tile */
    gs_table_put(&pins, &place);
    __atomic_store_n(&pins_exist, true, __ATOMIC_RELAXED);
}

/* ---- releasing ---- */

struct range {
    uint64_t holder, from, to; /* offsets in steps */
    uint32_t card;             /* GPUSLICE_CARDS for any */
    uint64_t objects[AT_ONCE];
    uint32_t count;
};

static bool is_in(const struct gs_entry *entry, const struct range *range)
{
    return entry->bytes == range->holder && entry->kind >= range->from && entry->kind < range->to &&
           (range->card == GPUSLICE_CARDS || entry->card == range->card);
}

static bool gather(struct gs_entry *entry, void *context)
{
    struct range *range = context;
    if (range->count == AT_ONCE || !is_in(entry, range))
        return false;
    range->objects[range->count++] = entry->owner;
    return true;
}

/* References are dropped outside the table's locks, since dropping the last reference to a group releases its own pins. */
static void unpin_range(struct range range)
{
    if (gs_likely(!__atomic_load_n(&pins_exist, __ATOMIC_RELAXED)))
        return;
    do {
        range.count = 0;
        gs_table_sift(&pins, gather, &range);
        for (uint32_t i = 0; i < range.count; i++) {
            gs_physical_unlend(range.objects[i]);
            gs_physical_drop(range.objects[i]);
        }
    } while (range.count == AT_ONCE);
}

static void unpin(uint64_t holder) { unpin_range((struct range){.holder = holder, .to = UINT64_MAX, .card = GPUSLICE_CARDS}); }

static bool lend(struct gs_entry *entry, void *holder)
{
    if (entry->bytes == *(uint64_t *)holder)
        gs_physical_lend(entry->owner);
    return false;
}

static void lend_members(uint64_t group) { gs_table_sift(&pins, lend, &group); }

/* A call by which the driver may release memory, and what follows if it succeeds. */
#define RELEASE(symbol, call, then)                                                                                            \
    do {                                                                                                                       \
        gs_releasing_begins();                                                                                                 \
        int result = DRIVER(symbol) call;                                                                                      \
        if (result == CUDA_SUCCESS)                                                                                            \
            then;                                                                                                              \
        gs_releasing_ends();                                                                                                   \
        return result;                                                                                                         \
    } while (0)

/* ---- sparse arrays ---- */

static uint64_t mixed(uint64_t hash, uint64_t word) { return (hash ^ word) * UINT64_C(0x9e3779b97f4a7c15) ^ hash >> 29; }

static uint64_t tile_of(const CUarrayMapInfo *info)
{
    const unsigned int *words = (const unsigned int *)&info->subresource.sparseLevel;
    uint64_t hash = mixed((uint64_t)(uintptr_t)info->resource, (uint64_t)info->subresourceType + 1);
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
        pin((struct gs_entry){.key = tile_of(info),
                              .bytes = (uint64_t)(uintptr_t)info->resource,
                              .owner = gs_physical_of_handle(info->memHandle)});
    else
        unpin_place(tile_of(info));
}

static void note_tiles(const CUarrayMapInfo *list, unsigned int count)
{
    for (unsigned int i = 0; i < count; i++)
        note_tile(&list[i]);
}

int cuMemMapArrayAsync(CUarrayMapInfo *list, unsigned int count, CUstream stream)
{
    RELEASE(cuMemMapArrayAsync, (list, count, stream), note_tiles(list, count));
}

int cuMemMapArrayAsync_ptsz(CUarrayMapInfo *list, unsigned int count, CUstream stream)
{
    RELEASE(cuMemMapArrayAsync_ptsz, (list, count, stream), note_tiles(list, count));
}

/* ---- groups and endpoints ---- */

/* Each device of a group binds its own memory at the same offset, so the offset alone does not identify a pin. */
static void bind(uint64_t holder, uint32_t card, uint64_t offset, uint64_t object)
{
    if (holder && object && gs_physical_is_lent(holder))
        gs_physical_lend(object);
    if (holder && object)
        pin((struct gs_entry){.key = atomic_fetch_add(&last_pin, 1) << 1 | UINT64_C(1) << 63,
                              .bytes = holder,
                              .owner = object,
                              .kind = (uint32_t)(offset >> OFFSET_STEP_BITS),
                              .card = card});
}

static void bind_addresses(uint64_t holder, uint32_t card, uint64_t offset, CUdeviceptr address, uint64_t bytes)
{
    CUdeviceptr at = address, end = address + bytes, next;
    for (uint64_t object; at < end && (object = gs_physical_behind(at, &next)); at = next)
        bind(holder, card < GPUSLICE_CARDS ? card : gs_physical_card(object), offset + (at - address), object);
}

static void unbind(uint64_t holder, CUdevice device, uint64_t offset, uint64_t bytes)
{
    struct gs_card *card = gs_card_of_device(device);
    unpin_range((struct range){.holder = holder,
                               .from = offset >> OFFSET_STEP_BITS,
                               .to = (offset + bytes + (1u << OFFSET_STEP_BITS) - 1) >> OFFSET_STEP_BITS,
                               .card = card ? card->index : GPUSLICE_CARDS});
}

static uint32_t index_of(CUdevice device)
{
    struct gs_card *card = gs_card_of_device(device);
    return card ? card->index : GPUSLICE_CARDS;
}

int cuMulticastCreate(CUmemGenericAllocationHandle *group, const void *properties)
{
    int result = DRIVER(cuMulticastCreate)(group, properties);
    if (result == CUDA_SUCCESS)
        gs_physical_made(*group, NULL, 0, GS_GROUP);
    return result;
}

int cuMulticastBindMem(CUmemGenericAllocationHandle group, size_t group_offset, CUmemGenericAllocationHandle handle,
                       size_t offset, size_t bytes, unsigned long long flags)
{
    int result = DRIVER(cuMulticastBindMem)(group, group_offset, handle, offset, bytes, flags);
    uint64_t object = gs_physical_of_handle(handle);
    if (result == CUDA_SUCCESS)
        bind(gs_physical_of_handle(group), gs_physical_card(object), group_offset, object);
    return result;
}

int cuMulticastBindMem_v2(CUmemGenericAllocationHandle group, CUdevice device, size_t group_offset,
                          CUmemGenericAllocationHandle handle, size_t offset, size_t bytes, unsigned long long flags)
{
    int result = DRIVER(cuMulticastBindMem_v2)(group, device, group_offset, handle, offset, bytes, flags);
    if (result == CUDA_SUCCESS)
        bind(gs_physical_of_handle(group), index_of(device), group_offset, gs_physical_of_handle(handle));
    return result;
}

int cuMulticastBindAddr(CUmemGenericAllocationHandle group, size_t group_offset, CUdeviceptr address, size_t bytes,
                        unsigned long long flags)
{
    int result = DRIVER(cuMulticastBindAddr)(group, group_offset, address, bytes, flags);
    if (result == CUDA_SUCCESS)
        bind_addresses(gs_physical_of_handle(group), GPUSLICE_CARDS, group_offset, address, bytes);
    return result;
}

int cuMulticastBindAddr_v2(CUmemGenericAllocationHandle group, CUdevice device, size_t group_offset, CUdeviceptr address,
                           size_t bytes, unsigned long long flags)
{
    int result = DRIVER(cuMulticastBindAddr_v2)(group, device, group_offset, address, bytes, flags);
    if (result == CUDA_SUCCESS)
        bind_addresses(gs_physical_of_handle(group), index_of(device), group_offset, address, bytes);
    return result;
}

int cuMulticastUnbind(CUmemGenericAllocationHandle group, CUdevice device, size_t group_offset, size_t bytes)
{
    RELEASE(cuMulticastUnbind, (group, device, group_offset, bytes),
            unbind(gs_physical_of_handle(group), device, group_offset, bytes));
}

static uint64_t holder_of(CUlogicalEndpointId endpoint) { return mixed(13, endpoint) | UINT64_C(1) << 63; }

int cuLogicalEndpointBindMem(CUlogicalEndpointId endpoint, CUdevice device, uint64_t endpoint_offset,
                             CUmemGenericAllocationHandle handle, uint64_t offset, uint64_t bytes, unsigned long long flags)
{
    int result = DRIVER(cuLogicalEndpointBindMem)(endpoint, device, endpoint_offset, handle, offset, bytes, flags);
    if (result == CUDA_SUCCESS)
        bind(holder_of(endpoint), index_of(device), endpoint_offset, gs_physical_of_handle(handle));
    return result;
}

int cuLogicalEndpointBindAddr(CUlogicalEndpointId endpoint, CUdevice device, uint64_t endpoint_offset, void *address,
                              uint64_t bytes, unsigned long long flags)
{
    int result = DRIVER(cuLogicalEndpointBindAddr)(endpoint, device, endpoint_offset, address, bytes, flags);
    if (result == CUDA_SUCCESS)
        bind_addresses(holder_of(endpoint), index_of(device), endpoint_offset, (CUdeviceptr)(uintptr_t)address, bytes);
    return result;
}

int cuLogicalEndpointUnbind(CUlogicalEndpointId endpoint, CUdevice device, uint64_t offset, uint64_t bytes)
{
    RELEASE(cuLogicalEndpointUnbind, (endpoint, device, offset, bytes), unbind(holder_of(endpoint), device, offset, bytes));
}

int cuLogicalEndpointDestroy(CUlogicalEndpointId endpoint)
{
    RELEASE(cuLogicalEndpointDestroy, (endpoint), gs_physical_let_go(holder_of(endpoint)));
}
