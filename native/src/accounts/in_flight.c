#include "accounts/in_flight.h"

#include "accounts/attach.h"
#include "accounts/slots.h"

/* The number of calls in the highest 16 bits and their total size in steps of 2 MiB below: one word, changed atomically. */
#define STEP_BITS 21
#define LARGEST_STEPS (UINT64_C(1) << 32) /* for an unknown size: more than any card has */
#define STEPS_OF_A_WORD ((UINT64_C(1) << 48) - 1)

#define LONGEST_REST_NS UINT64_C(20000000)
#define LONGEST_FREE_NS UINT64_C(1000000) /* one that takes longer waits for work */
#define NAP_NS UINT64_C(20000)
#define YIELDS 64u

/* Calls in flight of this thread, which must not wait for a rest that waits for these calls; and the era of the first. */
static _Thread_local uint32_t flights_here __attribute__((tls_model("initial-exec")));
static _Thread_local uint32_t era_here __attribute__((tls_model("initial-exec")));

static uint64_t word_of(uint64_t bytes)
{
    uint64_t steps = bytes < LARGEST_STEPS << STEP_BITS ? (bytes + (UINT64_C(1) << STEP_BITS) - 1) >> STEP_BITS : LARGEST_STEPS;
    return UINT64_C(1) << 48 | steps;
}

static uint64_t bytes_in(const struct gs_accounts *accounts, uint32_t card, enum gs_flight flight)
{
    uint64_t steps = 0;
    for (uint32_t era = 0; era < GS_ERAS; era++)
        steps += atomic_load(&accounts->mine[card].in_flight[era][flight]) & STEPS_OF_A_WORD;
    return steps << STEP_BITS;
}

static bool is_none(const _Atomic uint32_t *rests) { return atomic_load(rests) == 0; }
static bool has_ended(const _Atomic uint64_t *flights) { return atomic_load(flights) >> 48 == 0; }

/* False if that takes longer. */
#define AWAIT(condition, longest_ns)                                                                                           \
    ({                                                                                                                         \
        uint64_t until = 0, now = 0;                                                                                           \
        for (uint32_t round = 0; !(condition) && (!until || now < until); round++) {                                           \
            now = gs_monotonic_ns();                                                                                           \
            until = until ? until : now + (longest_ns);                                                                        \
            round < YIELDS ? gs_yield() : gs_sleep_ns(NAP_NS);                                                                 \
        }                                                                                                                      \
        (condition);                                                                                                           \
    })

/* Calls that take too long belong to an era that ends here: no later rest waits for them again. */
void gs_rest_begins(struct gs_accounts *accounts, uint32_t card)
{
    struct gs_holding *holding = &accounts->mine[card];
    uint32_t era = atomic_load(&accounts->era);
    const _Atomic uint64_t *flights = holding->in_flight[era % GS_ERAS];
    atomic_fetch_add(&holding->rests, 1);
    if (flights_here)
        return;
    bool over = AWAIT(has_ended(&flights[GS_RELEASING]), LONGEST_FREE_NS);
    if (over)
        over = AWAIT(has_ended(&flights[GS_TAKING]), LONGEST_REST_NS);
    if (!over)
        atomic_compare_exchange_strong(&accounts->era, &era, era + 1);
}

void gs_rest_ends(struct gs_accounts *accounts, uint32_t card)
{
    _Atomic uint32_t *count = &accounts->mine[card].rests;
    uint32_t before = atomic_load(count);
    while (before && !atomic_compare_exchange_weak(count, &before, before - 1)) /* 0 if the rest began before a fork */
        ;
}

/* Checked after the call was published: either the resting thread sees the call, or we see the rest. */
static __attribute__((cold, noinline)) void let_rest(struct gs_holding *holding, _Atomic uint64_t *flights, uint64_t word)
{
    atomic_fetch_sub(flights, word);
    (void)AWAIT(is_none(&holding->rests), LONGEST_REST_NS);
    atomic_fetch_add(flights, word);
}

void gs_flight_begins(struct gs_accounts *accounts, uint32_t card, enum gs_flight flight, uint64_t bytes)
{
    if (card >= GPUSLICE_CARDS)
        return;
    struct gs_attachment *at = gs_attach_with_slot(accounts);
    struct gs_holding *holding = &accounts->mine[card];
    if (!flights_here)
        era_here = atomic_load(&accounts->era) % GS_ERAS;
    _Atomic uint64_t *flights = &holding->in_flight[era_here][flight];
    uint64_t word = word_of(bytes);
    atomic_fetch_add(flights, word);
    if (!is_none(&holding->rests) && !flights_here)
        let_rest(holding, flights, word);
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
    atomic_fetch_sub(&accounts->mine[card].in_flight[era_here][flight], word_of(bytes));
    uint16_t shown = at ? atomic_fetch_sub(&at->slot->in_flight[card], 1) : 1;
    if (shown == 0 || shown > UINT16_MAX / 2) /* somebody reset it meanwhile; as in gs_subtract() */
        atomic_fetch_add(&at->slot->in_flight[card], 1);
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
    uint64_t releasing = bytes_in(accounts, card, GS_RELEASING), lost = atomic_load(&holding->lost),
             gained = atomic_load(&holding->gained);
    return (struct gs_bounds){.least = gs_less(gs_less(gs_holding_bytes(span->gained, lost), span->taking), releasing),
                              .most = gs_holding_bytes(gained, span->lost)};
}
