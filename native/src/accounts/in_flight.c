#include "accounts/in_flight.h"

#include "accounts/attach.h"
#include "accounts/slots.h"

/* The number of calls in the highest 16 bits and their total size in steps of 2 MiB below: one word, changed atomically. */
#define STEP_BITS 21
#define LARGEST_STEPS (UINT64_C(1) << 32) /* for an unknown size: more than any card has */
#define STEPS_OF_A_WORD ((UINT64_C(1) << 48) - 1)

#define LONGEST_REST_NS UINT64_C(20000000)
#define NAP_NS UINT64_C(20000)
#define YIELDS 64u

/* Calls in flight of this thread, which must not wait for a rest that waits for these calls. */
static _Thread_local uint32_t flights_here __attribute__((tls_model("initial-exec")));

static uint64_t word_of(uint64_t bytes)
{
    uint64_t steps = bytes < LARGEST_STEPS << STEP_BITS ? (bytes + (UINT64_C(1) << STEP_BITS) - 1) >> STEP_BITS : LARGEST_STEPS;
    return UINT64_C(1) << 48 | steps;
}

static uint64_t bytes_in(const struct gs_accounts *accounts, uint32_t card, enum gs_flight flight)
{
    return (atomic_load(&accounts->mine[card].in_flight[flight]) & STEPS_OF_A_WORD) << STEP_BITS;
}

static bool rests(const struct gs_accounts *accounts, uint32_t card) { return atomic_load(&accounts->mine[card].rests) != 0; }

static bool flies(const struct gs_accounts *accounts, uint32_t card) { return gs_flights(accounts, card) != 0; }

static void await_end(const struct gs_accounts *accounts, uint32_t card, bool (*of)(const struct gs_accounts *, uint32_t))
{
    uint64_t until = 0;
    for (uint32_t round = 0; of(accounts, card); round++) {
        uint64_t now = gs_monotonic_ns();
        until = until ? until : now + LONGEST_REST_NS;
        if (now >= until)
            return;
        if (round < YIELDS)
            gs_yield();
        else
            gs_sleep_ns(NAP_NS);
    }
}

void gs_rest_begins(struct gs_accounts *accounts, uint32_t card)
{
    atomic_fetch_add(&accounts->mine[card].rests, 1);
    if (!flights_here)
        await_end(accounts, card, flies);
}

void gs_rest_ends(struct gs_accounts *accounts, uint32_t card)
{
    _Atomic uint32_t *count = &accounts->mine[card].rests;
    uint32_t before = atomic_load(count);
    while (before && !atomic_compare_exchange_weak(count, &before, before - 1)) /* 0 if the rest began before a fork */
        ;
}

void gs_flight_begins(struct gs_accounts *accounts, uint32_t card, enum gs_flight flight, uint64_t bytes)
{
    if (card >= GPUSLICE_CARDS)
        return;
    struct gs_attachment *at = gs_attach_with_slot(accounts);
    atomic_fetch_add(&accounts->mine[card].in_flight[flight], word_of(bytes));
    if (rests(accounts, card) && !flights_here) { /* checked after the call was published: either the resting thread sees the call, or we see the rest */
        atomic_fetch_sub(&accounts->mine[card].in_flight[flight], word_of(bytes));
        await_end(accounts, card, rests);
        atomic_fetch_add(&accounts->mine[card].in_flight[flight], word_of(bytes));
    }
    flights_here++;
    if (at) /* tells others not to compare our slot with the driver's figure */
        atomic_fetch_add(&at->slot->in_flight[card], 1);
}

void gs_flight_ends(struct gs_accounts *accounts, uint32_t card, enum gs_flight flight, uint64_t bytes)
{
    if (card >= GPUSLICE_CARDS)
        return;
    flights_here -= flights_here > 0;
    gs_accounts_changed(accounts, card);
    struct gs_attachment *at = gs_attach_with_slot(accounts);
    atomic_fetch_sub(&accounts->mine[card].in_flight[flight], word_of(bytes));
    uint16_t shown = at ? atomic_fetch_sub(&at->slot->in_flight[card], 1) : 1;
    if (shown == 0 || shown > UINT16_MAX / 2) /* somebody reset it meanwhile; as in gs_subtract() */
        atomic_fetch_add(&at->slot->in_flight[card], 1);
}

uint16_t gs_flights(const struct gs_accounts *accounts, uint32_t card)
{
    const struct gs_holding *holding = &accounts->mine[card];
    return (uint16_t)((atomic_load(&holding->in_flight[GS_TAKING]) >> 48) + (atomic_load(&holding->in_flight[GS_GIVING]) >> 48));
}

/* `gained` and `lost` change between the begin and the end of a call in flight.
 * Least: what was counted when the span began, less the allocations that were in flight then, less everything released by the
 * end and less the releases that are in flight at the end.
 * Most: everything counted by the end, less what was released before the span began. */
void gs_span_begin(const struct gs_accounts *accounts, uint32_t card, struct gs_span *span)
{
    const struct gs_holding *holding = &accounts->mine[card];
    span->lost = atomic_load(&holding->lost);
    span->gained = atomic_load(&holding->gained);
    span->taking = bytes_in(accounts, card, GS_TAKING);
}

struct gs_bounds gs_span_end(const struct gs_accounts *accounts, uint32_t card, const struct gs_span *span)
{
    const struct gs_holding *holding = &accounts->mine[card];
    uint64_t giving = bytes_in(accounts, card, GS_GIVING), lost = atomic_load(&holding->lost), gained = atomic_load(&holding->gained);
    return (struct gs_bounds){.least = gs_less(gs_less(gs_holding_bytes(span->gained, lost), span->taking), giving),
                              .most = gs_holding_bytes(gained, span->lost)};
}
