/* Makes launches wait while their container has used up its share or is ahead of others that want the card. share.c and
 * card_queue.c decide that; this file connects them to the driver's events, NVML's samples, the neighbours' claims and
 * the clock.
 *
 * All processes of the container share one account, in the region. There is no background thread: the threads that
 * launch or wait do the accounting. */
#include "policy/throttle.h"

#include <string.h>

#include "accounts/slots.h"
#include "policy/neighbours.h"
#include "policy/samples.h"
#include "system/at_fork.h"
#include "system/os.h"

#define MOST_IN_FLIGHT_NS UINT64_C(60000000000)
#define LOOK_EVERY_NS 50000u
#define TELL_NS 100000u
#define SOON_TOLD_NS UINT64_C(2000000) /* the next launch publishes the end of shorter work, if it follows at once */
#define SWEEP_EVERY_NS UINT64_C(100000000)
#define LIST_EVERY_NS UINT64_C(20000000) /* how often to look for new neighbours */

/* One card, as this process sees it. */
struct card_state {
    struct gs_card *card;
    struct gs_share share;
    struct gs_queue queue;
    struct gs_neighbours neighbours;
    struct gs_neighbourhood beside;
    uint64_t looked_ns;
    uint64_t settled_ns;   /* busy time since this process last read a sample */
    uint64_t worked_at_ns; /* when it last had work in flight */
    uint64_t told_end_ns;
    uint64_t swept_ns; /* when a waiting thread last looked for processes that have ended */
    bool untold;       /* its activity since the last look is not published yet */
    bool launched;
    struct gs_share_past past;
};

static uint32_t shared_cards; /* number of cards with a share */
static bool all_lend;
/* While no other container wants the card, launches need not be timed. */
static struct {
    const struct gs_queue *queue; /* of the only card with a share: its estimates apply then */
    uint64_t until_ns;            /* atomic: when it ends; 0: every launch is timed */
    int64_t left_ns;   /* atomic: how much may be launched until then, by the estimates; NOT_COUNTED without neighbours */
    uint64_t timed_ns; /* when a launch was last timed, and so published, since it last began; 0: none was */
} alone;
static char meeting_prefix[GS_PATH_ROOM];
static struct gs_lock lock GS_PER_PROCESS;
static struct card_state states[GPUSLICE_CARDS];

static bool is_limited(const struct gs_card *card) { return card->share.weight && card->share.weight < 100; }

void gs_throttle_start(const char *prefix)
{
    size_t length = strlen(prefix);
    memcpy(meeting_prefix, prefix, length < sizeof meeting_prefix ? length + 1 : 0);
    all_lend = true;
    for (uint32_t i = 0; i < gs_card_count(); i++) {
        const struct gs_card *card = gs_card_at(i);
        shared_cards += is_limited(card);
        all_lend &= card->share.cap >= 100;
    }
}

static void forget(void)
{
    for (uint32_t i = 0; i < GPUSLICE_CARDS; i++)
        if (states[i].card) /* otherwise never used: do not touch its memory */
            memset(&states[i], 0, sizeof states[i]);
}
GS_AT_FORK(forget);

/* ---- the driver's events ---- */

static void *create_event(const struct gs_stream *stream)
{
    CUevent event = NULL;
    GS_IN_CONTEXT(stream->context);
    return DRIVER(cuEventCreate)(&event, 0) == CUDA_SUCCESS ? event : NULL;
}

static bool record_event(void *event, const struct gs_stream *stream)
{
    return (stream->thread ? DRIVER(cuEventRecord_ptsz)(event, NULL) : DRIVER(cuEventRecord)(event, stream->handle)) ==
           CUDA_SUCCESS;
}

static bool is_capturing(const struct gs_stream *stream)
{
    int status = 0;
    int result =
        stream->thread ? DRIVER(cuStreamIsCapturing_ptsz)(NULL, &status) : DRIVER(cuStreamIsCapturing)(stream->handle, &status);
    return result != CUDA_ERROR_NOT_FOUND && (result != CUDA_SUCCESS || status != 0);
}

/* The stream may have begun a capture since the launch: recording an event on it now would invalidate the capture. */
static bool record_event_late(void *event, const struct gs_stream *stream)
{
    GS_IN_CONTEXT(stream->context);
    return !is_capturing(stream) && record_event(event, stream);
}

static bool event_is_pending(void *event) { return DRIVER(cuEventQuery)(event) == CUDA_ERROR_NOT_READY; }

static bool elapsed_ns(void *from, void *to, uint64_t *ns)
{
    float milliseconds = 0;
    if (DRIVER(cuEventElapsedTime)(&milliseconds, from, to) != CUDA_SUCCESS)
        return false;
    *ns = milliseconds > 0 ? (uint64_t)((double)milliseconds * 1e6) : 0;
    return true;
}

static const struct gs_events events = {create_event, record_event, record_event_late, event_is_pending, elapsed_ns};

/* ---- the account, in the region ---- */

static struct gs_under_way under_way_of(const struct gs_card *card)
{
    struct gs_attachment at = gs_accounts_at(&gs_accounts);
    struct gs_under_way sum = {0};
    GS_FOR_EACH_SLOT(slot, at.region, at.slot) {
        uint64_t part = atomic_load_explicit(&slot->usage[card->index].in_flight_ns, memory_order_relaxed);
        if (!part || part >= MOST_IN_FLIGHT_NS)
            continue;
        sum.ns += part;
        sum.unknown += atomic_load_explicit(&slot->usage[card->index].unknown, memory_order_relaxed);
    }
    return sum;
}

static void show_in_flight(struct card_state *state)
{
    struct gpuslice_slot *slot = gs_accounts_at(&gs_accounts).slot;
    if (!slot)
        return;
    struct gpuslice_usage *usage = &slot->usage[state->card->index];
    uint64_t ns = state->queue.in_flight_ns < MOST_IN_FLIGHT_NS ? state->queue.in_flight_ns : MOST_IN_FLIGHT_NS - 1;
    atomic_store_explicit(&usage->in_flight_ns, ns, memory_order_release);
    atomic_store_explicit(&usage->unknown, state->queue.unknown, memory_order_release);
}

/* Hides work that has ended from the container's other processes until it is accounted for. */
static void hide_in_flight(const struct card_state *state)
{
    struct gpuslice_slot *slot = gs_accounts_at(&gs_accounts).slot;
    if (slot)
        atomic_store(&slot->usage[state->card->index].in_flight_ns, 0);
}

/* ---- neighbours, under the lock ---- */

static void read_neighbours(struct card_state *state, uint64_t now_ns, bool waits)
{
    struct gs_neighbour others[GS_NEIGHBOURS];
    uint32_t count = gs_neighbours_read(&state->neighbours, now_ns, LIST_EVERY_NS, others);
    gs_neighbourhood_update(&state->beside, gs_region_card(state->card), now_ns, others, count,
                            gs_queue_run(&state->queue, now_ns));
    bool works = under_way_of(state->card).ns,
         held = waits && gs_share_headroom(gs_region_card(state->card), &state->share, now_ns, 0, true) > 0;
    uint64_t since_ns = waits && works ? UINT64_MAX
                        : held         ? state->queue.covered_ns
                                       : now_ns; /* unknown while work is in flight */
    gs_neighbourhood_bill(&state->beside, gs_region_card(state->card), &state->share, now_ns, since_ns);
    if (!gs_all_rest(&state->beside, now_ns))
        __atomic_store_n(&alone.until_ns, 0, __ATOMIC_RELAXED);
}

static void tell_neighbours(struct card_state *state, uint64_t now_ns, bool waits)
{
    struct gs_under_way work = under_way_of(state->card);
    work.ran = gs_queue_ran(&state->queue);
    work.pause_ns = state->queue.pause_ns;
    work.awaited = state->queue.awaited_ns != 0;
    work.uncharged_ns = gs_queue_uncharged_ns(&state->queue, now_ns);
    struct gpuslice_claim claim = gs_claim(gs_region_card(state->card), &state->share, now_ns, work, waits);
    gs_neighbours_tell(&state->neighbours, &claim);
    state->told_end_ns = gs_heard(&claim, now_ns).ends_ns;
    state->untold = false;
}

/* ---- what NVML knows ---- */

/* Releases the lock while NVML is asked. Returns the time. */
static uint64_t learn(struct card_state *state, uint64_t now_ns)
{
    const struct gs_card *card = state->card;
    struct gs_share_sample sample;
    enum gs_share_ask how = gs_share_ask(gs_region_card(card), now_ns, gs_realtime_us());
    if (how == GS_SHARE_NOT_NOW)
        return now_ns;
    bool idle = !state->queue.count && state->worked_at_ns && now_ns > state->worked_at_ns;
    struct gs_activity activity = {state->settled_ns, idle ? now_ns - state->worked_at_ns : 0};
    gs_unlock(&lock);
    bool sampled = gs_sample(card, &activity, how == GS_SHARE_ASK, &sample);
    uint64_t in_flight = under_way_of(card).ns, age_us = sampled ? gs_realtime_us() - sample.until_us : 0;
    uint64_t until_ns = gs_monotonic_ns() - age_us * 1000;
    gs_lock(&lock);
    if (how == GS_SHARE_ASK_AFTER_GAP && state->beside.count)
        sample.own_percent = 0; /* neighbours know more about the gap than a sample of its end does */
    if (sampled) {
        state->settled_ns = 0;
        gs_share_learn(gs_region_card(card), &state->share, now_ns, in_flight, &state->past, &sample, until_ns, how);
    }
    return gs_monotonic_ns();
}

/* ---- looking ---- */

static void account(struct card_state *state, uint64_t now_ns, bool paused, bool waits)
{
    struct gpuslice_card *entry = gs_region_card(state->card);
    struct gs_own_part part = gs_own_part(entry, now_ns, &state->beside);
    gs_share_accrue(entry, &state->share, now_ns, under_way_of(state->card).ns, waits);
    GS_RELAX_CAPTURE;
    uint64_t finished = state->queue.finished_ns;
    struct gs_busy busy = gs_queue_look(&state->queue, &events, now_ns, paused, part);
    if (busy.ns) {
        gs_share_charge(entry, &state->share, busy);
        state->beside.own_busy_ns += busy.ns;
        state->settled_ns += busy.ns;
        state->worked_at_ns = now_ns;
    }
    if (state->queue.finished_ns != finished)
        atomic_store(&entry->finished_at_ns, now_ns);
    gs_neighbourhood_divide(&state->beside, now_ns, gs_queue_run(&state->queue, now_ns));
    state->looked_ns = now_ns;
    show_in_flight(state);
    if (state->queue.count || busy.ns)
        gs_stay(entry, state->queue.count ? now_ns : state->queue.covered_ns);
    gs_share_note(&state->past, entry, now_ns);
}

static bool has_ended(const struct card_state *state, uint64_t now_ns)
{
    GS_RELAX_CAPTURE;
    return gs_queue_has_ended(&state->queue, &events, now_ns);
}

/* Accounts for the work that the program has waited for, as of the time when it returned. */
static void settle(struct card_state *state)
{
    uint64_t ended_ns = state->queue.ended_ns;
    if (!ended_ns)
        return;
    state->queue.ended_ns = 0;
    show_in_flight(state);
    read_neighbours(state, ended_ns, false);
    account(state, ended_ns, true, false);
    gs_queue_awaited(&state->queue, ended_ns);
    state->untold = true;
}

static void look(struct card_state *state, uint64_t now_ns, bool waits)
{
    struct gpuslice_card *entry = gs_region_card(state->card);
    settle(state);
    bool due = waits || now_ns - state->looked_ns >= LOOK_EVERY_NS;
    if (!waits)
        gs_queue_arrive(&state->queue, now_ns);
    struct gs_under_way work = under_way_of(state->card);
    uint64_t busy_ns = waits ? 0 : work.unknown ? UINT64_MAX / 2 : work.ns * (1 + state->beside.count);
    bool stopped = gs_was_stopped(entry, now_ns, busy_ns);
    if (due || state->untold) /* others may have begun since the program waited */
        read_neighbours(state, now_ns, waits);
    if (stopped)
        gs_wake(entry, now_ns, 0, &state->beside);
    if (due)
        account(state, now_ns, waits, waits && !stopped);
    if (!waits && (due || state->untold) && !under_way_of(state->card).ns)
        gs_wake(entry, now_ns, state->queue.awaited_ns, &state->beside);
    if (due) {
        if (waits)
            gs_stay(entry, now_ns);
        state->untold = *state->neighbours.folder && !waits; /* it will launch or wait next, and publish that */
        if (*state->neighbours.folder && waits)
            tell_neighbours(state, now_ns, true);
    }
}

/* ---- launching ---- */

static struct gs_contention contention(const struct card_state *state, uint64_t now_ns, uint64_t waited_ns)
{
    struct gs_under_way container = under_way_of(state->card);
    return (struct gs_contention){now_ns, waited_ns, container.ns, container.unknown, &state->beside};
}

static uint64_t wait_ns(struct card_state *state, const struct gs_work *work, uint64_t now_ns, uint64_t waited_ns)
{
    struct gs_contention met = contention(state, now_ns, waited_ns);
    return gs_queue_wait_ns(&state->queue, gs_region_card(state->card), &state->share, &met, &work->stream, work->key);
}

/* Under the lock, which it releases while it sleeps. Returns the time. */
static uint64_t wait_for_turn(struct card_state *state, const struct gs_work *work, uint64_t now)
{
    uint64_t began = now, ns;
    if (state->looked_ns == now)
        now = gs_monotonic_ns(); /* reading claims takes some microseconds */
    if (gs_share_is_divided(gs_region_card(state->card)))
        now = learn(state, now);
    while ((ns = wait_ns(state, work, now, now - began))) {
        look(state, now, true);
        bool sweeps = now - state->swept_ns >= SWEEP_EVERY_NS; /* a dead process's work in flight counts until then */
        state->swept_ns = sweeps ? now : state->swept_ns;
        gs_unlock(&lock);
        if (sweeps)
            gs_accounts_sweep(&gs_accounts);
        gs_sleep_ns(ns);
        gs_lock(&lock);
        uint64_t woken = gs_monotonic_ns();
        atomic_fetch_add(&gs_region_card(state->card)->throttled_ns, woken - now);
        look(state, woken, true);
        now = learn(state, woken);
    }
    return now;
}

static bool is_throttled(const struct gs_card *card) { return card && gs_region_card(card) && is_limited(card); }

/* Work that cannot be timed, because no events are available, is charged what such work took before. */
static void note_launch(struct card_state *state, struct gs_work *work, uint64_t now)
{
    work->batch = gs_queue_begin(&state->queue, &events, &work->stream, work->key, now);
    if (!work->batch)
        gs_share_spend(gs_region_card(state->card), &state->share, gs_queue_estimate_ns(&state->queue, work->key));
    show_in_flight(state);
    bool longer = state->beside.count && state->told_end_ns + TELL_NS < now + state->queue.in_flight_ns;
    if ((state->untold || longer) && !state->queue.ended_ns)
        tell_neighbours(state, now, false);
    alone.timed_ns = now;
}

void gs_throttle_meet(struct gs_card *card)
{
    if (!is_throttled(card))
        return;
    struct card_state *state = &states[card->index];
    GS_GUARD(&lock);
    if (!state->card) {
        gs_neighbours_start(&state->neighbours, meeting_prefix, card->uuid);
        state->card = card;
        state->share = card->share;
        alone.queue = &state->queue;
        if (!*state->neighbours.folder) /* without claims nothing can be lent */
            state->share.cap = state->share.weight;
        tell_neighbours(state, gs_monotonic_ns(), false);
    }
}

/* ---- launches that are not timed ---- */

/* A neighbour that begins is seen a few milliseconds later, and what was launched untimed until then is not charged.
 * Therefore it is little, even if nobody waits for it. */
#define ALONE_FOR_NS 4000000u
#define UNTIMED_NS 2000000                 /* as much as may be in flight beside an interactive container */
#define PUBLISHED_FOR_NS (GS_RESTS_NS / 2) /* how long a published launch shows others that this container is at work */
#define NOT_COUNTED INT64_MAX

bool gs_is_alone(void)
{
    uint64_t until = __atomic_load_n(&alone.until_ns, __ATOMIC_ACQUIRE);
    return until && gs_coarse_ns() < until;
}

bool gs_goes_untimed(uint64_t key)
{
    if (!gs_is_alone())
        return false;
    int64_t left = __atomic_load_n(&alone.left_ns, __ATOMIC_RELAXED);
    if (left == NOT_COUNTED)
        return true;
    int64_t known = gs_queue_known_ns(alone.queue, key);
    return known && known <= left && __atomic_fetch_sub(&alone.left_ns, known, __ATOMIC_RELAXED) >= known;
}

/* Whether no neighbour has wanted the card for a while, and none that begins now takes itself to be alone: what this container
 * launched last was published. The card must have kept up with what went untimed before: nothing timed is in flight behind it
 * any more, and there was time for it on all streams, if it took what was expected. */
static bool may_be_alone(const struct card_state *state, uint64_t now_ns)
{
    bool published = now_ns - alone.timed_ns < PUBLISHED_FOR_NS, kept_up = now_ns + ALONE_FOR_NS >= alone.until_ns + UNTIMED_NS;
    return kept_up && !state->queue.count && (!state->beside.count || (published && gs_all_rest(&state->beside, now_ns)));
}

/* Whether launches need not be timed for a while: all unused compute is lent to this container, and no other wants any.
 * `coarse_ns`: from before the neighbours' claims were read. */
static bool is_alone(struct card_state *state, uint64_t coarse_ns, uint64_t now_ns)
{
    if (!all_lend || shared_cards != 1 || !*state->neighbours.folder || !may_be_alone(state, now_ns))
        return false;
    if (state->beside.read_ns != now_ns)
        read_neighbours(state, now_ns, false);
    if (!may_be_alone(state, now_ns))
        return false;
    alone.timed_ns = 0;
    __atomic_store_n(&alone.left_ns, state->beside.count ? UNTIMED_NS : NOT_COUNTED, __ATOMIC_RELAXED);
    __atomic_store_n(&alone.until_ns, coarse_ns + ALONE_FOR_NS, __ATOMIC_RELEASE);
    return true;
}

bool gs_throttles(void) { return shared_cards != 0; }

static void settle_awaited(struct card_state *state, uint64_t now)
{
    settle(state);
    if (!state->queue.count)
        return; /* the program waited for nothing */
    state->queue.awaited_ns = now;
    if (!state->beside.count)
        return;
    bool launches_soon = gs_pauses_briefly(&state->queue) && now - state->looked_ns < SOON_TOLD_NS;
    state->queue.ended_ns = now;
    if (launches_soon && state->queue.next_cleared && has_ended(state, now))
        hide_in_flight(state);
    else
        settle(state);
    if (!launches_soon)
        tell_neighbours(state, now, false);
}

void gs_throttle_awaited(void)
{
    if (!gs_throttles() || gs_is_alone())
        return;
    GS_GUARD(&lock);
    uint64_t now = gs_monotonic_ns(); /* under the lock, as at a launch */
    for (uint32_t i = 0; i < GPUSLICE_CARDS; i++)
        if (states[i].card)
            settle_awaited(&states[i], now);
}

void gs_work_begin(struct gs_work *work)
{
    if (!is_throttled(work->place.card) || is_capturing(&work->stream))
        return;
    uint64_t coarse = gs_accounts_look(&gs_accounts);
    struct card_state *state = &states[work->place.card->index];
    if (!__atomic_load_n(&state->launched, __ATOMIC_ACQUIRE)) {
        gs_throttle_meet(work->place.card);
        gs_samples_begin(work->place.card);
        __atomic_store_n(&state->launched, true, __ATOMIC_RELEASE);
    }
    GS_GUARD(&lock);
    uint64_t now = gs_monotonic_ns(); /* under the lock: not before what other threads have seen */
    bool cleared = gs_queue_is_cleared(&state->queue, work->key, now);
    if (!cleared)
        look(state, now, false);
    if (cleared || !is_alone(state, coarse, now) || !gs_goes_untimed(work->key)) {
        if (!cleared)
            now = wait_for_turn(state, work, now);
        note_launch(state, work, now);
    }
}

void gs_work_end(const struct gs_work *work, bool launched)
{
    if (!work->batch)
        return;
    struct card_state *state = &states[work->place.card->index];
    GS_GUARD(&lock);
    gs_queue_end(work->batch, &events, launched);
    if (state->queue.ended_ns) {
        settle(state);
        tell_neighbours(state, gs_monotonic_ns(), false);
    }
    if (state->beside.count && gs_queue_is_alone(&state->queue, work->batch)) {
        struct gs_contention met = contention(state, gs_monotonic_ns(), 0);
        gs_queue_clear_next(&state->queue, gs_region_card(state->card), &state->share, &met, &work->stream, work->key);
    }
}

/* ---- destroyed streams and contexts ---- */

void gs_throttle_stream_ends(CUstream stream)
{
    GS_GUARD(&lock);
    for (uint32_t i = 0; i < GPUSLICE_CARDS; i++)
        if (states[i].queue.count)
            gs_queue_stream_ends(&states[i].queue, &events, stream);
}

void gs_throttle_context_ends(CUcontext context)
{
    if (!gs_throttles())
        return;
    GS_GUARD(&lock);
    uint64_t now = gs_monotonic_ns();
    for (uint32_t i = 0; i < GPUSLICE_CARDS; i++)
        if (states[i].queue.count) {
            settle(&states[i]);
            account(&states[i], now, true, true);
            gs_queue_context_ends(&states[i].queue, context);
        }
}

void gs_throttle_context_ended(CUcontext context, bool gone)
{
    if (!gs_throttles())
        return;
    GS_GUARD(&lock);
    uint64_t now = gs_monotonic_ns();
    for (uint32_t i = 0; i < GPUSLICE_CARDS; i++)
        if (states[i].card)
            gs_queue_context_ended(&states[i].queue, context, gone, now);
}
