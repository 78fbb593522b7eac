/* How processes never exceed the limit together, without a lock that a dead process could hold.
 *
 * To reserve, a process first publishes the bytes as pending in its own slot, then sums all slots. If the sum is
 * within the limit, the bytes become used; otherwise they are taken back. Of two processes that race, the later to publish
 * sees the earlier, so the granted bytes never exceed the limit. The earlier one may be refused because of pending bytes
 * that are taken back a moment later. Therefore a refusal is final only if the *granted* bytes leave no room; otherwise the
 * reservation is retried: the process with the lowest slot stays pending and waits, and the others withdraw.
 *
 * Nothing here depends on two stores happening together. A process that dies at any instruction leaves a slot that counts
 * at least what it held, and the first process to notice that the owner is gone empties the slot.
 */
#include "accounts/accounts.h"

#include <stddef.h>

#include "accounts/slots.h"

/* How long to retry while other processes have bytes pending. They are pending for a negligible time, unless the process
 * was stopped at that moment or does not exist: the tenant can write here. */
#ifndef GS_CONTENDED_NS
#define GS_CONTENDED_NS UINT64_C(1000000000)
#endif
#define YIELDS 256u
#define NAP_NS UINT64_C(50000)
#define LEAVING_NAP_NS UINT64_C(10000000)

/* ---- what we hold: changed in the slot, then in our own word ---- */

static bool stands_elsewhere(const struct gs_accounts *accounts, const struct gs_attachment *at, uint64_t word)
{
    return word % GS_ATTACHMENTS != (uint64_t)(at - accounts->attachments);
}

static void gain(struct gs_accounts *accounts, struct gs_attachment *at, uint32_t card, uint64_t bytes)
{
    atomic_fetch_add(&at->slot->usage[card].used_bytes, bytes);
    uint64_t before = atomic_fetch_add(&accounts->mine[card].gained, bytes << GS_ATTACHMENT_BITS);
    if (stands_elsewhere(accounts, at, before)) /* the accounts were repaired in between: repeat it in the new slot */
        atomic_fetch_add(&gs_attachment_of(accounts, before)->slot->usage[card].used_bytes, bytes);
}

static void lose(struct gs_accounts *accounts, struct gs_attachment *at, uint32_t card, uint64_t bytes)
{
    gs_subtract(&at->slot->usage[card].used_bytes, bytes);
    uint64_t before = atomic_fetch_add(&accounts->mine[card].lost, bytes << GS_ATTACHMENT_BITS);
    if (stands_elsewhere(accounts, at, before))
        gs_subtract(&gs_attachment_of(accounts, before)->slot->usage[card].used_bytes, bytes);
}

/* ---- reserve, settle ---- */

struct sum {
    uint64_t granted, pending; /* pending by all, ourselves included */
    bool lower;                /* a lower slot has bytes pending */
};

/* For our own slot, the higher of what the slot says and what we know. */
static struct sum sum_of(const struct gs_accounts *accounts, const struct gs_attachment *at, uint32_t card)
{
    struct sum sum = {.granted = gs_bounded(&at->region->cards[card].orphaned_bytes)};
    const struct gpuslice_slot *slots = at->region->slots, *mine = __atomic_load_n(&at->slot, __ATOMIC_ACQUIRE);
    const struct gpuslice_slot *end = slots + gs_slots_high(at->region, mine);
    for (const struct gpuslice_slot *slot = slots; slot < end; slot++) {
        /* Pending is read before used, so that bytes which move from one to the other are seen at least once. */
        uint64_t pending = gs_bounded(&slot->usage[card].pending_bytes);
        uint64_t used = gs_bounded(&slot->usage[card].used_bytes), known = slot == mine ? gs_accounts_mine(accounts, card) : 0;
        if (slot == mine)
            sum.lower = sum.pending > 0;
        else if ((pending | used) == 0 || gs_load(&slot->owner) == 0)
            continue;
        sum.pending += pending;
        sum.granted += used > known ? used : known;
    }
    return sum;
}

enum verdict { GRANTED, FULL, CONTENDED };

/* `patience`: how often to sum again while only higher slots, which withdraw, have bytes pending. */
static enum verdict try_reserve(struct gs_accounts *accounts, struct gs_attachment *at, uint32_t card, uint64_t bytes,
                                uint64_t limit, int patience)
{
    struct gpuslice_usage *usage = &at->slot->usage[card];
    atomic_fetch_add(&usage->pending_bytes, bytes);
    for (;;) {
        struct sum sum = sum_of(accounts, at, card);
        if (sum.granted + sum.pending <= limit) {
            gain(accounts, at, card, bytes);
            gs_subtract(&usage->pending_bytes, bytes);
            gs_raise_to(&at->region->cards[card].peak_bytes, sum.granted + bytes);
            return GRANTED;
        }
        bool full = sum.granted + bytes > limit;
        if (full || sum.lower || patience-- == 0) {
            gs_subtract(&usage->pending_bytes, bytes);
            return full ? FULL : CONTENDED;
        }
        gs_yield();
    }
}

static struct gs_lock contention_lock;

void gs_accounts_forget(struct gs_accounts *accounts)
{
    contention_lock = (struct gs_lock){0};
    gs_attach_forget(accounts);
}

static void step_back(struct gs_accounts *accounts, uint32_t round)
{
    if (round % 64 == 63) /* a process may have died with bytes pending */
        gs_accounts_sweep(accounts);
    if (round < YIELDS)
        gs_yield();
    else
        gs_sleep_ns(NAP_NS);
}

/* Whether there will be room once the processes that seem to be ending have ended. */
static bool is_worth_waiting(const struct gs_accounts *accounts, uint32_t card, uint64_t bytes, uint64_t limit)
{
    struct gs_attachment *at = gs_attached(accounts);
    uint64_t leaving = at && at->region ? gs_slots_leaving(at->region, card) : 0;
    return leaving && sum_of(accounts, at, card).granted + bytes <= limit + leaving;
}

/* Threads of one process share a slot and so cannot give each other precedence: one at a time. Not while they sleep, out of which
 * the program's signal handlers may call us again, or never come back. */
static enum verdict try_alone(struct gs_accounts *accounts, uint32_t card, uint64_t bytes, uint64_t limit)
{
    GS_GUARD(&contention_lock);
    struct gs_attachment *at = gs_attach_with_slot(accounts);
    return at ? try_reserve(accounts, at, card, bytes, limit, 64) : FULL;
}

static bool reserve_against_others(struct gs_accounts *accounts, uint32_t card, uint64_t bytes, uint64_t limit)
{
    uint64_t until = gs_monotonic_ns() + GS_CONTENDED_NS;
    for (uint32_t round = 0; round == 0 || gs_monotonic_ns() < until; round++) {
        switch (try_alone(accounts, card, bytes, limit)) {
        case GRANTED: return true;
        case FULL:
            if (gs_accounts_sweep(accounts))
                break;
            if (!is_worth_waiting(accounts, card, bytes, limit))
                return false;
            gs_sleep_ns(LEAVING_NAP_NS);
            until = gs_monotonic_ns() + GS_CONTENDED_NS; /* counted from now, since a busy host may wake us late */
            break;
        case CONTENDED: step_back(accounts, round);
        }
    }
    return false;
}

/* The current attachment, with a slot that is checked to be ours; NULL if there is none. */
static struct gs_attachment *attachment(struct gs_accounts *accounts)
{
    struct gs_attachment *at = gs_attach_with_slot(accounts);
    if (at && gs_load(&at->slot->owner) != at->owner) {
        gs_attach_anew(accounts, at);
        at = gs_attach_with_slot(accounts);
    }
    return at;
}

/* Records the time before the change: a reader that reads the bytes and then the time gets a time that is no older. */
static struct gs_attachment *changing(struct gs_accounts *accounts, uint32_t card)
{
    gs_accounts_changed(accounts, card);
    return card < GPUSLICE_CARDS ? attachment(accounts) : NULL;
}

static bool may_ever_fit(uint32_t card, uint64_t bytes, uint64_t limit)
{
    return bytes <= limit && bytes < GS_MOST_BYTES && card < GPUSLICE_CARDS;
}

bool gs_accounts_reserve_at_once(struct gs_accounts *accounts, uint32_t card, uint64_t bytes, uint64_t limit)
{
    if (!may_ever_fit(card, bytes, limit))
        return false;
    if (limit >= GS_MOST_BYTES)
        return gs_accounts_add(accounts, card, bytes);
    struct gs_attachment *at = attachment(accounts);
    return at && try_reserve(accounts, at, card, bytes, limit, 0) == GRANTED;
}

bool gs_accounts_reserve(struct gs_accounts *accounts, uint32_t card, uint64_t bytes, uint64_t limit)
{
    return gs_accounts_reserve_at_once(accounts, card, bytes, limit) ||
           (may_ever_fit(card, bytes, limit) && reserve_against_others(accounts, card, bytes, limit));
}

bool gs_accounts_add(struct gs_accounts *accounts, uint32_t card, uint64_t bytes)
{
    struct gs_attachment *at = card < GPUSLICE_CARDS ? attachment(accounts) : NULL;
    if (!at)
        return false;
    gain(accounts, at, card, bytes);
    gs_raise_to(&at->region->cards[card].peak_bytes, sum_of(accounts, at, card).granted);
    return true;
}

void gs_accounts_return(struct gs_accounts *accounts, uint32_t card, uint64_t bytes)
{
    struct gs_attachment *at = bytes && card < GPUSLICE_CARDS ? attachment(accounts) : NULL;
    if (at)
        lose(accounts, at, card, bytes);
}

void gs_accounts_count_refusal(struct gs_accounts *accounts, uint32_t card)
{
    struct gs_attachment *at = gs_attached(accounts);
    if (at && at->region && card < GPUSLICE_CARDS)
        atomic_fetch_add_explicit(&at->region->cards[card].refused, 1, memory_order_relaxed);
}

uint64_t gs_accounts_used(struct gs_accounts *accounts, uint32_t card)
{
    gs_accounts_look(accounts);
    struct gs_attachment *at = gs_attached(accounts);
    return at && at->region && card < GPUSLICE_CARDS ? sum_of(accounts, at, card).granted : 0;
}

uint64_t gs_accounts_mine(const struct gs_accounts *accounts, uint32_t card)
{
    if (card >= GPUSLICE_CARDS)
        return 0;
    const struct gs_holding *holding = &accounts->mine[card];
    uint64_t gained, lost;
    do { /* until `gained` did not change in between, so that both are of one moment */
        gained = gs_load(&holding->gained);
        lost = gs_load(&holding->lost);
    } while (gs_load(&holding->gained) != gained);
    return gs_holding_bytes(gained, lost);
}

void gs_accounts_set_own(struct gs_accounts *accounts, uint32_t card, uint64_t bytes)
{
    struct gs_attachment *at = gs_attached(accounts);
    atomic_store(&accounts->mine[card].own_bytes, bytes);
    if (at && at->slot)
        atomic_store(&at->slot->usage[card].own_bytes, bytes);
}

static void show_comparable(struct gs_accounts *accounts, uint32_t card)
{
    struct gs_attachment *at = gs_attached(accounts);
    if (!at || !at->slot)
        return;
    if (gs_is_comparable(&accounts->mine[card]))
        atomic_fetch_or(&at->slot->provisional, UINT64_C(1) << card);
    else
        atomic_fetch_and(&at->slot->provisional, ~(UINT64_C(1) << card));
}

void gs_accounts_set_provisional(struct gs_accounts *accounts, uint32_t card, bool provisional)
{
    atomic_store(&accounts->mine[card].provisional, provisional);
    show_comparable(accounts, card);
}

void gs_accounts_set_host_pid(struct gs_accounts *accounts, uint32_t pid)
{
    struct gs_attachment *at = gs_attached(accounts);
    atomic_store(&accounts->host_pid, pid);
    if (at && at->slot)
        atomic_store(&at->slot->host_pid, pid);
}

/* ---- memory shared with other processes ---- */

static void change(_Atomic uint64_t *word, int64_t by)
{
    if (by > 0)
        atomic_fetch_add(word, (uint64_t)by);
    else
        gs_subtract(word, (uint64_t)-by);
}

void gs_accounts_unconfirmed(struct gs_accounts *accounts, uint32_t card, enum gs_unconfirmed kind, int64_t bytes)
{
    if (card >= GPUSLICE_CARDS)
        return;
    change(&accounts->mine[card].unconfirmed[kind], bytes);
    if (atomic_load(&accounts->mine[card].provisional))
        show_comparable(accounts, card);
}

void gs_accounts_exported(struct gs_accounts *accounts, uint32_t card, int64_t bytes)
{
    struct gs_attachment *at = changing(accounts, card);
    if (!at)
        return;
    change(&accounts->mine[card].exported_bytes, bytes);
    change(&at->slot->usage[card].exported_bytes, bytes);
}

void gs_accounts_imported(struct gs_accounts *accounts, uint32_t card, int count)
{
    struct gs_attachment *at = changing(accounts, card);
    if (!at)
        return;
    change(&accounts->mine[card].imports, count);
    change(&at->slot->usage[card].imports, count);
    if (count < 0) {
        atomic_store(&accounts->mine[card].loan_ended_ns, gs_coarse_ns());
        gs_orphans_settle(&accounts->exports, at->region, at->slot);
    }
}

void gs_accounts_return_exported(struct gs_accounts *accounts, uint32_t card, uint64_t bytes)
{
    struct gs_attachment *at = changing(accounts, card);
    if (!at)
        return;
    atomic_fetch_add(&at->region->cards[card].orphaned_bytes, bytes);
    gs_subtract(&accounts->mine[card].exported_bytes, bytes);
    gs_subtract(&at->slot->usage[card].exported_bytes, bytes);
    gs_accounts_return(accounts, card, bytes);
    gs_orphans_settle(&accounts->exports, at->region, at->slot);
}
