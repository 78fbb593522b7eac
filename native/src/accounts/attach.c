/* The tenant can write the region's file, so anything may happen to it while processes run: it may be zeroed, overwritten,
 * replaced, removed or truncated. Each process also keeps what it holds in its own memory, so it can write its accounts
 * again into another slot, either of the same file after repairing it or of the file that is there now.
 *
 * Other threads keep allocating during a repair, and nothing may be counted twice or lost. Each change is made first in
 * the slot and then in our own word, whose lowest bits are the number of the current attachment. A repair increments that
 * number and reads the bytes in one atomic step. If a change finds another number than that of the slot it wrote to, it
 * came after the copy and is repeated in the new slot; if it finds the same number, it came before and is in the copy.
 */
#include "accounts/attach.h"

#include <stddef.h>
#include <string.h>

#include "accounts/slots.h"
#include "system/text.h"

/* An access to a truncated file ends the host program with SIGBUS, so the file is checked often. A check is one system
 * call, whose cost at this rate is negligible. */
#define LOOK_EVERY_NS UINT64_C(10000000)
/* Of many processes that start at once not each looks at all of them. */
#define FEW_SLOTS 16
#define SWEPT_FOR_NS UINT64_C(10000000)
#define MOST_MOVES 64 /* to another file; each leaves the old mapping, which a thread may still be using */

static const uint64_t ours = GPUSLICE_REGION_MAGIC | GPUSLICE_REGION_VERSION;
static struct gs_lock lock;

/* ---- cards ---- */

uint64_t gs_card_key(const char *uuid)
{
    size_t length = 0;
    while (length < GPUSLICE_UUID_BYTES && uuid[length])
        length++;
    return gs_hash(uuid, length);
}

static void write_card(struct gpuslice_card *entry, const struct gs_holding *holding)
{
    memcpy(entry->uuid, holding->uuid, sizeof entry->uuid);
    atomic_store(&entry->limit_bytes, holding->limit_bytes);
    atomic_store(&entry->compute_percent, holding->compute_percent);
}

static bool is_entry(struct gpuslice_card *entry, uint64_t key) { return atomic_load(&entry->key) == key; }

static bool is_free(struct gpuslice_card *entry, uint64_t key)
{
    uint64_t nobody = 0;
    return atomic_compare_exchange_strong(&entry->key, &nobody, key);
}

/* A key that does not match the entry's uuid was not written by us. */
static bool is_damaged(struct gpuslice_card *entry, uint64_t key)
{
    uint64_t found = atomic_load(&entry->key);
    return found != gs_card_key(entry->uuid) && atomic_compare_exchange_strong(&entry->key, &found, key);
}

uint32_t gs_accounts_card(struct gs_accounts *accounts, const char *uuid)
{
    static bool (*const choices[])(struct gpuslice_card *, uint64_t) = {is_entry, is_free, is_damaged};
    uint64_t key = gs_card_key(uuid);
    struct gs_attachment *at = gs_attached(accounts);
    for (int choice = 0; at && at->region && choice < 3; choice++)
        for (uint32_t card = 0; card < GPUSLICE_CARDS; card++) {
            struct gpuslice_card *entry = &at->region->cards[card];
            if (!choices[choice](entry, key))
                continue;
            strncpy(accounts->mine[card].uuid, uuid, GPUSLICE_UUID_BYTES - 1);
            memcpy(entry->uuid, accounts->mine[card].uuid, sizeof entry->uuid);
            return card;
        }
    return GPUSLICE_CARDS;
}

void gs_accounts_show_limit(struct gs_accounts *accounts, uint32_t card, uint64_t limit_bytes, uint32_t compute_percent)
{
    struct gs_attachment *at = gs_attached(accounts);
    if (card >= GPUSLICE_CARDS || !at || !at->region)
        return;
    accounts->mine[card].limit_bytes = limit_bytes;
    accounts->mine[card].compute_percent = compute_percent;
    write_card(&at->region->cards[card], &accounts->mine[card]);
}

/* ---- opening ---- */

/* Zeros are a new region. Any other unknown magic is damage, of which only this word needs repair: overwritten slots have
 * no living owner and are swept. A region of another version has another layout and cannot be shared. */
static bool is_usable(struct gpuslice_region *region)
{
    uint64_t found = gs_load(&region->magic);
    if (found != ours && found >> 8 == GPUSLICE_REGION_MAGIC >> 8)
        return false;
    if (found != ours)
        atomic_compare_exchange_strong(&region->magic, &found, ours);
    return true;
}

static struct gpuslice_region *map(const char *path, struct gs_file *file)
{
    struct gpuslice_region *region = gs_map_shared(path, sizeof *region, file);
    if (region && !is_usable(region)) {
        gs_unmap(region, sizeof *region);
        region = NULL;
    }
    return region;
}

bool gs_accounts_open(struct gs_accounts *accounts, const char *path)
{
    size_t length = strlen(path);
    memset(accounts, 0, sizeof *accounts);
    if (length < sizeof accounts->path)
        memcpy(accounts->path, path, length + 1);
    accounts->attachments[0].region = map(path, &accounts->file);
    atomic_store_explicit(&accounts->looked_ns, gs_coarse_ns(), memory_order_relaxed);
    atomic_store_explicit(&accounts->at, &accounts->attachments[0], memory_order_release);
    return accounts->attachments[0].region != NULL;
}

void gs_attach_forget(struct gs_accounts *accounts)
{
    struct gs_attachment *at = gs_attached(accounts);
    lock = (struct gs_lock){0};
    gs_slots_forget_lock();
    if (!at)
        return;
    at->slot = NULL;
    atomic_store(&accounts->host_pid, 0);
    for (uint32_t card = 0; card < GPUSLICE_CARDS; card++) {
        struct gs_holding *holding = &accounts->mine[card];
        uint64_t number = gs_load(&holding->gained) % GS_ATTACHMENTS;
        memset((void *)holding, 0, offsetof(struct gs_holding, limit_bytes));
        atomic_store(&holding->gained, number);
        atomic_store(&holding->lost, number);
    }
}

struct gs_attachment gs_accounts_at(const struct gs_accounts *accounts)
{
    struct gs_attachment *at = gs_attached(accounts);
    return at ? (struct gs_attachment){at->region, __atomic_load_n(&at->slot, __ATOMIC_ACQUIRE), at->owner}
              : (struct gs_attachment){0};
}

/* ---- slots ---- */

static bool claim(const struct gs_accounts *accounts, struct gs_attachment *at, uint64_t last)
{
    uint64_t now = gs_coarse_ns(), swept = gs_load(&at->region->swept_ns);
    if (gs_slots_high(at->region, NULL) <= FEW_SLOTS || swept > now || now - swept > SWEPT_FOR_NS) {
        gs_slots_sweep(at->region, NULL, accounts->path);
        gs_orphans_settle(&accounts->exports, at->region, at->slot);
    }
    struct gpuslice_slot *slot = gs_slot_claim(at->region, last);
    if (slot)
        gs_slot_lock(at->region, slot, accounts->path);
    at->owner = gs_slot_owner();
    __atomic_store_n(&at->slot, slot, __ATOMIC_RELEASE);
    return slot != NULL;
}

struct gs_attachment *gs_attach_claiming(struct gs_accounts *accounts)
{
    struct gs_attachment *at = gs_attached(accounts);
    if (!at || !at->region)
        return NULL;
    GS_GUARD(&lock);
    at = gs_attached(accounts);
    bool has = at->slot || claim(accounts, at, GPUSLICE_SLOTS);
    return has ? at : NULL;
}

bool gs_accounts_sweep(struct gs_accounts *accounts)
{
    gs_accounts_look(accounts);
    GS_GUARD(&lock);
    struct gs_attachment *at = gs_attached(accounts);
    bool less = at && at->region && gs_slots_sweep(at->region, at->slot, accounts->path);
    less |= at && at->region && gs_orphans_settle(&accounts->exports, at->region, at->slot);
    return less;
}

/* ---- repairing, under the lock ---- */

static struct gs_attachment *following(struct gs_accounts *accounts, struct gpuslice_region *region)
{
    struct gs_attachment *old = gs_attached(accounts);
    struct gs_attachment *next = &accounts->attachments[(size_t)(old - accounts->attachments + 1) % GS_ATTACHMENTS];
    *next = (struct gs_attachment){.region = region};
    return next;
}

static uint64_t following_number(_Atomic uint64_t *word)
{
    uint64_t before = gs_load(word);
    while (!atomic_compare_exchange_weak(word, &before, before - before % GS_ATTACHMENTS + (before + 1) % GS_ATTACHMENTS))
        ;
    return before;
}

/* From here on changes are repeated in the following attachment. Returns the bytes held until now. `lost` is read first: of
 * an allocation and its release that happen in between, either neither is in the copy, or only the allocation is, and the
 * release is repeated. */
static uint64_t advance(struct gs_holding *holding)
{
    uint64_t lost = following_number(&holding->lost);
    return gs_holding_bytes(following_number(&holding->gained), lost);
}

static void write_holding(struct gs_accounts *accounts, struct gs_attachment *at, uint32_t card)
{
    struct gs_holding *holding = &accounts->mine[card];
    struct gpuslice_usage *usage = &at->slot->usage[card];
    atomic_store(&usage->used_bytes, advance(holding));
    atomic_store(&usage->own_bytes, atomic_load(&holding->own_bytes));
    atomic_store(&usage->exported_bytes, atomic_load(&holding->exported_bytes));
    atomic_store(&usage->imports, atomic_load(&holding->imports));
    atomic_store(&usage->changed_ns, atomic_load(&holding->changed_ns));
    atomic_store(&at->slot->in_flight[card], gs_flights(accounts, card));
    if (gs_is_comparable(holding))
        atomic_fetch_or(&at->slot->provisional, UINT64_C(1) << card);
    if (!*holding->uuid)
        return;
    atomic_store(&at->region->cards[card].key, gs_card_key(holding->uuid));
    write_card(&at->region->cards[card], holding);
}

/* Takes another slot than the previous one, in which a thread may be about to write. Without a slot there is nothing to write. */
static void attach(struct gs_accounts *accounts, struct gpuslice_region *region)
{
    struct gs_attachment *old = gs_attached(accounts), *next = following(accounts, region);
    if (old->slot && !claim(accounts, next, (uint64_t)(old->slot - old->region->slots)))
        return; /* every slot is taken: keep using the old one */
    for (uint32_t card = 0; card < GPUSLICE_CARDS; card++)
        next->slot ? write_holding(accounts, next, card) : (void)advance(&accounts->mine[card]);
    if (next->slot) {
        atomic_store(&next->slot->host_pid, atomic_load(&accounts->host_pid));
        gs_exports_show(&accounts->exports, region);
    }
    atomic_store_explicit(&accounts->at, next, memory_order_release);
}

static bool is_ours(const struct gs_attachment *at) { return gs_load(&at->slot->owner) == at->owner; }

/* The region that should be mapped now: the current one, grown again if it was truncated, or that of the file which has
 * replaced it. */
static struct gpuslice_region *right_region(struct gs_accounts *accounts)
{
    struct gpuslice_region *region = gs_attached(accounts)->region, *other;
    struct gs_file file;
    switch (gs_file_state(accounts->path, &accounts->file, sizeof *region)) {
    case GS_FILE_SHORT: gs_file_grow(accounts->path, sizeof *region); return region;
    case GS_FILE_ANOTHER:
        if (accounts->moves >= MOST_MOVES || !(other = map(accounts->path, &file)))
            return region;
        accounts->moves++;
        accounts->file = file;
        return other;
    default: /* includes a file that we cannot see, as after chroot */ return region;
    }
}

static void repair(struct gs_accounts *accounts)
{
    struct gpuslice_region *region = right_region(accounts);
    struct gs_attachment *at = gs_attached(accounts);
    if (gs_load(&region->magic) != ours)
        atomic_store(&region->magic, ours);
    if (region != at->region || (at->slot && !is_ours(at)))
        attach(accounts, region);
}

uint64_t gs_accounts_look(struct gs_accounts *accounts)
{
    uint64_t now = gs_coarse_ns(), last = atomic_load_explicit(&accounts->looked_ns, memory_order_relaxed);
    struct gs_attachment *at = gs_attached(accounts);
    if (now - last < LOOK_EVERY_NS || !at || !at->region ||
        !atomic_compare_exchange_strong_explicit(&accounts->looked_ns, &last, now, memory_order_relaxed, memory_order_relaxed))
        return now;
    GS_GUARD(&lock);
    repair(accounts);
    return now;
}

void gs_accounts_changed(struct gs_accounts *accounts, uint32_t card)
{
    uint64_t now = gs_accounts_look(accounts);
    struct gs_attachment *at = gs_attached(accounts);
    if (!at || !at->slot || card >= GPUSLICE_CARDS)
        return;
    atomic_store_explicit(&accounts->mine[card].changed_ns, now, memory_order_release);
    atomic_store_explicit(&at->slot->usage[card].changed_ns, now, memory_order_release);
}

void gs_attach_anew(struct gs_accounts *accounts, const struct gs_attachment *broken)
{
    GS_GUARD(&lock);
    if (gs_attached(accounts) == broken)
        repair(accounts);
}

struct gs_attachment *gs_attachment_of(struct gs_accounts *accounts, uint64_t word)
{
    GS_GUARD(&lock);
    return &accounts->attachments[word % GS_ATTACHMENTS];
}
