/* No program requests what the driver uses itself, so it is measured: by NVML's figure for this process, by the agent's, or by how
 * much of the card is in use at all. Where nobody has a figure for this process it is charged at first by how much the card's use
 * grew during the call. */
#include "policy/process_usage.h"

#include "accounts/in_flight.h"
#include "accounts/slots.h"
#include "policy/pool_accounts.h"
#include "system/at_fork.h"

#define MEASURE_EVERY_NS UINT64_C(1000000000)  /* code is loaded when a kernel is first launched, and the memory it needs */
#define MEASURE_LATEST_NS UINT64_C(8000000000) /* when nothing has changed for long */
#define MEASURE_PART 500u                      /* at most 1/500 of the time, if a driver answers slowly */
#define LEAST_SURPLUS (UINT64_C(16) << 20)     /* less is a guess's inaccuracy */
#define LOOKS 3                                /* in a row, while other threads have calls in flight */

struct process_usage {
    struct gs_card *card;
    uint64_t charged;
    uint64_t loaned; /* of what is charged: added while memory of others was open here, which our figure may contain */
    uint64_t last;   /* what the last periodic look found: a decrease counts when it is seen twice */
    uint64_t due_ns, measured_ns, pause_ns; /* atomic: when it is measured next, while a program allocates; 0: not planned */
    uint64_t figure_at_ns;                  /* time of the agent's last figure that was used */
    uint32_t contexts;
};

static struct process_usage usages[GPUSLICE_CARDS] GS_PER_PROCESS;
/* Context, module or limit → what it was measured to take, and its context. */
static struct gs_table pieces GS_TABLE_PER_PROCESS;
static struct gs_lock lock GS_PER_PROCESS;

static struct process_usage *usage_of(struct gs_card *card)
{
    struct process_usage *own = &usages[card->index];
    own->card = card;
    return own;
}

static const struct gs_holding *holding_of(const struct process_usage *own) { return &gs_accounts.mine[own->card->index]; }

bool gs_has_context(struct gs_card *card)
{
    return card->index >= GPUSLICE_CARDS || __atomic_load_n(&usages[card->index].contexts, __ATOMIC_ACQUIRE) > 0;
}

uint64_t gs_own_bytes(const struct gs_card *card) { return usages[card->index].charged; }

/* ---- charging, under the lock ---- */

static bool has_loans(const struct process_usage *own) { return atomic_load(&holding_of(own)->imports) != 0; }

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

/* A lower figure is believed when it is seen twice: a driver's figure may be late. */
static void charge_again(struct process_usage *own, uint64_t bytes)
{
    uint64_t twice = bytes > own->last ? bytes : own->last;
    charge_own(own, bytes > own->charged || twice < own->charged ? twice : own->charged);
    own->last = bytes;
}

/* If NVML lists this process, every measurement is the driver's figure. */
static void set_provisional(const struct process_usage *own, bool provisional)
{
    if (!gs_nvml_pid_known())
        gs_accounts_set_provisional(&gs_accounts, own->card->index, provisional);
}

/* ---- measuring, under the lock ---- */

enum source { NOBODY, NVML_LIST, AGENT, CARD };

/* The agent's figure says what was held when the driver was asked: it is compared only with accounts that have not changed since
 * before that. Where nobody publishes figures, the driver's own use is no more than what the card has in use beside all that this
 * process is known to have there. */
static enum source ask(const struct process_usage *own, struct gs_figure *figure)
{
    *figure = (struct gs_figure){0};
    if (gs_nvml_pid_known()) {
        figure->bytes = gs_read_processes(own->card, NULL);
        gs_pools_changed(); /* as at the reading: what pools returned meanwhile is known to be gone */
        return figure->bytes ? NVML_LIST : NOBODY;
    }
    if (!gs_figures_at())
        return gs_read_memory(own->card, &figure->bytes) ? CARD : NOBODY;
    uint64_t changed_ns = atomic_load(&holding_of(own)->changed_ns);
    bool newer =
        gs_figure_of(own->card, gs_pid(), gs_process(gs_pid()).start_time, figure) && figure->at_ns > own->figure_at_ns;
    return newer && gs_figures_are_after(figure->at_ns, changed_ns) ? AGENT : NOBODY;
}

struct measurement {
    enum source source;
    struct gs_figure figure;
    struct gs_bounds held; /* of our account while it was taken */
    uint64_t bytes;        /* the driver's own use */
};

/* Narrows the bounds of the driver's own use: the driver's figure, less what we know of. Other threads' calls in flight
 * widen these bounds, and so do unconfirmed bytes; the present charge is kept if it lies within them. Each look brings the
 * charge nearer to the truth or leaves it, and none overshoots: thus even dense traffic cannot let the account fall
 * short for what is only in flight. */
static void narrow(struct gs_bounds *bounds, const struct process_usage *own, const struct measurement *look)
{
    const struct gs_holding *holding = holding_of(own);
    uint64_t missing = atomic_load(&holding->unconfirmed[GS_MAY_BE_UNLISTED]),
             other = own->charged + atomic_load(&holding->unconfirmed[GS_UNLISTED]);
    uint64_t most = gs_less(look->figure.bytes, gs_less(gs_less(look->held.least, other), missing)),
             least = look->source == CARD ? 0 : gs_less(look->figure.bytes, gs_less(look->held.most, other));
    bounds->most = most < bounds->most ? most : bounds->most;
    bounds->least = least > bounds->least ? least : bounds->least;
}

/* Growth of our figure while others' memory was open stays charged while it is open: it could as well be code. Once
 * nothing is open, a measurement with no calls in flight decides. */
static bool loans_are_over(const struct process_usage *own, const struct measurement *look)
{
    return look->source != CARD && own->loaned && look->held.least == look->held.most && !has_loans(own);
}

/* With no calls in flight, one look is enough. */
static bool measure(struct process_usage *own, struct measurement *look)
{
    struct gs_bounds bounds = {0, UINT64_MAX};
    for (int looks = 0; looks < LOOKS; looks++) {
        struct gs_span span;
        if (looks)
            gs_yield();
        gs_span_begin(&gs_accounts, own->card->index, &span);
        look->source = ask(own, &look->figure);
        look->held = gs_span_end(&gs_accounts, own->card->index, &span);
        if (look->source == NOBODY)
            return false;
        narrow(&bounds, own, look);
        if (look->held.least == look->held.most || look->source != NVML_LIST)
            break;
    }
    uint64_t bytes = loans_are_over(own, look) ? gs_less(own->charged, own->loaned) : own->charged;
    look->bytes = bytes > bounds.most ? bounds.most : bytes < bounds.least ? bounds.least : bytes;
    return true;
}

/* ---- settling, under the lock ---- */

/* A context does not take more than all of the driver's own use, according to the figure. */
static void learn_at_most(const struct process_usage *own)
{
    struct gpuslice_card *entry = gs_region_card(own->card);
    if (entry && own->contexts == 1 && own->charged && atomic_load(&entry->context_bytes) > own->charged)
        atomic_store(&entry->context_bytes, own->charged);
}

static bool is_on_card(struct gs_entry *piece, void *card) { return piece->card == *(const uint32_t *)card; }

static void settle_by_agent(struct process_usage *own, const struct measurement *look)
{
    uint64_t before = own->charged;
    own->figure_at_ns = look->figure.at_ns;
    charge_again(own, look->bytes);
    if (own->charged < before) /* which of the pieces was too large is unknown */
        gs_table_sift(&pieces, is_on_card, &own->card->index);
    if (own->charged != look->bytes || look->held.least != look->held.most)
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

/* What a neighbour took while something was measured stays charged until the neighbour gives it back. */
static void settle_by_card(struct process_usage *own, uint64_t bytes)
{
    struct gs_entry surplus = {.card = own->card->index, .bytes = own->charged - bytes};
    if (surplus.bytes < LEAST_SURPLUS)
        return;
    charge_own(own, bytes);
    gs_table_sift(&pieces, shrink, &surplus);
}

/* False if nobody has a figure, or none that is new. */
static bool settle(struct process_usage *own, bool at_once)
{
    struct measurement look;
    if (!measure(own, &look))
        return false;
    if (look.source == CARD)
        settle_by_card(own, look.bytes);
    else if (look.source == AGENT)
        settle_by_agent(own, &look);
    else if (at_once)
        charge_own(own, look.bytes);
    else
        charge_again(own, look.bytes);
    return true;
}

bool gs_measure(struct gs_card *card)
{
    if (card->index >= GPUSLICE_CARDS || !gs_nvml_pid_known())
        return false;
    gs_pools_changed();
    gs_rest_begins(&gs_accounts, card->index);
    gs_lock(&lock);
    bool listed = settle(usage_of(card), true);
    gs_unlock(&lock);
    gs_rest_ends(&gs_accounts, card->index);
    return listed;
}

void gs_settle_own(struct gs_card *card)
{
    if (card->index >= GPUSLICE_CARDS || gs_nvml_pid_known() || !gs_has_context(card))
        return;
    gs_pools_changed();
    GS_GUARD(&lock);
    settle(usage_of(card), false);
}

/* ---- once in a while ---- */

/* Whether this thread is to measure now; the next one does so no sooner than the last measurement's cost allows. Once memory of
 * another process is no longer open here, a measurement soon shows how much of it was in our figure. */
static bool is_due(struct process_usage *own, uint64_t now)
{
    uint64_t due = __atomic_load_n(&own->due_ns, __ATOMIC_RELAXED),
             ended = atomic_load(&gs_accounts.mine[own - usages].loan_ended_ns);
    bool loan = ended > __atomic_load_n(&own->measured_ns, __ATOMIC_RELAXED);
    return (now >= due || (loan && now >= ended + MEASURE_EVERY_NS)) &&
           __atomic_compare_exchange_n(&own->due_ns, &due, now + MEASURE_EVERY_NS, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED) &&
           due;
}

static uint64_t pause_after(struct process_usage *own, bool steady, uint64_t cost_ns)
{
    uint64_t longer = own->pause_ns < MEASURE_LATEST_NS ? own->pause_ns * 2 : MEASURE_LATEST_NS;
    own->pause_ns = steady && longer ? longer : MEASURE_EVERY_NS;
    return own->pause_ns > cost_ns * MEASURE_PART ? own->pause_ns : cost_ns * MEASURE_PART;
}

static void measure_if_due(struct gs_card *card, uint64_t now)
{
    if (card->index >= GPUSLICE_CARDS || !gs_has_context(card) || !is_due(&usages[card->index], now))
        return;
    uint64_t began = gs_monotonic_ns();
    gs_pools_changed();
    gs_rest_begins(&gs_accounts, card->index);
    gs_lock(&lock);
    struct process_usage *own = usage_of(card);
    uint64_t before = own->charged;
    settle(own, false);
    uint64_t ended = gs_monotonic_ns();
    bool steady = own->charged == before && own->last == before && !atomic_load(&holding_of(own)->provisional);
    uint64_t pause = pause_after(own, steady, ended - began);
    gs_unlock(&lock);
    gs_rest_ends(&gs_accounts, card->index);
    __atomic_store_n(&own->measured_ns, now, __ATOMIC_RELAXED);
    __atomic_store_n(&own->due_ns, ended + pause, __ATOMIC_RELAXED);
}

/* Measures every card: a process may be charged too much on one long after it last allocated there. */
uint64_t gs_measure_sometimes(struct gs_card *card)
{
    uint64_t now = gs_accounts_look(&gs_accounts);
    gs_cards_look(now);
    gs_cards_look_now();
    measure_if_due(card, now);
    for (uint32_t i = 0; i < gs_card_count(); i++)
        if (gs_card_at(i) != card)
            measure_if_due(gs_card_at(i), now);
    return now;
}

/* ---- growth of the card's use during a call ---- */

void gs_snapshot(struct gs_card *card, struct gs_snapshot *snapshot, struct gs_processes *listed)
{
    gs_rest_begins(&gs_accounts, card->index); /* bytes counted and not yet taken would distort the growth */
    gs_lock(&lock);
    snapshot->held = gs_used(card);
    snapshot->known = gs_read_memory(card, &snapshot->used);
    snapshot->mine = listed ? gs_read_processes(card, listed) : 0;
    gs_unlock(&lock);
    gs_rest_ends(&gs_accounts, card->index);
}

int64_t gs_grown(const struct gs_snapshot *before, const struct gs_snapshot *after)
{
    if (!before->known || !after->known)
        return 0;
    return (int64_t)(after->used - before->used) - (int64_t)(after->held - before->held); /* without what our container took */
}

void gs_add_piece(struct gs_card *card, uint64_t key, uint64_t context, int64_t bytes)
{
    struct gs_entry piece = {.key = key, .owner = context, .card = card->index};
    GS_GUARD(&lock);
    struct process_usage *own = usage_of(card);
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
    charge_own(own, gs_less(own->charged, bytes));
}

uint64_t gs_piece(uint64_t key)
{
    struct gs_entry piece = {0};
    gs_table_get(&pieces, key, &piece);
    return piece.bytes;
}

void gs_drop_piece(struct gs_card *card, uint64_t key)
{
    GS_GUARD(&lock);
    drop_pieces(usage_of(card), key, 0);
}

void gs_context_made(struct gs_card *card, uint64_t key, uint64_t bytes)
{
    gs_add_piece(card, key, 0, (int64_t)bytes);
    GS_GUARD(&lock);
    struct process_usage *own = usage_of(card);
    __atomic_store_n(&own->contexts, own->contexts + 1, __ATOMIC_RELEASE);
}

bool gs_context_ended(struct gs_card *card, uint64_t key, uint64_t context)
{
    GS_GUARD(&lock);
    struct process_usage *own = usage_of(card);
    drop_pieces(own, key, context);
    bool last = own->contexts <= 1;
    __atomic_store_n(&own->contexts, last ? 0 : own->contexts - 1, __ATOMIC_RELEASE);
    if (last) {
        charge_own(own, 0);
        set_provisional(own, false);
    }
    return last;
}
