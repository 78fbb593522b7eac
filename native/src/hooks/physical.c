/* Physical memory behind virtual addresses. It stays allocated while it has a handle or a mapping, so references are counted:
 * releasing the handle of mapped memory frees nothing. */
#define _GNU_SOURCE
#include "hooks/physical.h"

#include <sys/syscall.h>
#include <unistd.h>

#include "hooks/place.h"
#include "policy/descriptors.h"
#include "policy/held.h"
#include "policy/process_usage.h"
#include "policy/provisional.h"
#include "policy/reserve.h"
#include "policy/unconfirmed.h"
#include "system/at_fork.h"

static struct gs_table handles;    /* handle → the references that it holds, in `bytes`, and the object, in `owner` */
static struct gs_table mappings;   /* address → the length, in `bytes`, and the object, in `owner` */
static struct gs_table objects;    /* object → the charged bytes, and the handle that it was created with, in `owner` */
static struct gs_table references; /* object → the number of its references */
static _Atomic uint64_t last_object;

static void forget(void)
{
    gs_table_forget(&handles);
    gs_table_forget(&mappings);
    gs_table_forget(&objects);
    gs_table_forget(&references);
}
GS_AT_FORK(forget);

static struct gs_card *card_of(const CUmemAllocationProp *properties)
{
    return properties ? gs_card_of_location(properties->location.type, properties->location.id) : NULL;
}

void gs_physical_made(CUmemGenericAllocationHandle handle, const struct gs_card *card, uint64_t bytes, uint32_t kind)
{
    uint64_t object = atomic_fetch_add(&last_object, 1) + 1;
    gs_table_put(
        &objects,
        &(struct gs_entry){
            .key = object, .bytes = bytes, .owner = handle, .kind = kind, .card = card ? card->index : GPUSLICE_CARDS});
    gs_table_count(&references, object, 1);
    gs_table_put(&handles, &(struct gs_entry){.key = handle, .bytes = 1, .owner = object});
}

uint64_t gs_physical_of_handle(CUmemGenericAllocationHandle handle)
{
    struct gs_entry entry;
    return gs_table_get(&handles, handle, &entry) ? entry.owner : 0;
}

uint32_t gs_physical_card(uint64_t object)
{
    struct gs_entry entry;
    return gs_table_get(&objects, object, &entry) ? entry.card : GPUSLICE_CARDS;
}

void gs_physical_hold(uint64_t object) { gs_table_count(&references, object, 1); }

static const struct gs_members *members; /* NULL as long as nothing has any */

void gs_physical_has_members(const struct gs_members *those) { __atomic_store_n(&members, those, __ATOMIC_RELEASE); }

void gs_physical_let_go(uint64_t holder)
{
    const struct gs_members *those = __atomic_load_n(&members, __ATOMIC_ACQUIRE);
    if (those)
        those->release(holder);
}

static void lend_members(uint64_t group)
{
    const struct gs_members *those = __atomic_load_n(&members, __ATOMIC_ACQUIRE);
    if (those)
        those->lend(group);
}

void gs_physical_drop(uint64_t object)
{
    struct gs_entry entry;
    if (gs_table_count(&references, object, -1) != 1 || !gs_table_take(&objects, object, &entry))
        return;
    gs_table_take_of(&handles, entry.owner, object);
    if (entry.kind == GS_GROUP) /* an exported group keeps its members: another process may have it */
        gs_physical_let_go(object);
    if ((entry.kind & 0xff) == GS_GROUP)
        return;
    if (!(entry.kind & GS_EXPORTED) || !gs_descriptors_keep(object))
        gs_release_entry(&entry);
    else if ((entry.kind & 0xff) == GS_IMPORT)
        gs_loan_ended(entry.card);
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
        gs_physical_made(*handle, card, reserved, GS_LINEAR);
    gs_settle(card, reserved, result == CUDA_SUCCESS ? reserved : 0);
    return result;
}

static bool made_with(uint64_t object, CUmemGenericAllocationHandle handle)
{
    struct gs_entry entry;
    return gs_table_get(&objects, object, &entry) && entry.owner == handle;
}

/* While the memory exists, the driver may let a program keep using a handle that it has released. */
int cuMemRelease(CUmemGenericAllocationHandle handle)
{
    struct gs_entry entry;
    bool known = gs_table_take(&handles, handle, &entry);
    bool held = known && entry.bytes;
    if (held)
        entry.bytes--;
    if (known && (entry.bytes || made_with(entry.owner, handle)))
        gs_table_put(&handles, &entry);
    if (held)
        gs_releasing_begins();
    int result = DRIVER(cuMemRelease)(handle);
    if (held && result == CUDA_SUCCESS)
        gs_physical_drop(entry.owner);
    if (held)
        gs_releasing_ends();
    return result;
}

int cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags)
{
    struct gs_entry entry;
    bool known = gs_table_get(&handles, handle, &entry);
    int result = DRIVER(cuMemMap)(address, bytes, offset, handle, flags);
    if (known && result == CUDA_SUCCESS) {
        gs_table_count(&references, entry.owner, 1);
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
        gs_physical_drop(entry.owner);
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
    gs_physical_hold(object);
    if (!gs_table_get(&handles, *handle, &entry) || entry.owner != object)
        entry = (struct gs_entry){.key = *handle, .owner = object};
    entry.bytes++;
    gs_table_put(&handles, &entry);
    return result;
}

/* Imported memory is counted by its maker. But the maker may release it while a descriptor that is exported here keeps it, so
 * it is counted here too. */
static bool count_imported(const struct gs_entry *object)
{
    struct gs_card *card = NULL;
    for (uint32_t i = 0; i < gs_card_count(); i++)
        card = gs_card_at(i)->index == object->card ? gs_card_at(i) : card;
    if (!card || !object->bytes || !gs_reserve(card, object->bytes))
        return false;
    gs_settle(card, object->bytes, object->bytes);
    return true;
}

/* False if nobody would count the memory that the descriptor keeps. */
static bool mark_exported(uint64_t object, int descriptor)
{
    struct gs_entry entry;
    bool known = gs_table_get(&objects, object, &entry);
    if (known && entry.kind == GS_GROUP) {
        entry.kind |= GS_EXPORTED;
        gs_table_put(&objects, &entry);
        lend_members(object);
    }
    if (!known || entry.card >= GPUSLICE_CARDS)
        return true;
    bool first = !(entry.kind & GS_EXPORTED);
    if ((entry.kind & 0xff) == GS_IMPORT ? first && !count_imported(&entry) : (entry.kind & 0xff) != GS_LINEAR)
        return (entry.kind & 0xff) != GS_IMPORT;
    if (entry.kind & GS_LENT) { /* it is now exported by itself, so it stays exported when it leaves the group */
        entry.kind &= ~(uint32_t)GS_LENT;
        gs_table_put(&objects, &entry);
    }
    if (first) {
        entry.kind |= GS_EXPORTED;
        gs_accounts_exported(&gs_accounts, entry.card, (int64_t)entry.bytes);
        gs_unconfirmed_add(entry.card, GS_MAY_BE_UNLISTED, (int64_t)entry.bytes);
        gs_table_put(&objects, &entry);
    }
    if (descriptor >= 0)
        gs_descriptor_made(object, entry.card, entry.bytes, descriptor);
    return true;
}

bool gs_physical_is_lent(uint64_t object)
{
    struct gs_entry entry;
    return gs_table_get(&objects, object, &entry) && (entry.kind & GS_EXPORTED || (entry.kind & 0xff) == GS_IMPORT);
}

static void change_lent(struct gs_entry *entry, int64_t bytes)
{
    entry->kind ^= GS_EXPORTED | GS_LENT;
    gs_table_put(&objects, entry);
    gs_accounts_exported(&gs_accounts, entry->card, bytes);
    gs_unconfirmed_add(entry->card, GS_MAY_BE_UNLISTED, bytes);
}

void gs_physical_lend(uint64_t object)
{
    struct gs_entry entry;
    if (gs_table_get(&objects, object, &entry) && entry.kind == GS_LINEAR)
        change_lent(&entry, (int64_t)entry.bytes);
}

void gs_physical_unlend(uint64_t object)
{
    struct gs_entry entry;
    if (gs_table_get(&objects, object, &entry) && entry.kind == (GS_LINEAR | GS_EXPORTED | GS_LENT))
        change_lent(&entry, -(int64_t)entry.bytes);
}

enum { POSIX_FILE_DESCRIPTOR = 1 };

int cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle handle, int type, unsigned long long flags)
{
    struct gs_entry entry;
    bool known = gs_table_get(&handles, handle, &entry);
    int result = DRIVER(cuMemExportToShareableHandle)(shareable, handle, type, flags);
    if (!known || result != CUDA_SUCCESS)
        return result;
    int descriptor = type == POSIX_FILE_DESCRIPTOR && shareable ? *(int *)shareable : -1;
    if (mark_exported(entry.owner, descriptor))
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
        gs_physical_made(*handle, card, descriptor < 0 ? 0 : gs_export_size(descriptor), GS_IMPORT);
    }
    return result;
}
