/* Physical memory behind virtual addresses. It lives while any handle or any mapping does, so references are counted:
 * releasing the handle of mapped memory frees nothing. */
#include "core.h"
#include "own.h"

static struct gs_table handles;  /* handle → references by it, object */
static struct gs_table mappings; /* address → length, object */
static struct gs_table objects;  /* object → what it is charged */
static struct gs_table references; /* object → how many */
static struct gs_table pins; /* place in a holder → object; the holder is in `bytes` */
static _Atomic uint64_t last_object;
static bool pins_exist;

void gs_forget_physical(void)
{
    gs_table_forget(&handles);
    gs_table_forget(&mappings);
    gs_table_forget(&objects);
    gs_table_forget(&references);
    gs_table_forget(&pins);
}

static struct gs_card *card_of(const CUmemAllocationProp *properties)
{
    if (!properties)
        return NULL;
    if (properties->location.type == CU_MEM_LOCATION_TYPE_DEVICE)
        return gs_card_of_device(properties->location.id);
    if (properties->location.type == CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN)
        return gs_card_of_device(properties->location.id & 0xff);
    return NULL; /* host memory */
}

static void hold_object(CUmemGenericAllocationHandle handle, const struct gs_card *card, uint64_t bytes, uint32_t kind)
{
    uint64_t object = atomic_fetch_add(&last_object, 1) + 1;
    gs_table_put(&objects, &(struct gs_entry){.key = object, .bytes = bytes, .kind = kind, .card = card->index});
    gs_table_count(&references, object, 1);
    gs_table_put(&handles, &(struct gs_entry){.key = handle, .bytes = 1, .owner = object});
}

static void drop_reference(uint64_t object)
{
    struct gs_entry entry;
    if (gs_table_count(&references, object, -1) == 1 && gs_table_take(&objects, object, &entry))
        gs_release_entry(&entry);
}

int cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *properties,
                unsigned long long flags)
{
    struct gs_card *card = gs_enter_cuda() ? card_of(properties) : NULL;
    if (!card || !bytes)
        return DRIVER(cuMemCreate)(handle, bytes, properties, flags);
    uint64_t reserved = gs_round_up(bytes, GS_PAGE_BYTES);
    if (!gs_reserve(card, reserved))
        return CUDA_ERROR_OUT_OF_MEMORY;
    int result = DRIVER(cuMemCreate)(handle, bytes, properties, flags);
    if (result == CUDA_SUCCESS)
        hold_object(*handle, card, reserved, GS_LINEAR);
    else
        gs_settle(card, reserved, 0);
    return result;
}

static bool take_handle(CUmemGenericAllocationHandle handle, struct gs_entry *entry)
{
    return gs_enter_cuda() && gs_table_take(&handles, handle, entry);
}

int cuMemRelease(CUmemGenericAllocationHandle handle)
{
    struct gs_entry entry;
    bool known = take_handle(handle, &entry);
    if (known && entry.bytes > 1) { /* retained: other references go by the same handle */
        entry.bytes--;
        gs_table_put(&handles, &entry);
    }
    int result = DRIVER(cuMemRelease)(handle);
    if (known && result == CUDA_SUCCESS)
        drop_reference(entry.owner);
    else if (!known && result == CUDA_SUCCESS)
        gs_unpin(handle); /* a multicast group, perhaps */
    return result;
}

int cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
             unsigned long long flags)
{
    struct gs_entry entry;
    bool known = gs_enter_cuda() && gs_table_get(&handles, handle, &entry);
    int result = DRIVER(cuMemMap)(address, bytes, offset, handle, flags);
    if (known && result == CUDA_SUCCESS) {
        gs_table_count(&references, entry.owner, 1);
        gs_table_put(&mappings, &(struct gs_entry){.key = address, .bytes = bytes, .owner = entry.owner});
    }
    return result;
}

/* A range may hold several mappings, each of them whole. */
int cuMemUnmap(CUdeviceptr address, size_t bytes)
{
    struct gs_entry entry;
    bool active = gs_enter_cuda();
    int result = DRIVER(cuMemUnmap)(address, bytes);
    CUdeviceptr end = address + bytes;
    while (active && result == CUDA_SUCCESS && address < end && gs_table_take(&mappings, address, &entry)) {
        drop_reference(entry.owner);
        address += entry.bytes;
    }
    return result;
}

/* The mapping that holds an address need not start there. */
struct search {
    uint64_t address, object;
};

static bool look_into(struct gs_entry *entry, void *context)
{
    struct search *search = context;
    if (search->address >= entry->key && search->address - entry->key < entry->bytes)
        search->object = entry->owner;
    return false;
}

int cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address)
{
    struct gs_entry entry;
    struct search search = {(uint64_t)(uintptr_t)address, 0};
    bool active = gs_enter_cuda();
    int result = DRIVER(cuMemRetainAllocationHandle)(handle, address);
    if (!active || result != CUDA_SUCCESS)
        return result;
    gs_table_sift(&mappings, look_into, &search);
    if (!search.object)
        return result;
    gs_table_count(&references, search.object, 1);
    if (!gs_table_get(&handles, *handle, &entry) || entry.owner != search.object)
        entry = (struct gs_entry){.key = *handle, .owner = search.object};
    entry.bytes++;
    gs_table_put(&handles, &entry);
    return result;
}

static bool mark_exported(uint64_t object)
{
    struct gs_entry entry;
    if (!gs_table_get(&objects, object, &entry) || entry.kind != GS_LINEAR)
        return false;
    entry.kind |= GS_EXPORTED;
    gs_books_exported(&gs_books, entry.card, entry.bytes);
    return gs_table_put(&objects, &entry);
}

int cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle handle, int type,
                                 unsigned long long flags)
{
    struct gs_entry entry;
    bool known = gs_enter_cuda() && gs_table_get(&handles, handle, &entry);
    int result = DRIVER(cuMemExportToShareableHandle)(shareable, handle, type, flags);
    if (known && result == CUDA_SUCCESS)
        mark_exported(entry.owner);
    return result;
}

/* Counted where it was made. That it is open here keeps it counted when its maker goes. */
int cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shareable, int type)
{
    struct gs_card *card = gs_enter_cuda() ? gs_current_place().card : NULL;
    int result = DRIVER(cuMemImportFromShareableHandle)(handle, shareable, type);
    if (card && result == CUDA_SUCCESS) {
        gs_books_imported(&gs_books, card->index, 1);
        hold_object(*handle, card, 0, GS_IMPORT);
    }
    return result;
}

/* ---- memory held by something that is no mapping of ours: a sparse array's tile, a multicast group's member ---- */

static uint64_t mixed(uint64_t hash, uint64_t word) { return (hash ^ word) * UINT64_C(0x9e3779b97f4a7c15) ^ hash >> 29; }

static void pin(uint64_t place, uint64_t holder, CUmemGenericAllocationHandle handle)
{
    struct gs_entry entry, before;
    if (!gs_table_get(&handles, handle, &entry))
        return;
    gs_table_count(&references, entry.owner, 1);
    if (gs_table_take(&pins, place, &before)) /* mapped anew: the old tile is free */
        drop_reference(before.owner);
    gs_table_put(&pins, &(struct gs_entry){.key = place, .bytes = holder, .owner = entry.owner});
    __atomic_store_n(&pins_exist, true, __ATOMIC_RELAXED);
}

static void unpin_place(uint64_t place)
{
    struct gs_entry entry;
    if (gs_table_take(&pins, place, &entry))
        drop_reference(entry.owner);
}

static bool drop_pin(struct gs_entry *entry, void *context)
{
    if (entry->bytes != *(const uint64_t *)context)
        return false;
    drop_reference(entry->owner);
    return true;
}

void gs_unpin(uint64_t holder)
{
    if (gs_unlikely(__atomic_load_n(&pins_exist, __ATOMIC_RELAXED)))
        gs_table_sift(&pins, drop_pin, &holder);
}

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

static void note_tiles(const CUarrayMapInfo *list, unsigned int count)
{
    for (unsigned int i = 0; i < count; i++)
        if (list[i].memOperationType == CU_MEM_OPERATION_TYPE_MAP)
            pin(tile_of(&list[i]), (uint64_t)(uintptr_t)list[i].resource, list[i].memHandle);
        else
            unpin_place(tile_of(&list[i]));
}

int cuMemMapArrayAsync(CUarrayMapInfo *list, unsigned int count, CUstream stream)
{
    bool active = gs_enter_cuda();
    int result = DRIVER(cuMemMapArrayAsync)(list, count, stream);
    if (active && result == CUDA_SUCCESS)
        note_tiles(list, count);
    return result;
}

int cuMemMapArrayAsync_ptsz(CUarrayMapInfo *list, unsigned int count, CUstream stream)
{
    bool active = gs_enter_cuda();
    int result = DRIVER(cuMemMapArrayAsync_ptsz)(list, count, stream);
    if (active && result == CUDA_SUCCESS)
        note_tiles(list, count);
    return result;
}

static uint64_t member_of(CUmemGenericAllocationHandle group, size_t offset) { return mixed(mixed(group, 7), offset) | 1; }

int cuMulticastBindMem(CUmemGenericAllocationHandle group, size_t group_offset, CUmemGenericAllocationHandle handle,
                       size_t offset, size_t bytes, unsigned long long flags)
{
    bool active = gs_enter_cuda();
    int result = DRIVER(cuMulticastBindMem)(group, group_offset, handle, offset, bytes, flags);
    if (active && result == CUDA_SUCCESS)
        pin(member_of(group, group_offset), group, handle);
    return result;
}

int cuMulticastBindMem_v2(CUmemGenericAllocationHandle group, CUdevice device, size_t group_offset,
                          CUmemGenericAllocationHandle handle, size_t offset, size_t bytes, unsigned long long flags)
{
    bool active = gs_enter_cuda();
    int result = DRIVER(cuMulticastBindMem_v2)(group, device, group_offset, handle, offset, bytes, flags);
    if (active && result == CUDA_SUCCESS)
        pin(member_of(group, group_offset), group, handle);
    return result;
}

int cuMulticastUnbind(CUmemGenericAllocationHandle group, CUdevice device, size_t group_offset, size_t bytes)
{
    bool active = gs_enter_cuda();
    int result = DRIVER(cuMulticastUnbind)(group, device, group_offset, bytes);
    if (active && result == CUDA_SUCCESS)
        unpin_place(member_of(group, group_offset));
    return result;
}
