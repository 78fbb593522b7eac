#include "policy/reserve.h"

#include "accounts/in_flight.h"
#include "accounts/slots.h"
#include "policy/descriptors.h"
#include "policy/pool_accounts.h"
#include "policy/process_usage.h"

#define LATEST_NS UINT64_C(3000000000) /* time for two figures, and some patience with a busy agent */
#define NAP_NS UINT64_C(10000000)

static bool reserve_by_figures(struct gs_card *card, uint64_t bytes);

bool gs_reserve_quietly(struct gs_card *card, uint64_t bytes)
{
    if (gs_take_room(card, bytes, card->limit_bytes))
        return true;
    /* As the driver does before it gives up: reclaim memory that pools keep and nobody uses. */
    bool settled = gs_descriptors_settle(), trimmed = gs_pools_trim();
    return ((settled || trimmed) && gs_take_room(card, bytes, card->limit_bytes)) || reserve_by_figures(card, bytes);
}

bool gs_reserve(struct gs_card *card, uint64_t bytes)
{
    gs_measure_sometimes(card);
    bool reserved = gs_reserve_quietly(card, bytes);
    if (!reserved)
        gs_refuse(card);
    return reserved;
}

/* ---- by the driver's figures ---- */

/* A process corrects its own account when it next requests memory. One that only computes does not, so others leave out
 * what it is charged above the driver's figure. */
struct outlook {
    uint64_t excess; /* charged above the driver's figure */
    uint64_t open;   /* measured by difference, and not confirmed or corrected by a figure yet */
};

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
    uint64_t excess = known && after && !ours ? gs_less(used, figure.bytes) : 0;
    outlook->excess += excess < own ? excess : own;
    outlook->open += figure.at_ns && (!after || (known && ours)) ? own : 0;
}

static struct outlook outlook_of(const struct gs_card *card)
{
    struct outlook outlook = {0};
    struct gs_attachment at = gs_accounts_at(&gs_accounts);
    if (!at.region || card->index >= GPUSLICE_CARDS)
        return outlook;
    GS_FOR_EACH_SLOT(slot, at.region, at.slot)
        if (gs_load(&slot->provisional) >> card->index & 1)
            add_slot(&outlook, slot, card, slot == at.slot);
    return outlook;
}

uint64_t gs_used_by_figures(struct gs_card *card) { return gs_less(gs_used(card), outlook_of(card).excess); }

static bool fits(const struct gs_card *card, uint64_t bytes, uint64_t used)
{
    return used <= card->limit_bytes && bytes <= card->limit_bytes - used;
}

/* Reserves these bytes if there is room according to the driver's figures. Waits for figures that may decide it. */
static bool reserve_by_figures(struct gs_card *card, uint64_t bytes)
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
        if (now >= until || !outlook.open || !fits(card, bytes, gs_less(gs_used(card), outlook.excess + outlook.open)))
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
    bool is_room = reserve_by_figures(card, 0);
    if (is_room)
        gs_settle(card, 0, 0);
    return !is_room;
}

/* What was lent within the container is known from the accounts. */
bool gs_borrowed_too_much(struct gs_card *card)
{
    const struct gpuslice_card *entry = gs_region_card(card);
    if (!entry)
        return false;
    if (!gs_measure(card))
        gs_settle_own(card);
    uint64_t within = gs_bounded(&entry->orphaned_bytes);
    return !fits(card, 0, gs_less(gs_used(card), within)) && gs_over_limit(card);
}
