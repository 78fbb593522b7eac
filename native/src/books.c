/* How two processes cannot overshoot together, without a lock that a dead one could hold.
 *
 * To reserve, a process first publishes the bytes as pending in its own slot, then sums all slots. If the sum is
 * within the limit the bytes become used, else they are taken back. Of any two that race, the later to publish sees
 * the earlier, so what is granted never passes the limit. The earlier may be refused for the sake of one that is
 * taken back a moment later; so a refusal is final only when the *granted* bytes leave no room, and otherwise tried
 * again: the lowest slot stays pending and waits, the others step back.
 *
 * Nothing here is two stores that must happen together. A process that dies at any instruction leaves a slot whose
 * numbers are at least what it held, and the slot is emptied by whoever finds its owner gone.
 */
#include "books.h"

#include <stddef.h>
#include <string.h>

#include "os.h"

#define OWNER_PID_BITS 22
#define OWNER_START_BITS 26
/* A counter above this was not written by us: no card has it, and sums stay clear of overflow. */
#define MOST_BYTES (UINT64_C(1) << 50)
#define CONTENDED_ROUNDS 4096

static uint64_t load(const _Atomic uint64_t *word) { return atomic_load_explicit(word, memory_order_seq_cst); }

static uint64_t bounded(const _Atomic uint64_t *word)
{
    uint64_t value = load(word);
    return value < MOST_BYTES ? value : MOST_BYTES;
}

/* Never below zero: a counter that somebody else reset must not become 16 EiB. */
static void subtract(_Atomic uint64_t *word, uint64_t bytes)
{
    uint64_t before = load(word);
    while (!atomic_compare_exchange_weak(word, &before, before > bytes ? before - bytes : 0))
        ;
}

static void raise_to(_Atomic uint64_t *word, uint64_t value)
{
    uint64_t before = atomic_load_explicit(word, memory_order_relaxed);
    while (before < value && !atomic_compare_exchange_weak(word, &before, value))
        ;
}

/* ---- slots ---- */

static uint64_t namespace_hash(uint64_t inode) { return (inode ^ inode >> 16 ^ inode >> 32) & 0xffff; }

static uint64_t owner_word(uint32_t pid, uint64_t start_time, uint64_t namespace)
{
    uint64_t start = start_time & ((UINT64_C(1) << OWNER_START_BITS) - 1);
    uint64_t low = (uint64_t)pid & ((UINT64_C(1) << OWNER_PID_BITS) - 1);
    return namespace_hash(namespace) << (OWNER_PID_BITS + OWNER_START_BITS) | start << OWNER_PID_BITS | low;
}

static uint32_t owner_pid(uint64_t owner) { return (uint32_t)(owner & ((UINT64_C(1) << OWNER_PID_BITS) - 1)); }

static uint64_t slots_high(const struct gs_books *books)
{
    uint64_t high = load(&books->region->slots_high);
    uint64_t mine = books->slot ? (uint64_t)(books->slot - books->region->slots) + 1 : 0;
    high = high > mine ? high : mine;
    return high < GPUSLICE_SLOTS ? high : GPUSLICE_SLOTS;
}

static void empty(struct gpuslice_region *region, struct gpuslice_slot *slot)
{
    for (uint32_t card = 0; card < GPUSLICE_CARDS; card++) {
        struct gpuslice_usage *usage = &slot->usage[card];
        /* First counted as orphaned, then forgotten: between the two it counts twice, never not at all. */
        uint64_t exported = bounded(&usage->exported_bytes);
        if (exported)
            atomic_fetch_add(&region->cards[card].orphaned_bytes, exported);
        atomic_store(&usage->exported_bytes, 0);
        atomic_store(&usage->pending_bytes, 0);
        atomic_store(&usage->used_bytes, 0);
        atomic_store(&usage->own_bytes, 0);
        atomic_store(&usage->imports, 0);
        atomic_store(&usage->in_flight_ns, 0);
    }
    atomic_store(&slot->host_pid, 0);
    atomic_store(&slot->start_stack, 0);
}

/* Whether the slot's owner is known to be gone. Another pid namespace's processes cannot be seen: they stay. */
static bool is_abandoned(const struct gpuslice_slot *slot, uint64_t owner, uint64_t namespace)
{
    if (owner >> (OWNER_PID_BITS + OWNER_START_BITS) != namespace_hash(namespace))
        return false;
    struct gs_process process = gs_process(owner_pid(owner));
    if (!process.alive)
        return true;
    if (process.start_time == 0)
        return false;
    if (owner_word(owner_pid(owner), process.start_time, namespace) != owner)
        return true;
    /* The same process, but is it the same program? exec frees the card and keeps the pid. */
    uint64_t stack = load(&slot->start_stack);
    return stack && process.start_stack && stack != process.start_stack;
}

static void forget_orphans_nobody_holds(struct gs_books *books)
{
    for (uint32_t card = 0; card < GPUSLICE_CARDS; card++) {
        struct gpuslice_card *entry = &books->region->cards[card];
        uint64_t orphaned = load(&entry->orphaned_bytes), imports = 0;
        if (!orphaned)
            continue;
        for (uint64_t i = 0; i < slots_high(books); i++)
            imports += load(&books->region->slots[i].owner) ? bounded(&books->region->slots[i].usage[card].imports) : 0;
        if (!imports)
            atomic_compare_exchange_strong(&entry->orphaned_bytes, &orphaned, 0);
    }
}

/* Under the slot lock: claiming looks for our own word, which a slot bears while we sweep it. */
static uint32_t sweep(struct gs_books *books)
{
    uint32_t swept = 0;
    uint64_t namespace = gs_pid_namespace(), high = slots_high(books);
    struct gs_process self = gs_process(gs_pid());
    uint64_t me = owner_word(gs_pid(), self.start_time, namespace);
    for (uint64_t i = 0; i < high; i++) {
        struct gpuslice_slot *slot = &books->region->slots[i];
        uint64_t owner = load(&slot->owner);
        if (!owner || slot == books->slot || !is_abandoned(slot, owner, namespace))
            continue;
        /* Taken over first: else a second sweeper could empty it again under a new owner. Die here, and the slot
         * belongs to one more dead process. */
        if (owner != me && !atomic_compare_exchange_strong(&slot->owner, &owner, me))
            continue;
        empty(books->region, slot);
        atomic_store(&slot->owner, 0);
        swept++;
    }
    if (swept)
        atomic_fetch_add(&books->region->swept, swept);
    forget_orphans_nobody_holds(books);
    return swept;
}

static void take_over(struct gs_books *books, struct gpuslice_slot *slot, struct gs_process self)
{
    empty(books->region, slot);
    atomic_store(&slot->pid, gs_pid());
    atomic_store(&slot->pid_namespace, gs_pid_namespace());
    atomic_store(&slot->start_time, self.start_time);
    atomic_store(&slot->start_stack, self.start_stack);
    __atomic_store_n(&books->slot, slot, __ATOMIC_RELEASE);
}

static bool claim_once(struct gs_books *books, struct gs_process self)
{
    uint64_t me = owner_word(gs_pid(), self.start_time, gs_pid_namespace());
    for (uint64_t i = 0; i < GPUSLICE_SLOTS; i++) {
        struct gpuslice_slot *slot = &books->region->slots[i];
        uint64_t owner = load(&slot->owner);
        /* Our own word without our knowledge: from before exec. What it held is gone. */
        if (owner == me || (owner == 0 && atomic_compare_exchange_strong(&slot->owner, &owner, me))) {
            raise_to(&books->region->slots_high, i + 1);
            take_over(books, slot, self);
            return true;
        }
    }
    return false;
}

/* Called by one thread at a time. */
static bool claim(struct gs_books *books)
{
    if (!books->region)
        return false;
    struct gs_process self = gs_process(gs_pid());
    sweep(books);
    return claim_once(books, self);
}

static struct gs_lock slot_lock, contention_lock;

static bool has_slot(struct gs_books *books)
{
    if (__atomic_load_n(&books->slot, __ATOMIC_ACQUIRE))
        return true;
    gs_lock(&slot_lock);
    bool has = books->slot || claim(books);
    gs_unlock(&slot_lock);
    return has;
}

uint32_t gs_books_sweep(struct gs_books *books)
{
    if (!books->region)
        return 0;
    gs_lock(&slot_lock);
    uint32_t swept = sweep(books);
    gs_unlock(&slot_lock);
    return swept;
}

/* ---- opening ---- */

bool gs_books_open(struct gs_books *books, const char *path)
{
    const uint64_t ours = GPUSLICE_REGION_MAGIC | GPUSLICE_REGION_VERSION;
    books->slot = NULL;
    books->region = gs_map_shared(path, sizeof *books->region);
    if (!books->region)
        return false;
    uint64_t found = load(&books->region->magic);
    /* Zeros are a new region. Another magic is damage: only this word is repaired, since slots with nonsense in them
     * have no living owner and are swept. Another version has another layout: it cannot be shared. */
    if (found != ours && found >> 8 == GPUSLICE_REGION_MAGIC >> 8) {
        gs_unmap(books->region, sizeof *books->region);
        books->region = NULL;
    } else if (found != ours) {
        atomic_compare_exchange_strong(&books->region->magic, &found, ours);
    }
    return books->region != NULL;
}

void gs_books_forget(struct gs_books *books)
{
    books->slot = NULL;
    slot_lock = contention_lock = (struct gs_lock){0};
}

static uint64_t key_of(const char *uuid)
{
    uint64_t key = UINT64_C(14695981039346656037);
    for (; *uuid; uuid++)
        key = (key ^ (unsigned char)*uuid) * UINT64_C(1099511628211);
    return key ? key : 1;
}

uint32_t gs_books_card(struct gs_books *books, const char *uuid)
{
    uint64_t key = key_of(uuid);
    for (uint32_t card = 0; books->region && card < GPUSLICE_CARDS; card++) {
        struct gpuslice_card *entry = &books->region->cards[card];
        uint64_t found = 0;
        if (!atomic_compare_exchange_strong(&entry->key, &found, key) && found != key)
            continue;
        strncpy(entry->uuid, uuid, sizeof entry->uuid - 1);
        return card;
    }
    return GPUSLICE_CARDS;
}

/* ---- reserve, settle ---- */

struct sum {
    uint64_t granted, pending; /* pending by all, ourselves included */
    bool lower;                /* somebody in a lower slot has bytes pending */
};

static struct sum sum_of(const struct gs_books *books, uint32_t card)
{
    struct sum sum = {.granted = bounded(&books->region->cards[card].orphaned_bytes)};
    uint64_t high = slots_high(books);
    for (uint64_t i = 0; i < high; i++) {
        const struct gpuslice_slot *slot = &books->region->slots[i];
        /* Pending before used: bytes on their way from one to the other are seen at least once. */
        uint64_t pending = bounded(&slot->usage[card].pending_bytes);
        uint64_t used = bounded(&slot->usage[card].used_bytes);
        if ((pending | used) == 0 || load(&slot->owner) == 0)
            continue;
        sum.pending += pending;
        sum.granted += used;
        sum.lower |= pending && slot < books->slot;
    }
    return sum;
}

static void grant(struct gs_books *books, uint32_t card, uint64_t bytes, uint64_t total)
{
    struct gpuslice_usage *usage = &books->slot->usage[card];
    atomic_fetch_add(&usage->used_bytes, bytes);
    subtract(&usage->pending_bytes, bytes);
    raise_to(&books->region->cards[card].peak_bytes, total);
}

enum verdict { GRANTED, FULL, CONTENDED };

/* `patience`: how often to look again while only higher slots, which step back, stand in the way. */
static enum verdict try_reserve(struct gs_books *books, uint32_t card, uint64_t bytes, uint64_t limit, int patience)
{
    struct gpuslice_usage *usage = &books->slot->usage[card];
    atomic_fetch_add(&usage->pending_bytes, bytes);
    for (;;) {
        struct sum sum = sum_of(books, card);
        if (sum.granted + sum.pending <= limit) {
            grant(books, card, bytes, sum.granted + bytes);
            return GRANTED;
        }
        bool full = sum.granted + bytes > limit;
        if (full || sum.lower || patience-- == 0) {
            subtract(&usage->pending_bytes, bytes);
            return full ? FULL : CONTENDED;
        }
        gs_yield();
    }
}

static bool reserve_against_others(struct gs_books *books, uint32_t card, uint64_t bytes, uint64_t limit)
{
    for (uint32_t round = 0; round < CONTENDED_ROUNDS; round++) {
        switch (try_reserve(books, card, bytes, limit, 64)) {
        case GRANTED:
            return true;
        case FULL:
            if (gs_books_sweep(books) == 0)
                return false;
            break;
        case CONTENDED:
            /* Perhaps with a process that died while it had bytes pending. */
            if (round % 64 == 63)
                gs_books_sweep(books);
            gs_yield();
        }
    }
    return false;
}

bool gs_books_reserve(struct gs_books *books, uint32_t card, uint64_t bytes, uint64_t limit)
{
    if (bytes > limit || bytes >= MOST_BYTES || card >= GPUSLICE_CARDS || !has_slot(books))
        return false;
    if (limit >= MOST_BYTES)
        return gs_books_add(books, card, bytes);
    if (try_reserve(books, card, bytes, limit, 0) == GRANTED)
        return true;
    /* Threads of one process share a slot and so cannot give each other precedence: one at a time. */
    gs_lock(&contention_lock);
    bool reserved = reserve_against_others(books, card, bytes, limit);
    gs_unlock(&contention_lock);
    return reserved;
}

bool gs_books_add(struct gs_books *books, uint32_t card, uint64_t bytes)
{
    if (card >= GPUSLICE_CARDS || !has_slot(books))
        return false;
    atomic_fetch_add(&books->slot->usage[card].used_bytes, bytes);
    raise_to(&books->region->cards[card].peak_bytes, gs_books_used(books, card));
    return true;
}

void gs_books_return(struct gs_books *books, uint32_t card, uint64_t bytes)
{
    if (bytes && books->slot && card < GPUSLICE_CARDS)
        subtract(&books->slot->usage[card].used_bytes, bytes);
}

void gs_books_count_refusal(struct gs_books *books, uint32_t card)
{
    if (books->region && card < GPUSLICE_CARDS)
        atomic_fetch_add_explicit(&books->region->cards[card].refused, 1, memory_order_relaxed);
}

uint64_t gs_books_used(const struct gs_books *books, uint32_t card)
{
    return books->region && card < GPUSLICE_CARDS ? sum_of(books, card).granted : 0;
}

uint64_t gs_books_mine(const struct gs_books *books, uint32_t card)
{
    return books->slot && card < GPUSLICE_CARDS ? bounded(&books->slot->usage[card].used_bytes) : 0;
}

/* ---- memory shared with other processes ---- */

static void change(_Atomic uint64_t *word, int64_t by)
{
    if (by >= 0)
        atomic_fetch_add(word, (uint64_t)by);
    else
        subtract(word, (uint64_t)-by);
}

void gs_books_exported(struct gs_books *books, uint32_t card, int64_t bytes)
{
    if (card < GPUSLICE_CARDS && has_slot(books))
        change(&books->slot->usage[card].exported_bytes, bytes);
}

void gs_books_imported(struct gs_books *books, uint32_t card, int count)
{
    if (card >= GPUSLICE_CARDS || !has_slot(books))
        return;
    change(&books->slot->usage[card].imports, count);
    if (count < 0)
        forget_orphans_nobody_holds(books);
}

void gs_books_return_exported(struct gs_books *books, uint32_t card, uint64_t bytes)
{
    if (!books->slot || card >= GPUSLICE_CARDS)
        return;
    atomic_fetch_add(&books->region->cards[card].orphaned_bytes, bytes);
    subtract(&books->slot->usage[card].exported_bytes, bytes);
    gs_books_return(books, card, bytes);
    forget_orphans_nobody_holds(books);
}
