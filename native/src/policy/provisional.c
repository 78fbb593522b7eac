/* A process corrects its own account when it next requests memory. One that only computes does not, so others leave out
 * what it is charged above the driver's figure. */
#include "policy/provisional.h"

#include "accounts/slots.h"
#include "policy/driver_overhead.h"
#include "policy/figures.h"

#define LATEST_NS UINT64_C(3000000000) /* time for two figures, and some patience with a busy agent */
#define NAP_NS UINT64_C(10000000)

struct outlook {
    uint64_t excess; /* charged above the driver's figure */
    uint64_t open;   /* measured by difference, and not confirmed or corrected by a figure yet */
};

static bool is_of(const struct gpuslice_slot *slot, const struct gs_card *card)
{
    return gs_load(&slot->owner) && gs_load(&slot->provisional) >> card->index & 1;
}

/* The bytes are read before the calls in flight, and these before the time of the last change: a thread that changes
 * the bytes is in flight first, and writes the time before it leaves. Our own excess is corrected in the accounts, by
 * two figures, and open until then. A process that the agent does not know keeps its charge. */
static void add_slot(struct outlook *outlook, const struct gpuslice_slot *slot, const struct gs_card *card, bool ours)
{
    struct gs_figure figure = {.at_ns = gs_figures_at()};
    const struct gpuslice_usage *usage = &slot->usage[card->index];
    uint64_t used = gs_bounded(&usage->used_bytes), own = gs_bounded(&usage->own_bytes);
    bool known = gs_figure_of(card, gs_load(&slot->pid), gs_load(&slot->start_time), &figure);
    bool between = atomic_load(&slot->in_flight[card->index]) != 0;
    bool after = gs_figures_are_after(figure.at_ns, gs_load(&usage->changed_ns)) && !between;
    uint64_t excess = known && after && !ours && used > figure.bytes ? used - figure.bytes : 0;
    outlook->excess += excess < own ? excess : own;
    outlook->open += figure.at_ns && (!after || (known && ours)) ? own : 0;
}

static struct outlook outlook_of(const struct gs_card *card)
{
    struct outlook outlook = {0};
    struct gs_attachment at = gs_accounts_at(&gs_accounts);
    if (!at.region || card->index >= GPUSLICE_CARDS)
        return outlook;
    for (uint64_t i = 0, high = gs_slots_high(at.region, at.slot); i < high; i++) {
        const struct gpuslice_slot *slot = &at.region->slots[i];
        if (is_of(slot, card))
            add_slot(&outlook, slot, card, slot == at.slot);
    }
    return outlook;
}

uint64_t gs_used_as_known(struct gs_card *card)
{
    uint64_t used = gs_used(card), excess = outlook_of(card).excess;
    return used > excess ? used - excess : 0;
}

static bool fits(const struct gs_card *card, uint64_t bytes, uint64_t used)
{
    return used <= card->limit_bytes && bytes <= card->limit_bytes - used;
}

/* Whether to look again, because figures that are still to come may decide. */
static bool may_fit_later(struct gs_card *card, uint64_t bytes, const struct outlook *outlook)
{
    uint64_t used = gs_used(card), doubtful = outlook->excess + outlook->open;
    return outlook->open && fits(card, bytes, used > doubtful ? used - doubtful : 0);
}

bool gs_reserve_as_known(struct gs_card *card, uint64_t bytes)
{
    uint64_t before = gs_used(card);
    struct outlook outlook = outlook_of(card);
    gs_settle_own(card);
    for (uint64_t until = 0; outlook.excess || outlook.open || gs_used(card) < before; outlook = outlook_of(card)) {
        gs_settle_own(card);
        if (gs_take_room(card, bytes, card->limit_bytes + outlook.excess))
            return true;
        uint64_t now = gs_monotonic_ns();
        until = until ? until : now + LATEST_NS;
        if (now >= until || !may_fit_later(card, bytes, &outlook))
            return false;
        gs_sleep_ns(NAP_NS);
    }
    return false;
}

bool gs_over_limit(struct gs_card *card)
{
    if (fits(card, 0, gs_used(card)))
        return false;
    /* Zero bytes fit as soon as what is held fits. */
    bool is_room = gs_reserve_as_known(card, 0);
    if (is_room)
        gs_settle(card, 0, 0);
    return !is_room;
}

/* What was lent within the container is known from the accounts. */
bool gs_borrowed_too_much(struct gs_card *card)
{
    struct gpuslice_region *region = gs_accounts_at(&gs_accounts).region;
    if (card->index >= GPUSLICE_CARDS || !region)
        return false;
    if (!gs_measure(card))
        gs_settle_own(card);
    uint64_t used = gs_used(card), within = gs_bounded(&region->cards[card->index].orphaned_bytes);
    return !fits(card, 0, used > within ? used - within : 0) && gs_over_limit(card);
}
