/* Launches wait while their container has used up its share; what share.c says is done here: timing work by the
 * driver's events, asking NVML, sleeping.
 *
 * A share is a cap, and one for all processes of the container: the account is in the region. Nothing runs in the
 * background; whoever launches or waits does the accounts.
 */
#include "policy/throttle.h"

#include <string.h>

#include "system/os.h"
#include "policy/samples.h"
#include "policy/share.h"
#include "accounts/slots.h"

#define SECOND_NS 1000000000
#define MOST_IN_FLIGHT_NS (SECOND_NS * UINT64_C(60))
#define BATCHES 64
#define BATCH_LAUNCHES 16
#define BATCH_NS 1000000u    /* work that takes longer is timed by itself */
#define DENSE_NS 20000u      /* launches closer than this are timed together */
#define LOOK_EVERY_NS 50000u /* at the oldest batch */
#define SWEEP_EVERY_NS UINT64_C(100000000)
#define STALLED_NS (UINT64_C(2) * SECOND_NS)
#define FIRST_GUESS_NS 1000000u /* of work of which none has finished yet: one such goes at a time */
#define KEYS 1024u
#define FIRST_UNDER_WAY 1u
enum { CUDA_ERROR_NOT_READY = 600 };

/* Launches timed together: from before the first to behind the last. */
struct batch {
    CUcontext context;
    CUevent start, end;
    CUstream stream;
    struct {
        uint32_t key;
        uint32_t estimate_ns;
    } launched[BATCH_LAUNCHES];
    uint32_t launches;
    uint32_t begun; /* of them not with the driver yet: nothing can be said of the batch before */
    uint64_t estimate_ns; /* as it stands in the region for all of them */
    uint64_t last_ns;     /* host time of the last launch */
    bool own_stream, open;
    bool fresh; /* `end` stands right behind the last launch */
    bool late;  /* it was put there only when something else came up */
};

/* This process's work on one card. */
struct line {
    struct gs_card *card;
    struct batch batches[BATCHES]; /* a ring: [oldest, oldest + count) are under way */
    uint32_t oldest, count;
    uint64_t looked_ns;
    uint64_t settled_ns; /* busy time since this process last saw a sample */
    struct gs_share_past past;
    uint64_t worked_at_ns; /* the last time that it had work under way */
    uint32_t average_ns[KEYS]; /* own time of a launch, by key; 0 unknown */
    CUevent covered; /* busy time up to here is charged: work on several streams at once is busy once */
    CUcontext covered_context;
};

bool gs_launch_freely;
static bool shares_exist;
static struct gs_lock lock;
static struct line lines[GPUSLICE_CARDS];

void gs_throttle_start(const struct gs_card *cards, uint32_t card_count)
{
    for (uint32_t i = 0; i < card_count; i++)
        shares_exist |= cards[i].share_percent > 0 && cards[i].share_percent < 100;
}

void gs_throttle_forget(void)
{
    lock = (struct gs_lock){0};
    gs_samples_forget();
    for (uint32_t i = 0; i < GPUSLICE_CARDS; i++)
        if (lines[i].card) /* else never touched: no need for its memory */
            memset(&lines[i], 0, sizeof lines[i]);
}

/* ---- the account, in the region ---- */

static struct gpuslice_card *entry_of(const struct gs_card *card)
{
    return &gs_accounts_at(&gs_accounts).region->cards[card->index];
}

static uint64_t in_flight_ns(const struct gs_card *card)
{
    struct gs_attachment at = gs_accounts_at(&gs_accounts);
    uint64_t sum = 0, high = gs_slots_high(at.region, at.slot);
    for (uint64_t i = 0; i < high; i++) {
        const struct gpuslice_slot *slot = &at.region->slots[i];
        uint64_t part = atomic_load_explicit(&slot->usage[card->index].in_flight_ns, memory_order_relaxed);
        sum += part && part < MOST_IN_FLIGHT_NS && atomic_load(&slot->owner) ? part : 0;
    }
    return sum;
}

static void change_in_flight(const struct gs_card *card, int64_t by)
{
    struct gpuslice_slot *slot = gs_accounts_at(&gs_accounts).slot;
    if (!slot)
        return;
    _Atomic uint64_t *word = &slot->usage[card->index].in_flight_ns;
    uint64_t before = atomic_load(word);
    while (!atomic_compare_exchange_weak(word, &before, by < 0 && before < (uint64_t)-by ? 0 : before + (uint64_t)by))
        ;
}

/* ---- batches, under the lock ---- */

static int record(CUevent event, CUstream stream, bool own_stream)
{
    return own_stream ? DRIVER(cuEventRecord_ptsz)(event, stream) : DRIVER(cuEventRecord)(event, stream);
}

static void close_batch(struct batch *batch)
{
    if (batch->open && !batch->fresh) {
        record(batch->end, batch->stream, batch->own_stream);
        batch->late = true;
    }
    batch->open = false;
}

static uint32_t clipped_ns(double ns) { return ns < FIRST_UNDER_WAY + 1 ? FIRST_UNDER_WAY + 1 : ns > 4e9 ? UINT32_MAX : (uint32_t)ns; }

static void settle(struct line *line, const struct batch *batch, uint64_t busy_ns)
{
    uint64_t now_ns = gs_monotonic_ns(), own = gs_share_charge(entry_of(line->card), now_ns, busy_ns);
    change_in_flight(line->card, -(int64_t)batch->estimate_ns);
    line->settled_ns += busy_ns;
    line->worked_at_ns = now_ns;
    for (uint32_t i = 0; i < batch->launches; i++) {
        uint32_t *average = &line->average_ns[batch->launched[i].key];
        double now = (double)own * batch->launched[i].estimate_ns / (double)batch->estimate_ns;
        *average = clipped_ns(*average > FIRST_UNDER_WAY ? *average * 0.9 + now * 0.1 : now);
    }
}

/* Between two events; 0 where the driver cannot tell. */
static bool elapsed_ns(CUevent from, CUevent to, uint64_t *ns)
{
    float milliseconds = 0;
    if (DRIVER(cuEventElapsedTime)(&milliseconds, from, to) != CUDA_SUCCESS)
        return false;
    *ns = milliseconds > 0 ? (uint64_t)((double)milliseconds * 1e6) : 0;
    return true;
}

/* The batch's own events cover its time from now on; those that did before serve the next batch in its place. */
static void cover(struct line *line, struct batch *batch)
{
    CUevent before = line->covered_context == batch->context ? line->covered : NULL;
    line->covered = batch->end;
    line->covered_context = batch->context;
    batch->end = before;
}

/* A burst's last batch may be closed long after its work was done: then no more is believed than some multiple of
 * what was expected, and it covers nothing. */
static uint64_t busy_ns_of(struct line *line, struct batch *batch, uint64_t took_ns)
{
    uint64_t since = took_ns, most = batch->estimate_ns * 4;
    if (line->covered && line->covered_context == batch->context && elapsed_ns(line->covered, batch->end, &since) &&
        since < took_ns)
        took_ns = since;
    if (batch->late && took_ns > most)
        return most;
    if (took_ns)
        cover(line, batch);
    return took_ns;
}

/* False while it is under way. */
static bool finish(struct line *line, struct batch *batch)
{
    uint64_t took = 0;
    if (batch->begun)
        return false;
    close_batch(batch);
    int state = DRIVER(cuEventQuery)(batch->end);
    if (state == CUDA_ERROR_NOT_READY)
        return false;
    if (state == CUDA_SUCCESS && elapsed_ns(batch->start, batch->end, &took))
        settle(line, batch, busy_ns_of(line, batch, took));
    else /* its context is gone */
        settle(line, batch, batch->estimate_ns);
    return true;
}

static void look(struct line *line, uint64_t now_ns)
{
    line->looked_ns = now_ns;
    while (line->count && finish(line, &line->batches[line->oldest])) {
        line->oldest = (line->oldest + 1) % BATCHES;
        __atomic_store_n(&line->count, line->count - 1, __ATOMIC_RELAXED);
    }
}

static bool has_event(CUevent *event) { return *event || DRIVER(cuEventCreate)(event, 0) == CUDA_SUCCESS; }

static bool prepare(struct batch *batch, const struct gs_work *work)
{
    if (batch->context != work->place.context)
        batch->start = batch->end = NULL; /* those of a destroyed context went with it */
    batch->context = work->place.context;
    return has_event(&batch->start) && has_event(&batch->end);
}

static bool is_full(const struct batch *batch)
{
    return batch->launches >= BATCH_LAUNCHES || batch->estimate_ns >= BATCH_NS;
}

static bool continues(const struct batch *batch, const struct gs_work *work, uint64_t now_ns)
{
    return batch->open && batch->stream == work->stream && batch->context == work->place.context &&
           !is_full(batch) && now_ns - batch->last_ns < DENSE_NS;
}

static struct batch *newest_of(struct line *line)
{
    return line->count ? &line->batches[(line->oldest + line->count - 1) % BATCHES] : NULL;
}

/* What comes now is not its work: other work, or none for a while. */
static void close_newest(struct line *line)
{
    struct batch *newest = newest_of(line);
    if (newest && !newest->begun)
        close_batch(newest);
}

/* Room in a batch for one more launch: the current one's or a new one's. NULL: this launch goes untimed. */
static struct batch *open_batch(struct line *line, const struct gs_work *work, uint64_t now_ns)
{
    struct batch *newest = newest_of(line);
    if (newest && continues(newest, work, now_ns))
        return newest;
    close_newest(line);
    if (line->count == BATCHES)
        return NULL;
    struct batch *batch = &line->batches[(line->oldest + line->count) % BATCHES];
    if (!prepare(batch, work) || record(batch->start, work->stream, work->own_stream) != CUDA_SUCCESS)
        return NULL;
    *batch = (struct batch){.context = batch->context, .start = batch->start, .end = batch->end,
                            .stream = work->stream, .own_stream = work->own_stream};
    __atomic_store_n(&line->count, line->count + 1, __ATOMIC_RELAXED);
    return batch;
}

/* ---- what NVML knows ---- */

static struct gs_doings doings_of(const struct line *line, uint64_t now_ns)
{
    gs_lock(&lock);
    bool idle = !line->count && line->worked_at_ns && now_ns > line->worked_at_ns;
    struct gs_doings doings = {line->settled_ns, idle ? now_ns - line->worked_at_ns : 0};
    gs_unlock(&lock);
    return doings;
}

static void learn(struct line *line, const struct gs_card *card, uint64_t now_ns)
{
    struct gs_share_sample sample;
    enum gs_share_ask how = gs_share_ask(entry_of(card), now_ns, gs_realtime_us());
    if (how == GS_SHARE_NOT_NOW)
        return;
    struct gs_doings doings = doings_of(line, now_ns);
    if (!gs_sample(card, &doings, how == GS_SHARE_ASK, &sample))
        return;
    uint64_t in_flight = in_flight_ns(card), age_us = gs_realtime_us() - sample.until_us;
    uint64_t until_ns = gs_monotonic_ns() - age_us * 1000;
    gs_lock(&lock);
    line->settled_ns = 0;
    gs_share_learn(entry_of(card), card->share_percent, now_ns, in_flight, &line->past, &sample, until_ns, how);
    gs_unlock(&lock);
}

/* ---- launching ---- */

static void look_locked(struct line *line, const struct gs_card *card, uint64_t now_ns, uint64_t every_ns)
{
    gs_lock(&lock);
    if (now_ns - line->looked_ns >= every_ns) {
        int mode = gs_relax_capture();
        look(line, now_ns);
        gs_restore_capture(mode);
        gs_share_note(&line->past, entry_of(card), now_ns);
    }
    gs_unlock(&lock);
}

static void pause_launching(struct line *line)
{
    gs_lock(&lock);
    int mode = gs_relax_capture();
    close_newest(line);
    gs_restore_capture(mode);
    gs_unlock(&lock);
}

/* Work may wait on the card for work that is not launched yet: when nothing has finished for long, one more goes. */
struct progress {
    uint64_t charged_ns, since_ns;
};

static bool is_stalled(const struct gs_card *card, struct progress *progress, uint64_t now_ns)
{
    uint64_t charged = atomic_load(&entry_of(card)->charged_ns);
    if (charged != progress->charged_ns)
        *progress = (struct progress){charged, now_ns};
    return now_ns - progress->since_ns > STALLED_NS && in_flight_ns(card) > 0;
}

/* What is under way and not timed would be free: so much of it at most that all can be timed. And of what nobody knows
 * how long it takes, one at a time. */
static bool may_launch(const struct line *line, uint64_t key, int64_t headroom)
{
    return headroom > 0 && __atomic_load_n(&line->count, __ATOMIC_RELAXED) < BATCHES &&
           __atomic_load_n(&line->average_ns[key], __ATOMIC_RELAXED) != FIRST_UNDER_WAY;
}

static int64_t headroom_ns(const struct gs_card *card, uint64_t now_ns)
{
    return gs_share_headroom(entry_of(card), card->share_percent, now_ns, in_flight_ns(card));
}

static void wait_for_credit(struct line *line, const struct gs_card *card, uint64_t key)
{
    uint64_t now = gs_monotonic_ns(), swept = now;
    struct progress progress = {atomic_load(&entry_of(card)->charged_ns), now};
    int64_t headroom;
    look_locked(line, card, now, LOOK_EVERY_NS);
    if (gs_share_is_divided(entry_of(card)))
        learn(line, card, now);
    while (!may_launch(line, key, headroom = headroom_ns(card, now)) && !is_stalled(card, &progress, now)) {
        pause_launching(line);
        gs_sleep_ns(gs_share_wait_ns(card->share_percent, headroom));
        uint64_t woken = gs_monotonic_ns();
        atomic_fetch_add(&entry_of(card)->throttled_ns, woken - now);
        now = woken;
        look_locked(line, card, now, 0);
        learn(line, card, now);
        if (now - swept >= SWEEP_EVERY_NS) { /* one that died with work under way counts for it until it is found */
            swept = now;
            gs_accounts_sweep(&gs_accounts);
        }
    }
}

static bool is_capturing(const struct gs_work *work)
{
    int status = 0;
    int result = work->own_stream ? DRIVER(cuStreamIsCapturing_ptsz)(work->stream, &status)
                                  : DRIVER(cuStreamIsCapturing)(work->stream, &status);
    return result != CUDA_ERROR_NOT_FOUND && (result != CUDA_SUCCESS || status != 0);
}

static bool is_throttled(const struct gs_card *card)
{
    return card && card->index < GPUSLICE_CARDS && gs_accounts_at(&gs_accounts).region && card->share_percent && card->share_percent < 100;
}

static void add_launch(struct batch *batch, struct gs_work *work, uint64_t now_ns, uint32_t estimate_ns)
{
    batch->launched[batch->launches].key = (uint32_t)work->key;
    batch->launched[batch->launches].estimate_ns = estimate_ns;
    batch->open = true;
    batch->fresh = false;
    batch->launches++;
    batch->begun++;
    batch->last_ns = now_ns;
    batch->estimate_ns += estimate_ns;
    work->batch = batch;
    change_in_flight(work->place.card, (int64_t)estimate_ns);
}

/* What cannot be timed, because it goes regardless or there are no events to be had, costs what such work took before. */
static void note_launch(struct line *line, struct gs_work *work)
{
    uint64_t now = gs_monotonic_ns();
    gs_lock(&lock);
    line->card = work->place.card;
    uint32_t *average = &line->average_ns[work->key];
    uint32_t estimate = *average > FIRST_UNDER_WAY ? *average : FIRST_GUESS_NS;
    struct batch *batch = open_batch(line, work, now);
    if (batch && !*average)
        __atomic_store_n(average, FIRST_UNDER_WAY, __ATOMIC_RELAXED);
    if (batch)
        add_launch(batch, work, now, estimate);
    else
        gs_share_spend(entry_of(work->place.card), estimate);
    gs_unlock(&lock);
}

struct gs_work gs_work_begin(CUstream stream, bool own_stream, uint64_t key)
{
    struct gs_work work = {.stream = stream, .key = key % KEYS, .own_stream = own_stream};
    bool active = gs_enter_cuda();
    if (!active || !shares_exist) {
        __atomic_store_n(&gs_launch_freely, true, __ATOMIC_RELAXED);
        return work;
    }
    work.place = gs_stream_place(stream);
    if (!is_throttled(work.place.card) || is_capturing(&work)) {
        work.place.card = NULL;
        return work;
    }
    gs_accounts_look(&gs_accounts);
    struct line *line = &lines[work.place.card->index];
    if (!line->card)
        gs_samples_begin(work.place.card);
    wait_for_credit(line, work.place.card, work.key);
    note_launch(line, &work);
    return work;
}

/* Launches that come one by one are timed one by one, so that the pauses between them are not charged. */
void gs_work_end(const struct gs_work *work, bool launched)
{
    struct batch *batch = work->batch;
    if (!batch)
        return;
    gs_lock(&lock);
    batch->begun -= batch->begun > 0;
    if (launched && batch->open && !batch->begun && (batch->launches == 1 || is_full(batch)))
        batch->fresh = record(batch->end, batch->stream, batch->own_stream) == CUDA_SUCCESS;
    gs_unlock(&lock);
}
