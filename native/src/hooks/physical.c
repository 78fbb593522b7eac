/* Physical memory behind virtual addresses: its handles and mappings. */
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <unistd.h>

#include "accounts/exports.h"
#include "hooks/objects.h"
#include "hooks/place.h"
#include "policy/reserve.h"

static struct gs_table mappings GS_TABLE_PER_PROCESS; /* address → the length, in `bytes`, and the object, in `owner` */

static struct gs_card *card_of(const CUmemAllocationProp *properties)
{
    return properties ? gs_card_of_location(properties->location.type, properties->location.id) : NULL;
}

int cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *properties,
                unsigned long long flags)
{
    struct gs_card *card = card_of(properties);
    if (!card || !bytes)
        return DRIVER(cuMemCreate)(handle, bytes, properties, flags);
    uint64_t reserved = gs_round_up(bytes, GS_PAGE_BYTES);
    if (!gs_reserve(card, reserved))
        return CUDA_ERROR_OUT_OF_MEMORY;
    int result = DRIVER(cuMemCreate)(handle, bytes, properties, flags);
    if (result == CUDA_SUCCESS)
        gs_object_made(*handle, card, reserved, GS_LINEAR);
    gs_settle(card, reserved, result == CUDA_SUCCESS ? reserved : 0);
    return result;
}

/* While the memory exists, the driver may let a program keep using a handle that it has released. */
int cuMemRelease(CUmemGenericAllocationHandle handle)
{
    struct gs_entry entry;
    bool known = gs_table_take(&gs_handles, handle, &entry);
    bool held = known && entry.bytes;
    if (held)
        entry.bytes--;
    if (known && (entry.bytes || gs_object_made_with(entry.owner, handle)))
        gs_table_put(&gs_handles, &entry);
    if (held)
        gs_releasing_begins();
    int result = DRIVER(cuMemRelease)(handle);
    if (held && result == CUDA_SUCCESS)
        gs_object_drop(entry.owner);
    if (held)
        gs_releasing_ends();
    return result;
}

int cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags)
{
    struct gs_entry entry;
    bool known = gs_table_get(&gs_handles, handle, &entry);
    int result = DRIVER(cuMemMap)(address, bytes, offset, handle, flags);
    if (known && result == CUDA_SUCCESS) {
        gs_object_hold(entry.owner);
        gs_table_put(&mappings, &(struct gs_entry){.key = address, .bytes = bytes, .owner = entry.owner});
    }
    return result;
}

/* A range may consist of several mappings, but includes no part of one. */
int cuMemUnmap(CUdeviceptr address, size_t bytes)
{
    struct gs_entry entry;
    gs_releasing_begins();
    int result = DRIVER(cuMemUnmap)(address, bytes);
    CUdeviceptr end = address + bytes;
    while (result == CUDA_SUCCESS && address < end && gs_table_take(&mappings, address, &entry)) {
        gs_object_drop(entry.owner);
        address += entry.bytes;
    }
    gs_releasing_ends();
    return result;
}

/* The address may be anywhere in a mapping, so all mappings are searched. */
struct search {
    uint64_t address, object, end;
};

static bool look_into(struct gs_entry *entry, void *context)
{
    struct search *search = context;
    if (search->address >= entry->key && search->address - entry->key < entry->bytes) {
        search->object = entry->owner;
        search->end = entry->key + entry->bytes;
    }
    return false;
}

uint64_t gs_physical_behind(CUdeviceptr address, CUdeviceptr *end)
{
    struct search search = {.address = address};
    gs_table_sift(&mappings, look_into, &search);
    *end = search.end;
    return search.object;
}

int cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address)
{
    struct gs_entry entry;
    CUdeviceptr end;
    int result = DRIVER(cuMemRetainAllocationHandle)(handle, address);
    if (result != CUDA_SUCCESS)
        return result;
    uint64_t object = gs_physical_behind((CUdeviceptr)(uintptr_t)address, &end);
    if (!object)
        return result;
    gs_object_hold(object);
    if (!gs_table_get(&gs_handles, *handle, &entry) || entry.owner != object)
        entry = (struct gs_entry){.key = *handle, .owner = object};
    entry.bytes++;
    gs_table_put(&gs_handles, &entry);
    return result;
}

enum { POSIX_FILE_DESCRIPTOR = 1 };

int cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle handle, int type, unsigned long long flags)
{
    struct gs_entry entry;
    bool known = gs_table_get(&gs_handles, handle, &entry);
    int result = DRIVER(cuMemExportToShareableHandle)(shareable, handle, type, flags);
    if (!known || result != CUDA_SUCCESS)
        return result;
    int descriptor = type == POSIX_FILE_DESCRIPTOR && shareable ? *(int *)shareable : -1;
    if (gs_object_export(entry.owner, descriptor))
        return CUDA_SUCCESS;
    if (descriptor >= 0)
        syscall(SYS_close, descriptor);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

/* Counted by its maker; being open here keeps it counted after the maker has ended. The card is found from the memory itself:
 * possibly no context is current, or one of another card. */
int cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shareable, int type)
{
    CUmemAllocationProp properties = {0};
    int result = DRIVER(cuMemImportFromShareableHandle)(handle, shareable, type);
    if (result != CUDA_SUCCESS)
        return result;
    bool known = DRIVER(cuMemGetAllocationPropertiesFromHandle)(&properties, *handle) == CUDA_SUCCESS;
    struct gs_card *card = known ? card_of(&properties) : NULL;
    if (!card) /* a group, for example, is on no card */
        card = gs_current_place().card;
    if (card && gs_borrowed_too_much(card)) {
        DRIVER(cuMemRelease)(*handle);
        gs_refuse(card);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (card) {
        gs_accounts_imported(&gs_accounts, card->index, 1);
        int descriptor = type == POSIX_FILE_DESCRIPTOR ? (int)(intptr_t)shareable : -1;
        gs_object_made(*handle, card, descriptor < 0 ? 0 : gs_export_size(descriptor), GS_IMPORT);
    }
    return result;
}
