/* The driver's own use: contexts, modules, heaps. No program requests these bytes, so they are measured: by NVML's
 * figure for this process, or, if it has none for us, by how much the card's use grew during the call. */
#include "policy/process_usage.h"

#include <string.h>

#include "accounts/in_flight.h"
#include "accounts/slots.h"
#include "policy/figures.h"
#include "policy/nvml_readings.h"
#include "policy/pool_accounts.h"
#include "policy/unconfirmed.h"
#include "system/at_fork.h"

#define MEASURE_LATEST_NS UINT64_C(8000000000) /* when nothing has changed for long */
#define LEAST_SURPLUS (UINT64_C(16) << 20)     /* less is a guess's inaccuracy */
#define LOOKS 3                                /* in a row, while other threads have calls in flight */
#define MEASURE_PART 500u                      /* at most 1/500 of the time, if a driver answers slowly */

static struct process_usage usages[GPUSLICE_CARDS];
static struct gs_table pieces; /* context, module or limit → what it was measured to take, and its context */
static struct gs_lock lock;

static void forget(void)
{
    lock = (struct gs_lock){0};
    memset(usages, 0, sizeof usages);
    gs_table_forget(&pieces);
}
GS_AT_FORK(forget);

/* ---- charging ---- */

struct process_usage *gs_process_usage_of(struct gs_card *card)
{
    struct process_usage *own = &usages[card->index];
    own->card = card;
    return own;
}

static bool has_loans(const struct process_usage *own) { return atomic_load(&gs_accounts.mine[own->card->index].imports) != 0; }

static void charge_own(struct process_usage *own, uint64_t bytes)
{
    if (bytes != own->charged)
        gs_recharge(own->card, own->charged, bytes);
    if (bytes < own->charged)
        own->loaned = gs_less(own->loaned, own->charged - bytes);
    else if (has_loans(own))
        own->loaned += bytes - own->charged;
    own->charged = own->last = bytes;
    gs_accounts_set_own(&gs_accounts, own->card->index, bytes);
}

/* If NVML lists this process, every measurement is the driver's figure. */
static void set_provisional(const struct process_usage *own, bool provisional)
{
    if (!gs_nvml_pid_known())
        gs_set_provisional(own->card->index, provisional);
}

/* Narrows the bounds of the driver's own use: the driver's figure, less what we know of. Other threads' calls in flight
 * widen these bounds, and so do doubtful bytes; the present charge is kept if it lies within them. Each look brings the
 * charge nearer to the truth or leaves it, and none overshoots: thus even dense traffic cannot let the account fall
 * short for what is only in flight. */
static void measure_own(struct process_usage *own, uint64_t figure, struct gs_bounds held)
{
    uint32_t card = own->card->index;
    uint64_t missing = gs_unconfirmed(card, GS_MAY_BE_UNLISTED), other = own->charged + gs_unconfirmed(card, GS_UNLISTED);
    uint64_t certain = gs_less(gs_less(held.least, other), missing), possible = gs_less(held.most, other);
    uint64_t most = gs_less(figure, certain), least = gs_less(figure, possible);
    own->most = most < own->most ? most : own->most;
    own->least = least > own->least ? least : own->least;
}

/* Growth of our figure while others' memory was open stays charged while it is open: it could as well be code. Once
 * nothing is open, a measurement with no calls in flight decides. */
static uint64_t as_measured(const struct process_usage *own, struct gs_bounds held)
{
    bool over = own->loaned && held.least == held.most && !has_loans(own);
    uint64_t bytes = over ? gs_less(own->charged, own->loaned) : own->charged;
    return bytes > own->most ? own->most : bytes < own->least ? own->least : bytes;
}

/* Under the lock. With no calls in flight, one look is enough. */
static bool measure(struct process_usage *own, struct reading *reading, uint64_t *bytes)
{
    uint32_t card = own->card->index;
    own->least = 0;
    own->most = UINT64_MAX;
    struct gs_bounds held;
    for (int look = 0; look < LOOKS; look++) {
        struct gs_span span;
        gs_span_begin(&gs_accounts, card, &span);
        gs_read_processes(own, reading);
        gs_pools_changed(); /* as at the reading: what pools returned meanwhile is known to be gone */
        held = gs_span_end(&gs_accounts, card, &span);
        if (!reading->listed)
            return false;
        measure_own(own, reading->mine, held);
        if (held.least == held.most)
            break;
        gs_yield();
    }
    *bytes = as_measured(own, held);
    return true;
}

bool gs_measure(struct gs_card *card)
{
    struct reading reading = {0};
    uint64_t bytes;
    if (card->index >= GPUSLICE_CARDS || !gs_nvml_pid_known())
        return false;
    gs_pools_changed();
    gs_rest_begins(&gs_accounts, card->index);
    gs_lock(&lock);
    struct process_usage *own = gs_process_usage_of(card);
    if (measure(own, &reading, &bytes))
        charge_own(own, bytes);
    gs_unlock(&lock);
    gs_rest_ends(&gs_accounts, card->index);
    return reading.listed;
}

/* A lower figure is believed when it is seen twice: a driver's figure may be late. */
static void charge_again(struct process_usage *own, uint64_t bytes)
{
    uint64_t twice = bytes > own->last ? bytes : own->last;
    charge_own(own, bytes > own->charged || twice < own->charged ? twice : own->charged);
    own->last = bytes;
}

static void measure_again(struct process_usage *own)
{
    struct reading reading = {0};
    uint64_t bytes;
    if (measure(own, &reading, &bytes))
        charge_again(own, bytes);
}

/* A context does not take more than all of the driver's own use, according to the figure. */
static void learn_at_most(const struct process_usage *own)
{
    struct gpuslice_region *region = gs_accounts_at(&gs_accounts).region;
    _Atomic uint64_t *context_bytes = region ? &region->cards[own->card->index].context_bytes : NULL;
    if (context_bytes && own->contexts == 1 && own->charged && atomic_load(context_bytes) > own->charged)
        atomic_store(context_bytes, own->charged);
}

static bool is_on_card(struct gs_entry *piece, void *card) { return piece->card == *(const uint32_t *)card; }

/* Under the lock. A figure says what was held when the driver was asked: it is compared only with accounts that have
 * not changed since before that. */
static void settle_own(struct process_usage *own)
{
    struct gs_figure figure;
    struct gs_span span;
    uint32_t card = own->card->index;
    gs_span_begin(&gs_accounts, card, &span);
    struct gs_bounds held = gs_span_end(&gs_accounts, card, &span);
    uint64_t changed_ns = atomic_load(&gs_accounts.mine[card].changed_ns);
    if (!gs_figure_of(own->card, gs_pid(), gs_process(gs_pid()).start_time, &figure) || figure.at_ns <= own->figure_at_ns ||
        !gs_figures_are_after(figure.at_ns, changed_ns))
        return;
    own->least = 0;
    own->most = UINT64_MAX;
    measure_own(own, figure.bytes, held);
    uint64_t bytes = as_measured(own, held);
    own->figure_at_ns = figure.at_ns;
    uint64_t before = own->charged;
    charge_again(own, bytes);
    if (own->charged < before) /* which of the pieces was too large is unknown */
        gs_table_sift(&pieces, is_on_card, &card);
    if (own->charged != bytes || held.least != held.most)
        return;
    set_provisional(own, false);
    learn_at_most(own);
}

/* Any of the pieces may have been measured with all of what is too much: so much less is sure to return with it. */
static bool shrink(struct gs_entry *piece, void *context)
{
    const struct gs_entry *surplus = context;
    if (piece->card == surplus->card)
        piece->bytes = gs_less(piece->bytes, surplus->bytes);
    return false;
}

/* Under the lock. Where nobody publishes figures: the driver's own use is no more than what the card has in use beside all that
 * this process is known to have there. What a neighbour took while something was measured stays charged until the neighbour
 * gives it back. */
static void settle_by_card(struct process_usage *own)
{
    struct reading reading = {0};
    struct gs_span span;
    uint32_t card = own->card->index;
    gs_span_begin(&gs_accounts, card, &span);
    gs_read_memory(own, &reading);
    struct gs_bounds held = gs_span_end(&gs_accounts, card, &span);
    if (!reading.known)
        return;
    own->most = UINT64_MAX;
    own->least = 0;
    measure_own(own, reading.device_used, held);
    if (gs_less(own->charged, own->most) < LEAST_SURPLUS)
        return;
    struct gs_entry surplus = {.card = card, .bytes = own->charged - own->most};
    charge_own(own, own->most);
    gs_table_sift(&pieces, shrink, &surplus);
}

void gs_settle_own(struct gs_card *card)
{
    if (card->index >= GPUSLICE_CARDS || gs_nvml_pid_known() || !gs_has_context(card))
        return;
    gs_pools_changed();
    gs_lock(&lock);
    gs_figures_at() ? settle_own(gs_process_usage_of(card)) : settle_by_card(gs_process_usage_of(card));
    gs_unlock(&lock);
}

/* Whether this thread is to measure now; the next one does so no sooner than the last measurement's cost allows. */
static bool is_due(uint32_t card, uint64_t now)
{
    uint64_t *next = &gs_measurement_due_ns[card], due = __atomic_load_n(next, __ATOMIC_RELAXED);
    return now >= due &&
           __atomic_compare_exchange_n(next, &due, now + GS_MEASURE_EVERY_NS, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED) && due;
}

static uint64_t pause_after(struct process_usage *own, bool steady, uint64_t cost_ns)
{
    uint64_t longer = own->pause_ns < MEASURE_LATEST_NS ? own->pause_ns * 2 : MEASURE_LATEST_NS;
    own->pause_ns = steady && longer ? longer : GS_MEASURE_EVERY_NS;
    return own->pause_ns > cost_ns * MEASURE_PART ? own->pause_ns : cost_ns * MEASURE_PART;
}

static void measure_if_due(struct gs_card *card, uint64_t now)
{
    if (card->index >= GPUSLICE_CARDS || !gs_has_context(card) || !is_due(card->index, now))
        return;
    uint64_t began = gs_monotonic_ns();
    gs_pools_changed();
    gs_rest_begins(&gs_accounts, card->index);
    gs_lock(&lock);
    struct process_usage *own = gs_process_usage_of(card);
    uint64_t before = own->charged;
    if (gs_nvml_pid_known())
        measure_again(own);
    else
        gs_figures_at() ? settle_own(own) : settle_by_card(own);
    uint64_t ended = gs_monotonic_ns();
    bool steady = own->charged == before && own->last == before && !gs_is_provisional(card->index);
    uint64_t pause = pause_after(own, steady, ended - began);
    gs_unlock(&lock);
    gs_rest_ends(&gs_accounts, card->index);
    __atomic_store_n(&gs_measurement_due_ns[card->index], ended + pause, __ATOMIC_RELAXED);
}

/* Measures every card: a process may be charged too much on one long after it last allocated there. */
void gs_measure_sometimes(struct gs_card *card)
{
    uint64_t now = gs_accounts_look(&gs_accounts);
    gs_cards_look(now);
    measure_if_due(card, now);
    for (uint32_t i = 0; i < gs_card_count(); i++)
        if (gs_card_at(i) != card)
            measure_if_due(gs_card_at(i), now);
}

/* ---- growth of the card's use during a call ---- */

void gs_snapshot_card(struct gs_card *card, struct gs_card_snapshot *snapshot, enum gs_snapshot_depth depth)
{
    gs_rest_begins(&gs_accounts, card->index); /* bytes counted and not yet taken would distort the growth */
    gs_lock(&lock);
    snapshot->held = gs_used(card);
    snapshot->reading.count = 0;
    snapshot->reading.listed = false;
    gs_read_memory(gs_process_usage_of(card), &snapshot->reading);
    if (depth == GS_MEMORY_AND_PROCESSES)
        gs_read_processes(gs_process_usage_of(card), &snapshot->reading);
    gs_unlock(&lock);
    gs_rest_ends(&gs_accounts, card->index);
}

void gs_snapshot_memory(struct gs_card *card, struct gs_memory_snapshot *snapshot)
{
    struct reading reading;
    gs_rest_begins(&gs_accounts, card->index);
    gs_lock(&lock);
    snapshot->held = gs_used(card);
    gs_read_memory(gs_process_usage_of(card), &reading);
    gs_unlock(&lock);
    gs_rest_ends(&gs_accounts, card->index);
    snapshot->known = reading.known;
    snapshot->device_used = reading.known ? reading.device_used : 0;
}

int64_t gs_grown(const struct gs_card_snapshot *before, const struct gs_card_snapshot *after)
{
    if (!before->reading.known || !after->reading.known)
        return 0;
    int64_t card = (int64_t)(after->reading.device_used - before->reading.device_used);
    return card - (int64_t)(after->held - before->held); /* without what our own container took */
}

void gs_add_piece(struct gs_card *card, uint64_t key, uint64_t context, int64_t bytes)
{
    struct gs_entry piece = {.key = key, .owner = context, .card = card->index};
    gs_lock(&lock);
    struct process_usage *own = gs_process_usage_of(card);
    gs_table_take(&pieces, key, &piece);
    int64_t least = -(int64_t)piece.bytes;
    bytes = bytes < least ? least : bytes;
    piece.bytes += (uint64_t)bytes;
    piece.owner = context;
    if (piece.bytes)
        gs_table_put(&pieces, &piece);
    gs_accounts_changed(&gs_accounts, card->index);
    charge_own(own, own->charged + (uint64_t)bytes);
    set_provisional(own, true);
    gs_unlock(&lock);
}

static bool gather(struct gs_entry *piece, void *context)
{
    struct gs_entry *sum = context;
    if (piece->owner != sum->owner)
        return false;
    sum->bytes += piece->bytes;
    return true;
}

/* Under the lock. */
static void drop_pieces(struct process_usage *own, uint64_t key, uint64_t context)
{
    struct gs_entry piece = {0}, sum = {.owner = context};
    gs_table_take(&pieces, key, &piece);
    if (context)
        gs_table_sift(&pieces, gather, &sum);
    uint64_t bytes = piece.bytes + sum.bytes;
    gs_accounts_changed(&gs_accounts, own->card->index);
    if (!bytes) /* the next figure shows what it returned */
        set_provisional(own, true);
    charge_own(own, own->charged > bytes ? own->charged - bytes : 0);
}

uint64_t gs_piece(uint64_t key)
{
    struct gs_entry piece = {0};
    gs_table_get(&pieces, key, &piece);
    return piece.bytes;
}

void gs_drop_piece(struct gs_card *card, uint64_t key)
{
    gs_lock(&lock);
    drop_pieces(gs_process_usage_of(card), key, 0);
    gs_unlock(&lock);
}

void gs_context_made(struct gs_card *card, uint64_t key, uint64_t bytes)
{
    gs_add_piece(card, key, 0, (int64_t)bytes);
    gs_lock(&lock);
    struct process_usage *own = gs_process_usage_of(card);
    __atomic_store_n(&own->contexts, own->contexts + 1, __ATOMIC_RELEASE);
    gs_unlock(&lock);
}

bool gs_context_ended(struct gs_card *card, uint64_t key, uint64_t context)
{
    gs_lock(&lock);
    struct process_usage *own = gs_process_usage_of(card);
    drop_pieces(own, key, context);
    bool last = own->contexts <= 1;
    __atomic_store_n(&own->contexts, last ? 0 : own->contexts - 1, __ATOMIC_RELEASE);
    if (last) {
        charge_own(own, 0);
        set_provisional(own, false);
    }
    gs_unlock(&lock);
    return last;
}

bool gs_has_context(struct gs_card *card)
{
    return card->index >= GPUSLICE_CARDS || __atomic_load_n(&usages[card->index].contexts, __ATOMIC_ACQUIRE) > 0;
}
