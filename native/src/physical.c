/* Physical memory behind virtual addresses. It lives while any handle or any mapping does, so references are counted:
 * releasing the handle of mapped memory frees nothing. */
#include "core.h"
#include "own.h"

static struct gs_table handles;  /* handle → references by it, object */
static struct gs_table mappings; /* address → length, object */
static struct gs_table objects;  /* object → what it is charged */
static struct gs_table references; /* object → how many */
static _Atomic uint64_t last_object;

void gs_forget_physical(void)
{
    gs_table_forget(&handles);
    gs_table_forget(&mappings);
    gs_table_forget(&objects);
    gs_table_forget(&references);
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
    gs_books_exported(&gs_books, entry.card, (int64_t)entry.bytes);
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
