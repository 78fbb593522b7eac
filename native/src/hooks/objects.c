/* Physical memory as objects. One stays allocated while it has a handle, a mapping or a pin, so references are counted: releasing
 * the handle of mapped memory frees nothing. A pin is what keeps it without a mapping: a tile of a sparse array, a member of a
 * multicast group, memory bound to a logical endpoint. It ends when its place is reused or its holder is destroyed. */
#include "hooks/objects.h"

#include "policy/descriptors.h"
#include "policy/reserve.h"
#include "system/at_fork.h"

#define AT_ONCE 64

struct gs_table gs_handles GS_TABLE_PER_PROCESS;     /* handle → the references that it holds, in `bytes`, and the object */
static struct gs_table objects GS_TABLE_PER_PROCESS; /* object → the charged bytes, and the handle that it was created with */
static struct gs_table references GS_TABLE_PER_PROCESS; /* object → the number of its references */
static struct gs_table pins GS_TABLE_PER_PROCESS;       /* place → object, in `owner`; `bytes` is the holder */
static _Atomic uint64_t last_object;
static bool pins_exist;

void gs_object_made(CUmemGenericAllocationHandle handle, const struct gs_card *card, uint64_t bytes, uint32_t kind)
{
    uint64_t object = atomic_fetch_add(&last_object, 1) + 1;
    gs_table_put(
        &objects,
        &(struct gs_entry){
            .key = object, .bytes = bytes, .owner = handle, .kind = kind, .card = card ? card->index : GPUSLICE_CARDS});
    gs_table_count(&references, object, 1);
    gs_table_put(&gs_handles, &(struct gs_entry){.key = handle, .bytes = 1, .owner = object});
}

static struct gs_entry get(uint64_t object)
{
    struct gs_entry entry = {.card = GPUSLICE_CARDS};
    gs_table_get(&objects, object, &entry);
    return entry;
}

uint64_t gs_object_of_handle(CUmemGenericAllocationHandle handle)
{
    struct gs_entry entry;
    return gs_table_get(&gs_handles, handle, &entry) ? entry.owner : 0;
}

uint32_t gs_object_card(uint64_t object) { return get(object).card; }

void gs_object_hold(uint64_t object) { gs_table_count(&references, object, 1); }

void gs_object_drop(uint64_t object)
{
    struct gs_entry entry;
    if (gs_table_count(&references, object, -1) != 1 || !gs_table_take(&objects, object, &entry))
        return;
    gs_table_take_of(&gs_handles, entry.owner, object);
    if (entry.kind == GS_GROUP) /* an exported group keeps its members: another process may have it */
        gs_object_holder_ends(object);
    if ((entry.kind & 0xff) == GS_GROUP)
        return;
    if (!(entry.kind & GS_EXPORTED) || !gs_descriptors_keep(object))
        gs_release_entry(&entry);
    else if ((entry.kind & 0xff) == GS_IMPORT)
        gs_accounts_imported(&gs_accounts, entry.card, -1);
}

bool gs_object_made_with(uint64_t object, CUmemGenericAllocationHandle handle) { return object && get(object).owner == handle; }

bool gs_object_is_lent(uint64_t object)
{
    uint32_t kind = get(object).kind;
    return kind & GS_EXPORTED || (kind & 0xff) == GS_IMPORT;
}

/* As a member of a group that other processes may have. */
static void set_lent(uint64_t object, bool lent)
{
    struct gs_entry entry = get(object);
    int64_t bytes = lent ? (int64_t)entry.bytes : -(int64_t)entry.bytes;
    if (entry.kind != (lent ? GS_LINEAR : GS_LINEAR | GS_EXPORTED | GS_LENT))
        return;
    entry.kind ^= GS_EXPORTED | GS_LENT;
    gs_table_put(&objects, &entry);
    gs_accounts_exported(&gs_accounts, entry.card, bytes);
    gs_accounts_unconfirmed(&gs_accounts, entry.card, GS_MAY_BE_UNLISTED, bytes);
}

/* ---- pins ---- */

void gs_object_unpin(uint64_t place)
{
    struct gs_entry entry;
    if (gs_table_take(&pins, place, &entry))
        gs_object_drop(entry.owner);
}

void gs_object_pin(struct gs_entry place)
{
    if (!place.owner)
        return;
    if (gs_object_is_lent(place.bytes))
        set_lent(place.owner, true);
    gs_object_hold(place.owner);
    gs_object_unpin(place.key); /* mapping a place again releases its old tile */
    gs_table_put(&pins, &place);
    __atomic_store_n(&pins_exist, true, __ATOMIC_RELAXED);
}

struct range {
    struct gs_pins pins;
    uint64_t objects[AT_ONCE];
    uint32_t count;
};

static bool is_in(const struct gs_entry *entry, const struct gs_pins *range)
{
    return entry->bytes == range->holder && entry->kind >= range->from && entry->kind < range->to &&
           (range->card == GPUSLICE_CARDS || entry->card == range->card);
}

static bool gather(struct gs_entry *entry, void *context)
{
    struct range *range = context;
    if (range->count == AT_ONCE || !is_in(entry, &range->pins))
        return false;
    range->objects[range->count++] = entry->owner;
    return true;
}

/* References are dropped outside the table's locks, since dropping the last reference to a group releases its own pins. */
void gs_object_unpin_range(struct gs_pins of)
{
    struct range range = {.pins = of};
    if (gs_likely(!__atomic_load_n(&pins_exist, __ATOMIC_RELAXED)))
        return;
    do {
        range.count = 0;
        gs_table_sift(&pins, gather, &range);
        for (uint32_t i = 0; i < range.count; i++) {
            set_lent(range.objects[i], false);
            gs_object_drop(range.objects[i]);
        }
    } while (range.count == AT_ONCE);
}

void gs_object_holder_ends(uint64_t holder)
{
    gs_object_unpin_range((struct gs_pins){.holder = holder, .to = UINT64_MAX, .card = GPUSLICE_CARDS});
}

/* ---- memory that other processes may hold ---- */

static bool lend(struct gs_entry *pin, void *group)
{
    if (pin->bytes == *(uint64_t *)group)
        set_lent(pin->owner, true);
    return false;
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

bool gs_object_export(uint64_t object, int descriptor)
{
    struct gs_entry entry;
    bool known = gs_table_get(&objects, object, &entry);
    if (known && entry.kind == GS_GROUP) {
        entry.kind |= GS_EXPORTED;
        gs_table_put(&objects, &entry);
        gs_table_sift(&pins, lend, &object);
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
        gs_accounts_unconfirmed(&gs_accounts, entry.card, GS_MAY_BE_UNLISTED, (int64_t)entry.bytes);
        gs_table_put(&objects, &entry);
    }
    if (descriptor >= 0)
        gs_descriptor_made(object, entry.card, entry.bytes, descriptor);
    return true;
}
