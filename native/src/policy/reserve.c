#include "policy/reserve.h"

#include "accounts/in_flight.h"
#include "accounts/slots.h"
#include "policy/descriptors.h"
#include "policy/pool_accounts.h"
#include "policy/process_usage.h"
#include "system/at_fork.h"

#define LATEST_NS UINT64_C(3000000000) /* time for two figures, and some patience with a busy agent */
#define NAP_NS UINT64_C(10000000)
#define LENT_BACK_NS UINT64_C(10000000000) /* the agent gets it back within a second; longer if the host is busy */
#define LENT_NAP_NS UINT64_C(1000000)

static bool reserve_by_figures(struct gs_card *card, uint64_t bytes);

bool gs_reserve(struct gs_card *card, uint64_t bytes)
{
    gs_measure_sometimes(card);
    bool reserved = gs_reserve_quietly(card, bytes);
    if (!reserved)
        gs_refuse(card);
    return reserved;
}

/* What is our own and was not used may be lent to others: the agent sees that we want it, and raises the limit again. */
static bool reserve_what_is_lent(struct gs_card *card, uint64_t bytes)
{
    struct gpuslice_card *entry = gs_region_card(card);
    bool reserved = false;
    for (uint64_t until = gs_monotonic_ns() + LENT_BACK_NS; entry && !reserved && gs_monotonic_ns() < until;) {
        bool is_lent = card->limit_bytes < card->request_bytes; /* before the attempt, which may find that it no longer is */
        uint64_t wanted = gs_used(card) + bytes;
        reserved = gs_take_room(card, bytes, 0);
        if (reserved || !is_lent || wanted > card->request_bytes)
            break;
        gs_raise_to(&entry->wanted_bytes, wanted);
        gs_sleep_ns(LENT_NAP_NS);
    }
    if (reserved)
        atomic_store(&entry->wanted_bytes, 0); /* whoever else waits writes it again */
    return reserved;
}

bool gs_reserve_quietly(struct gs_card *card, uint64_t bytes)
{
    if (gs_take_room(card, bytes, 0))
        return true;
    /* As the driver does before it gives up: reclaim memory that pools keep and nobody uses. */
    bool settled = gs_descriptors_settle(), trimmed = gs_pools_trim();
    return ((settled || trimmed) && gs_take_room(card, bytes, 0)) || reserve_what_is_lent(card, bytes) ||
           reserve_by_figures(card, bytes);
}

/* ---- the steps ---- */

void gs_refuse(struct gs_card *card) { gs_accounts_count_refusal(&gs_accounts, card->index); }

typedef bool reserving(struct gs_accounts *, uint32_t card, uint64_t bytes, uint64_t limit);

/* The agent writes a smaller limit and reads the accounts then; we write the accounts and look at the limit then. So one of the
 * two sees the other, and the agent need not wait for us. */
static bool take_room(struct gs_card *card, uint64_t bytes, uint64_t beyond, reserving *reserve)
{
    gs_cards_look_now();
    gs_flight_begins(&gs_accounts, card->index, GS_TAKING, bytes);
    uint64_t limit = card->limit_bytes + beyond;
    bool taken = reserve(&gs_accounts, card->index, bytes, limit);
    gs_cards_look_now();
    uint64_t limit_now = card->limit_bytes + beyond; /* another thread may have read it */
    if (taken && limit_now < limit && gs_used(card) > limit_now) {
        gs_accounts_return(&gs_accounts, card->index, bytes);
        taken = false;
    }
    if (!taken)
        gs_flight_ends(&gs_accounts, card->index, GS_TAKING, bytes);
    return taken;
}

bool gs_take_room(struct gs_card *card, uint64_t bytes, uint64_t beyond)
{
    return take_room(card, bytes, beyond, gs_accounts_reserve);
}

bool gs_take_room_at_once(struct gs_card *card, uint64_t bytes)
{
    return take_room(card, bytes, 0, gs_accounts_reserve_at_once);
}

void gs_settle(struct gs_card *card, uint64_t reserved, uint64_t taken)
{
    if (taken != reserved)
        gs_recharge(card, reserved, taken);
    gs_flight_ends(&gs_accounts, card->index, GS_TAKING, reserved);
}

void gs_releasing_begins(void)
{
    for (uint32_t i = 0; i < gs_card_count(); i++)
        gs_flight_begins(&gs_accounts, gs_card_at(i)->index, GS_RELEASING, GS_MOST_BYTES);
}

void gs_releasing_ends(void)
{
    for (uint32_t i = 0; i < gs_card_count(); i++)
        gs_flight_ends(&gs_accounts, gs_card_at(i)->index, GS_RELEASING, GS_MOST_BYTES);
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
    return used <= gs_own_limit(card) && bytes <= gs_own_limit(card) - used;
}

/* Reserves these bytes if there is room according to the driver's figures. Waits for figures that may decide it. */
static bool reserve_by_figures(struct gs_card *card, uint64_t bytes)
{
    uint64_t before = gs_used(card);
    struct outlook outlook = outlook_of(card);
    gs_settle_own(card);
    for (uint64_t until = 0; outlook.excess || outlook.open || gs_used(card) < before; outlook = outlook_of(card)) {
        gs_settle_own(card);
        if (gs_take_room(card, bytes, outlook.excess))
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

/* ---- what this process holds ---- */

static struct gs_table pages GS_TABLE_PER_PROCESS;

/* The driver allocates pages of 2 MiB. A large block has its own; small ones share a page, which the address shows: the
 * page is charged with its first block and returned with its last. */
static bool has_own_pages(CUdeviceptr address, uint64_t bytes)
{
    return address % GS_PAGE_BYTES == 0 && bytes > GS_PAGE_BYTES / 2;
}

static uint64_t count_pages(CUdeviceptr address, uint64_t bytes, int by)
{
    uint64_t charged = 0;
    for (uint64_t page = address / GS_PAGE_BYTES; page <= (address + bytes - 1) / GS_PAGE_BYTES; page++) {
        uint64_t before = gs_table_count(&pages, page + 1, by);
        charged += before == (by > 0 ? 0u : 1u) ? GS_PAGE_BYTES : 0;
    }
    return charged;
}

void gs_hold(struct gs_place place, CUdeviceptr address, uint64_t bytes, uint64_t reserved, uint32_t managed)
{
    bool own = has_own_pages(address, bytes);
    uint64_t charge = gs_round_up(bytes, GS_PAGE_BYTES);
    struct gs_entry entry = {.key = address,
                             .bytes = own ? charge : bytes,
                             .owner = gs_key(place.context),
                             .kind = (own ? GS_LINEAR : GS_SMALL) | managed,
                             .card = place.card->index};
    if (!gs_table_put(&gs_held, &entry)) { /* stays charged, as it cannot be recognised when it is freed */
        gs_settle(place.card, reserved, reserved);
        return;
    }
    charge = own ? charge : count_pages(address, bytes, 1);
    if (managed)
        gs_accounts_unconfirmed(&gs_accounts, entry.card, GS_UNLISTED, (int64_t)charge);
    gs_settle(place.card, reserved, charge);
}

/* ---- arrays smaller than a page, which share pages ---- */

/* As seen on an H100 (docs/results/gpu-isolation.md): each takes the first page with room. If a driver chooses otherwise, the count is
 * off by a page here and there, until the next measurement by the driver's figure corrects it. */
#define PAGE_STEPS 32u /* 2 MiB */
#define MOST_PAGES 65536u

struct array_page {
    uint64_t context;
    uint64_t steps; /* in use; 0 for a free entry */
};

static struct gs_lock array_lock GS_PER_PROCESS;
static struct array_page *array_pages GS_PER_PROCESS; /* a mapping, touched only as far as it is in use */
static uint32_t array_pages_high GS_PER_PROCESS;

/* Under the lock: the index of a page with room, or of a free entry, or MOST_PAGES. */
static uint32_t find_array_page(uint64_t context, uint32_t steps)
{
    uint32_t free_entry = array_pages_high;
    for (uint32_t i = 0; i < array_pages_high; i++) {
        if (array_pages[i].steps && array_pages[i].context == context && array_pages[i].steps + steps <= PAGE_STEPS)
            return i;
        if (!array_pages[i].steps && free_entry == array_pages_high)
            free_entry = i;
    }
    return free_entry;
}

struct gs_array_part gs_array_page_take(uint64_t context, uint64_t bytes, bool may_open, bool *opened)
{
    struct gs_array_part part = {.steps = (uint32_t)(bytes / GS_ARRAY_STEP)};
    GS_GUARD(&array_lock);
    if (!array_pages)
        array_pages = gs_map_private(MOST_PAGES * sizeof *array_pages);
    uint32_t found = array_pages ? find_array_page(context, part.steps) : MOST_PAGES;
    *opened = found >= MOST_PAGES || !array_pages[found].steps;
    if (found < MOST_PAGES && (may_open || !*opened)) {
        array_pages_high = found < array_pages_high ? array_pages_high : found + 1;
        array_pages[found].context = context;
        array_pages[found].steps += part.steps;
        part.page = found + 1;
    }
    return part;
}

bool gs_array_page_leave(struct gs_array_part part)
{
    if (!part.page)
        return true;
    GS_GUARD(&array_lock);
    return (array_pages[part.page - 1].steps -= part.steps) == 0;
}

/* ---- releasing ---- */

static uint64_t release(struct gs_entry *entry, const struct gs_giver *on)
{
    uint64_t bytes = 0;
    switch (entry->kind & 0xff) {
    case GS_LINEAR: bytes = entry->bytes; break;
    case GS_SMALL_ARRAY:
        bytes =
            gs_array_page_leave((struct gs_array_part){(uint32_t)(entry->bytes >> 8), entry->bytes & 0xff}) ? GS_PAGE_BYTES : 0;
        break;
    case GS_SMALL: bytes = count_pages(entry->key, entry->bytes, -1); break;
    case GS_STREAM_ORDERED: gs_pool_block_freed(entry, on); break;
    case GS_OPENED: gs_accounts_imported(&gs_accounts, entry->card, -1); break;
    case GS_IMPORT:
        gs_accounts_imported(&gs_accounts, entry->card, -1);
        bytes = entry->kind & GS_EXPORTED ? entry->bytes : 0;
        break;
    }
    if (entry->kind & GS_MANAGED) /* before the return: what the figure lacks must be counted */
        gs_accounts_unconfirmed(&gs_accounts, entry->card, GS_UNLISTED, -(int64_t)bytes);
    if (entry->kind & GS_EXPORTED)
        gs_accounts_return_exported(&gs_accounts, entry->card, bytes);
    else
        gs_accounts_return(&gs_accounts, entry->card, bytes);
    if (entry->kind & GS_EXPORTED) /* after the return: what is counted and may be missing must be in doubt */
        gs_accounts_unconfirmed(&gs_accounts, entry->card, GS_MAY_BE_UNLISTED, -(int64_t)entry->bytes);
    return bytes;
}

uint64_t gs_release_entry(struct gs_entry *entry)
{
    gs_accounts_changed(&gs_accounts, entry->card);
    return release(entry, NULL);
}

/* The most that is still counted of what the driver has freed. */
static uint64_t most_of(const struct gs_entry *entry)
{
    switch (entry->kind & 0xff) {
    case GS_LINEAR: return entry->bytes;
    case GS_SMALL_ARRAY: return GS_PAGE_BYTES;
    case GS_SMALL: return gs_round_up(entry->bytes, GS_PAGE_BYTES) + GS_PAGE_BYTES;
    case GS_IMPORT: return entry->kind & GS_EXPORTED ? entry->bytes : 0;
    case GS_STREAM_ORDERED: /* a living pool itself reports what it keeps */
        return gs_pool_is_destroyed(entry->owner) || entry->kind & GS_LENT ? GS_MOST_BYTES : 0;
    default: return 0;
    }
}

struct gs_releasing gs_release_begins(uint64_t key)
{
    struct gs_releasing releasing = {0};
    releasing.known = gs_table_take(&gs_held, key, &releasing.entry);
    if (releasing.known) {
        releasing.bytes = most_of(&releasing.entry);
        gs_flight_begins(&gs_accounts, releasing.entry.card, GS_RELEASING, releasing.bytes);
    }
    return releasing;
}

int gs_released(struct gs_releasing *releasing, int result, const struct gs_giver *on)
{
    if (!releasing->known)
        return result;
    uint32_t card = releasing->entry.card;
    if (result == CUDA_SUCCESS)
        release(&releasing->entry, on);
    else
        gs_table_put(&gs_held, &releasing->entry);
    gs_flight_ends(&gs_accounts, card, GS_RELEASING, releasing->bytes);
    return result;
}

/* ---- destroyed contexts ---- */

static bool drop_with_context(struct gs_entry *entry, void *context)
{
    if (entry->owner != gs_key(context))
        return false;
    gs_release_entry(entry);
    return true;
}

void gs_drop_context(CUcontext context) { gs_table_sift(&gs_held, drop_with_context, context); }
