/* Work is timed in batches, each on one stream. Batches finish in any order: nothing waits for another stream's kernel.
 * The process is busy while the oldest batch of any stream runs, and is charged as time passes: thus long work is
 * charged in full before it ends. */
#include "policy/card_queue.h"

#include <stddef.h>

#define BATCH_NS 1000000u       /* longer work is timed by itself */
#define DENSE_NS 20000u         /* launches at shorter intervals are timed together */
#define FIRST_GUESS_NS 1000000u /* for work of unknown duration */
#define LEAST_WAIT_NS 50000u
#define MOST_WAIT_NS 1000000u
#define PROMPT_NS 50000u          /* a launch this soon after the last work follows it at once */
#define SHORTEST_WAIT_NS 10000u   /* if it is known when the card will be free */
#define PAUSE_NS 250000u          /* a shorter gap does not end a run of work: host times are not that precise */
#define WAITS_FOR_TURN_NS 200000u /* no driver takes this long to begin work that nothing precedes */
#define MOST_WAITED 8u
#define TURNS_KNOWN_FOR_NS UINT64_C(10000000000)
#define CHARGED_AT_ITS_END_NS 10000000u /* shorter work is charged when events have measured it, longer work while it runs */
/* With neighbours: how much a container may have in flight, and by how much it may be ahead. */
#define DEPTH_NS 6000000u
#define DEPTH_BESIDE_INTERACTIVE_NS 2000000u
#define LEAD_NS 8000000      /* longer turns lose less of the card to process switches */
#define HAND_OVER_NS 100000u /* the next may launch this long before a turn's last work ends: the card must not idle */
#define PATIENCE_NS INT64_C(3000000000) /* a container that is owed more waits for no neighbour that claims to work */
#define SHORT_BESIDE 4                  /* a launch adds nothing beside a kernel that still runs this many times as long */
/* Work on one stream may wait on the card for work on another that is not launched yet. */
#define UNKNOWN_WAIT_NS UINT64_C(20000000) /* how long an unknown launch waits behind unknown ones on other streams */
#define STALLED_NS UINT64_C(50000000)      /* nothing has finished for this long, nor for twice the expected time */
#define HELD_UP_NS UINT64_C(200000000)
#define STALLED_ELSEWHERE_NS UINT64_C(2000000000) /* in another process of the container */

static uint16_t key_of(uint64_t key) { return (uint16_t)((key >> 32) % GS_KEYS); }
static uint16_t function_of(uint64_t key) { return (uint16_t)((uint32_t)key % GS_KEYS); }

static uint64_t greater(uint64_t one, uint64_t other) { return one > other ? one : other; }
static uint64_t lesser(uint64_t one, uint64_t other) { return one < other ? one : other; }

#define FOR_EACH_BATCH(queue, batch)                                                                                           \
    for (struct gs_batch *batch = (struct gs_batch *)(queue)->batches; batch < (queue)->batches + GS_BATCHES; batch++)         \
        if (batch->taken)

/* ---- estimates ---- */

uint32_t gs_queue_known_ns(const struct gs_queue *queue, uint64_t key)
{
    uint32_t average = __atomic_load_n(&queue->average_ns[key_of(key)], __ATOMIC_RELAXED);
    return average ? average : __atomic_load_n(&queue->function_ns[function_of(key)], __ATOMIC_RELAXED);
}

uint64_t gs_queue_estimate_ns(const struct gs_queue *queue, uint64_t key)
{
    uint32_t known = gs_queue_known_ns(queue, key);
    return known ? known : FIRST_GUESS_NS;
}

static void learn(uint32_t *average, double ns, double weight)
{
    double now = *average ? *average * (1 - weight) + ns * weight : ns;
    __atomic_store_n(average, now < 1 ? 1 : now > 4e9 ? UINT32_MAX : (uint32_t)now, __ATOMIC_RELAXED);
}

/* ---- launching ---- */

static bool is_same(const struct gs_stream *one, const struct gs_stream *other)
{
    return one->handle == other->handle && one->context == other->context && one->thread == other->thread;
}

/* The last batch on the stream: nothing follows it. */
static struct gs_batch *newest_on(const struct gs_queue *queue, const struct gs_stream *stream)
{
    struct gs_batch *newest = NULL;
    uint32_t unseen = queue->count;
    for (struct gs_batch *batch = (struct gs_batch *)queue->batches; unseen; batch++) {
        unseen -= batch->taken;
        if (batch->taken && is_same(&batch->stream, stream) && (!newest || batch->number > newest->number))
            newest = batch;
    }
    return newest;
}

static bool is_pending(const struct gs_batch *batch, const struct gs_events *events, void *event)
{
    return batch->ending || events->is_pending(event);
}

static void close_batch(struct gs_batch *batch, const struct gs_events *events)
{
    if (batch->open && !batch->fresh) {
        batch->late = !batch->stream.thread && !batch->ending && events->record_late(batch->end, &batch->stream);
        batch->unmarked = !batch->late;
    }
    batch->open = false;
}

static bool is_full(const struct gs_batch *batch)
{
    return batch->launches >= GS_BATCH_LAUNCHES || batch->estimate_ns >= BATCH_NS;
}

static struct gs_batch *free_batch(struct gs_queue *queue)
{
    for (uint32_t i = 0; i < GS_BATCHES; i++)
        if (!queue->batches[i].taken)
            return &queue->batches[i];
    return NULL;
}

static struct gs_batch *new_batch(struct gs_queue *queue, const struct gs_events *events, const struct gs_stream *stream,
                                  struct gs_batch *before, uint64_t now_ns)
{
    struct gs_batch *batch = free_batch(queue);
    if (!batch)
        return NULL;
    bool same = batch->stream.context == stream->context; /* a destroyed context takes its events along */
    void *start = same && batch->start ? batch->start : events->create(stream);
    void *end = same && batch->end ? batch->end : events->create(stream);
    *batch = (struct gs_batch){.stream = *stream,
                               .start = start,
                               .end = end,
                               .recorded_ns = now_ns,
                               .number = ++queue->batches_ever,
                               .behind = before ? 1 + (uint32_t)(before - queue->batches) : 0,
                               .ahead_ns = before ? before->ahead_ns + before->in_flight_ns : 0};
    if (!start || !end || !events->record(start, stream))
        return NULL;
    batch->taken = true;
    batch->others_ns = queue->others_ns;
    queue->count++;
    return batch;
}

static void note_pause(struct gs_queue *queue, uint64_t ns)
{
    queue->pause_ns = (3 * queue->pause_ns + lesser(ns, GS_LONGEST_PAUSE_NS)) / 4;
}

void gs_queue_arrive(struct gs_queue *queue, uint64_t now_ns)
{
    /* Work that ran after a neighbour's turn ends later than events can show; a program that waited for it knows
     * when. */
    uint64_t idle_since_ns = greater(queue->covered_ns, queue->awaited_ns);
    if (queue->count || !idle_since_ns || now_ns < idle_since_ns)
        return;
    note_pause(queue, now_ns - idle_since_ns);
}

struct gs_batch *gs_queue_begin(struct gs_queue *queue, const struct gs_events *events, const struct gs_stream *stream,
                                uint64_t key, uint64_t now_ns)
{
    struct gs_batch *batch = newest_on(queue, stream);
    bool unknown = !gs_queue_known_ns(queue, key);
    uint64_t estimate = gs_queue_estimate_ns(queue, key);
    bool dense = batch && now_ns - batch->last_ns < DENSE_NS && queue->awaited_ns < batch->last_ns;
    if (!dense || !batch->open || is_full(batch) || unknown) {
        if (batch && !batch->begun)
            close_batch(batch, events);
        batch = new_batch(queue, events, stream, batch, now_ns);
    }
    if (!batch)
        return NULL;
    batch->launched[batch->launches].key = key_of(key);
    batch->launched[batch->launches].function = function_of(key);
    batch->launched[batch->launches++].estimate_ns = (uint32_t)estimate;
    batch->open = !unknown;
    batch->fresh = batch->unmarked = false;
    batch->begun++;
    batch->last_ns = now_ns;
    batch->estimate_ns += estimate;
    batch->in_flight_ns += estimate;
    queue->in_flight_ns = greater(queue->in_flight_ns, batch->ahead_ns + batch->in_flight_ns);
    queue->unknown += unknown;
    batch->unknown = unknown;
    return batch;
}

/* Launches that come one by one are timed one by one, so that the pauses between them are not charged. On a thread's
 * own default stream no other thread could record the end later. */
void gs_queue_end(struct gs_batch *batch, const struct gs_events *events, bool launched)
{
    batch->begun -= batch->begun > 0;
    bool ends = batch->launches == 1 || is_full(batch) || batch->unknown || !launched || batch->stream.thread;
    if (batch->begun || !ends || batch->gone)
        return;
    batch->fresh = events->record(batch->end, &batch->stream);
    batch->unmarked = !batch->fresh;
}

/* ---- finishing ---- */

struct interval {
    uint64_t from_ns, to_ns;
    double part; /* of it that no neighbour had */
};

/* Streams run side by side: what one of them waits for another is part of the times that events measured. `followed`: one
 * bit for each batch that is not the last on its stream. */
static void find_longest_stream(struct gs_queue *queue, uint64_t followed)
{
    _Static_assert(GS_BATCHES <= 64, "a bit for each batch");
    queue->in_flight_ns = 0;
    if (!queue->count)
        return;
    FOR_EACH_BATCH(queue, batch) {
        if (followed >> (batch - queue->batches) & 1)
            continue;
        batch->ahead_ns = 0;
        for (const struct gs_batch *front = batch; front->behind; batch->ahead_ns += front->in_flight_ns)
            front = &queue->batches[front->behind - 1];
        queue->in_flight_ns = greater(queue->in_flight_ns, batch->ahead_ns + batch->in_flight_ns);
    }
}

static void take_out(struct gs_queue *queue, struct gs_batch *batch, uint64_t ended_ns, uint64_t now_ns)
{
    uint32_t number = 1 + (uint32_t)(batch - queue->batches);
    queue->unknown -= batch->unknown;
    batch->taken = false;
    queue->count--;
    queue->finished_ns = now_ns;
    FOR_EACH_BATCH(queue, next)
        if (next->behind == number) {
            next->behind = 0;
            next->ready_ns = ended_ns;
            next->others_ns = queue->others_ns;
        }
}

static uint64_t began_ns(const struct gs_batch *batch)
{
    return greater(greater(batch->recorded_ns, batch->ready_ns), batch->waited_ns);
}

/* When the batch began and ended: events give its duration, and queries show when it was still unfinished and when it
 * no longer was. */
static struct interval place(const struct gs_batch *batch, uint64_t took_ns, uint64_t now_ns)
{
    uint64_t end = began_ns(batch) + took_ns;
    end = lesser(greater(end, batch->unfinished_ns), now_ns);
    return (struct interval){end - lesser(took_ns, end), end, 1};
}

/* The process's own part of a run of work that lasts `run_ns`. */
static uint64_t own_ns(struct gs_own_part part, uint64_t run_ns)
{
    uint64_t whole = lesser(run_ns, part.turn_ns);
    return whole + (uint64_t)((double)(run_ns - whole) * part.part);
}

/* A batch whose end was recorded late may have ended long before: it is believed to have taken at most a quarter more
 * than expected. */
static uint64_t believed(const struct gs_batch *batch, uint64_t took_ns, struct gs_own_part part)
{
    double most = (double)batch->estimate_ns * 1.25 / (part.part > 0.01 ? part.part : 0.01);
    return batch->late && (double)took_ns > most ? (uint64_t)most : took_ns;
}

static uint64_t ready_ns(const struct gs_batch *batch) { return greater(batch->recorded_ns, batch->ready_ns); }

/* What is left of the run's first turn when the batch begins. */
static uint64_t turn_left_ns(const struct gs_queue *queue, const struct gs_batch *batch, uint64_t turn_ns)
{
    uint64_t ready = ready_ns(batch), covered = queue->covered_ns;
    bool goes_on = batch->ready_ns >= batch->recorded_ns || ready < covered + PAUSE_NS;
    uint64_t ran = goes_on ? queue->run_ns + (ready > covered ? ready - covered : 0) : 0;
    return turn_ns > ran ? turn_ns - ran : 0;
}

/* How long neighbours worked while this batch ran. They may have worked at any time since it could have begun; the time
 * in which it still waited for the card does not count. If the program waited for it, it ended now; otherwise it is
 * unknown how long ago it ended. */
static double beside_ns(const struct gs_queue *queue, const struct gs_batch *batch, uint64_t took_ns, uint64_t now_ns)
{
    uint64_t others = queue->others_ns - batch->others_ns, since = now_ns - lesser(ready_ns(batch), now_ns);
    uint64_t outside = since > took_ns ? since - took_ns : 0;
    if (queue->awaited_ns == now_ns)
        return others > outside ? (double)(others - outside) : 0;
    return (double)others * (double)took_ns / ((double)(took_ns + outside) + 1);
}

/* The batch's own part if the neighbours had their turns in between, as evenly as the card gives them, but none in its
 * own first turn. */
static double even_part(const struct gs_queue *queue, const struct gs_batch *batch, uint64_t took_ns, uint64_t now_ns,
                        struct gs_own_part part)
{
    double whole = (double)lesser(took_ns, turn_left_ns(queue, batch, part.turn_ns)), divided = (double)took_ns - whole;
    double beside = beside_ns(queue, batch, took_ns, now_ns) - whole;
    return (whole + divided * divided / (divided + (beside > 0 ? beside : 0) + 1)) / ((double)took_ns + 1);
}

/* The same, but no less than the work is known to take. */
static double part_of(const struct gs_batch *batch, uint64_t took_ns, double even)
{
    double known = (double)batch->estimate_ns / ((double)took_ns + 1);
    return batch->unknown || even > known ? even : known < 1 ? known : 1;
}

/* Whether no other batch was launched by then. */
static bool is_only(const struct gs_queue *queue, const struct gs_batch *batch, uint64_t at_ns)
{
    FOR_EACH_BATCH(queue, other)
        if (other != batch && other->recorded_ns <= at_ns)
            return false;
    return true;
}

/* A program that waited for its only work knows when that ended, and so how late it began. A single late start may mean
 * that the thread woke up late; frequent ones mean that others had the card. */
static void notice_turns(struct gs_queue *queue, const struct gs_batch *batch, uint64_t took_ns, uint64_t now_ns)
{
    if (queue->awaited_ns != now_ns || queue->others_ns == batch->others_ns || !is_only(queue, batch, now_ns))
        return;
    bool waited = now_ns > ready_ns(batch) + took_ns + WAITS_FOR_TURN_NS;
    if (waited && queue->waited < MOST_WAITED)
        queue->waited++;
    if (!waited && queue->waited)
        queue->waited--;
    if (queue->waited > MOST_WAITED / 2)
        queue->turned_ns = now_ns;
}

static bool finish(struct gs_queue *queue, struct gs_batch *batch, const struct gs_events *events, uint64_t now_ns,
                   struct gs_own_part part, struct interval *found)
{
    bool marked = !batch->gone && !batch->unmarked;
    uint64_t took = batch->estimate_ns;
    if (marked && is_pending(batch, events, batch->end))
        return false;
    bool timed = marked && events->elapsed(batch->start, batch->end, &took);
    if (batch->gone)
        took = batch->unfinished_ns - lesser(began_ns(batch), batch->unfinished_ns);
    took = believed(batch, took, part);
    if (timed)
        notice_turns(queue, batch, took, now_ns);
    *found = place(batch, took, now_ns);
    found->part = part_of(batch, took, even_part(queue, batch, took, now_ns, part));
    for (uint32_t i = 0; timed && i < batch->launches; i++) {
        double ns = found->part * (double)own_ns(part, took) * batch->launched[i].estimate_ns / (double)batch->estimate_ns;
        learn(&queue->average_ns[batch->launched[i].key], ns, 0.1);
        learn(&queue->function_ns[batch->launched[i].function], ns, 0.5);
    }
    take_out(queue, batch, found->to_ns, now_ns);
    return true;
}

/* A batch that its stream has reached counts as running until it is seen to have ended. Before that it may be waiting
 * for the card during a neighbour's turn. */
static bool is_running(struct gs_queue *queue, struct gs_batch *batch, const struct gs_events *events, uint64_t now_ns)
{
    if (!batch->running && !batch->behind) {
        batch->running = batch->gone || !is_pending(batch, events, batch->start);
        if (!batch->running && now_ns - ready_ns(batch) > WAITS_FOR_TURN_NS)
            queue->turned_ns = now_ns;
        if (!batch->running)
            batch->waited_ns = now_ns;
    }
    return batch->running;
}

/* The time that no earlier interval has covered, and how much of it is the process's own. */
static struct gs_busy cover(struct gs_queue *queue, struct interval *intervals, uint32_t count, struct gs_own_part part)
{
    struct gs_busy busy = {0, 0};
    for (uint32_t i = 1; i < count; i++) /* sorted by their beginnings; there are few */
        for (uint32_t j = i; j > 0 && intervals[j].from_ns < intervals[j - 1].from_ns; j--) {
            struct interval swapped = intervals[j];
            intervals[j] = intervals[j - 1];
            intervals[j - 1] = swapped;
        }
    for (uint32_t i = 0; i < count; i++) {
        uint64_t from = greater(intervals[i].from_ns, queue->covered_ns), to = intervals[i].to_ns;
        if (to <= from)
            continue;
        uint64_t before = from - queue->covered_ns < PAUSE_NS ? queue->run_ns : 0;
        queue->run_ns = before + (to - from);
        queue->covered_ns = to;
        busy.ns += to - from;
        busy.own_ns += (uint64_t)(intervals[i].part * (double)(own_ns(part, queue->run_ns) - own_ns(part, before)));
    }
    return busy;
}

struct gs_busy gs_queue_look(struct gs_queue *queue, const struct gs_events *events, uint64_t now_ns, bool paused,
                             struct gs_own_part part)
{
    struct interval intervals[2 * GS_BATCHES];
    uint32_t count = 0;
    queue->others_ns = part.others_ns;
    if (now_ns - queue->turned_ns > TURNS_KNOWN_FOR_NS) /* processes run concurrently, as far as was seen */
        part.turn_ns = 0;
    for (bool again = queue->count > 0; again;) { /* if one has finished, the next on its stream may have, too */
        again = false;
        FOR_EACH_BATCH(queue, batch) {
            if (batch->recorded_ns > now_ns || batch->behind || batch->begun ||
                (batch->open && !batch->fresh && !paused && now_ns - batch->last_ns < DENSE_NS))
                continue;
            if (batch->unfinished_ns == now_ns)
                continue; /* already queried in this call */
            close_batch(batch, events);
            if (finish(queue, batch, events, now_ns, part, &intervals[count]))
                again = ++count < GS_BATCHES;
            else
                batch->unfinished_ns = now_ns;
        }
    }
    uint64_t last_end_ns = 0, followed = 0;
    for (uint32_t i = 0; i < count; i++)
        last_end_ns = greater(last_end_ns, intervals[i].to_ns);
    FOR_EACH_BATCH(queue, batch) {
        followed |= batch->behind ? UINT64_C(1) << (batch->behind - 1) : 0;
        if (batch->recorded_ns > now_ns || batch->behind || !is_running(queue, batch, events, now_ns))
            continue;
        uint64_t began = began_ns(batch), ran = now_ns > began ? now_ns - began : 0;
        ran = believed(batch, ran, part);
        double even = even_part(queue, batch, ran, now_ns, part);
        uint64_t own = (uint64_t)(even * (double)own_ns(part, ran));
        /* The end of work on another stream covers the time until then: work beside it could not be charged for that
         * time later. */
        uint64_t charged_until = ran > CHARGED_AT_ITS_END_NS ? began + ran : lesser(began + ran, last_end_ns);
        if (charged_until > began)
            intervals[count++] = (struct interval){began, charged_until, even};
        batch->in_flight_ns = batch->estimate_ns > own ? batch->estimate_ns - own : 1;
    }
    find_longest_stream(queue, followed);
    return cover(queue, intervals, count, part);
}

/* When the work in flight could have begun, or covered_ns if that is later: what is before is charged. */
static uint64_t uncharged_since_ns(const struct gs_queue *queue)
{
    uint64_t began = UINT64_MAX;
    FOR_EACH_BATCH(queue, batch)
        if (!batch->behind)
            began = lesser(began, began_ns(batch));
    return greater(began, queue->covered_ns);
}

uint64_t gs_queue_uncharged_ns(const struct gs_queue *queue, uint64_t now_ns)
{
    uint64_t since = uncharged_since_ns(queue);
    return now_ns > since ? now_ns - since : 0;
}

struct gs_run gs_queue_run(const struct gs_queue *queue, uint64_t now_ns)
{
    uint64_t ended = queue->covered_ns, began = ended - queue->run_ns, next = uncharged_since_ns(queue);
    if (!queue->count)
        return gs_queue_ran(queue);
    return (struct gs_run){next - ended < PAUSE_NS ? began : next, now_ns + queue->in_flight_ns};
}

/* ---- destroyed streams and contexts ---- */

/* Another stream may get the same handle. The work that was launched on this one continues, and its events show when it
 * ends. */
void gs_queue_stream_ends(struct gs_queue *queue, const struct gs_events *events, void *handle)
{
    FOR_EACH_BATCH(queue, batch) {
        if (batch->stream.handle != handle || batch->stream.thread)
            continue;
        close_batch(batch, events);
        batch->stream.thread = UINT64_MAX;
    }
}

void gs_queue_context_ends(struct gs_queue *queue, void *context)
{
    FOR_EACH_BATCH(queue, batch)
        batch->ending |= batch->stream.context == context;
}

void gs_queue_context_ended(struct gs_queue *queue, void *context, bool gone, uint64_t now_ns)
{
    for (struct gs_batch *batch = queue->batches; batch < queue->batches + GS_BATCHES; batch++) {
        if (batch->stream.context != context)
            continue;
        batch->ending = false;
        if (!gone)
            continue;
        batch->start = batch->end = NULL; /* destroyed with the context */
        batch->stream = (struct gs_stream){.thread = UINT64_MAX};
        batch->open = false;
        batch->gone = batch->taken;
        batch->unfinished_ns = now_ns;
    }
}

/* ---- may another launch go? ---- */

static bool has_work(const struct gs_queue *queue, const struct gs_stream *stream) { return newest_on(queue, stream) != NULL; }

/* Beside a kernel that is already running and will run for much longer, a short launch takes no further device time.
 * With work of equal length each launch would be an excuse for the next. */
static bool goes_along(const struct gs_queue *queue, const struct gs_stream *stream, uint64_t key)
{
    uint64_t longest = 0, before = 0;
    FOR_EACH_BATCH(queue, batch) {
        if (is_same(&batch->stream, stream))
            before += batch->in_flight_ns;
        else if (batch->running && !batch->unknown)
            longest = greater(longest, batch->in_flight_ns);
    }
    return gs_queue_known_ns(queue, key) && before + gs_queue_estimate_ns(queue, key) <= longest / SHORT_BESIDE;
}

/* Running work may wait for this launch, if the launch is on a stream of its own: nothing has finished for far too
 * long. */
static bool is_awaited(const struct gs_queue *queue, struct gpuslice_card *card, const struct gs_contention *met,
                       const struct gs_stream *stream)
{
    uint64_t expected = 0;
    if (!queue->count) {
        uint64_t finished = atomic_load(&card->finished_at_ns);
        return met->in_flight_ns > 0 && met->waited_ns > STALLED_ELSEWHERE_NS &&
               (met->now_ns < finished || met->now_ns - finished > STALLED_ELSEWHERE_NS);
    }
    FOR_EACH_BATCH(queue, batch)
        expected = greater(expected, batch->estimate_ns);
    uint64_t stalled = greater(STALLED_NS, 2 * expected);
    return met->waited_ns > stalled && met->now_ns - queue->finished_ns > stalled && !has_work(queue, stream);
}

/* None of our work runs, although it could have begun long ago: it waits on the card for something that is not work,
 * such as a host function that returns only when this thread has made all its launches. Without this the process would
 * be deadlocked. */
static bool is_held_up(const struct gs_queue *queue, const struct gs_contention *met)
{
    uint64_t since_ns = UINT64_MAX;
    if (!queue->count || !met->waited_ns)
        return false;
    FOR_EACH_BATCH(queue, batch) {
        if (batch->running)
            return false;
        since_ns = lesser(since_ns, batch->recorded_ns);
    }
    since_ns = greater(since_ns, queue->finished_ns);
    return met->now_ns > since_ns && met->now_ns - since_ns > HELD_UP_NS;
}

/* Only one launch of unknown duration may be in flight at a time in a container, or, after a while, on each stream. */
static bool is_one_unknown_too_many(const struct gs_queue *queue, const struct gs_contention *met,
                                    const struct gs_stream *stream, uint64_t key)
{
    return met->unknown && !gs_queue_known_ns(queue, key) && (has_work(queue, stream) || met->waited_ns < UNKNOWN_WAIT_NS);
}

/* Processes that have work at the same time preempt each other's kernels: it is then unknown whose time it was, and
 * each switch costs the card time. Therefore containers work one after the other: one that has begun continues until it
 * is ahead, also through pauses as short as those between kernels that a program waits for. An interactive container
 * neither waits for a turn nor makes others wait. */
struct turn {
    uint64_t left_ns;  /* until the next may launch, as far as the others have published; 0: nobody is in its turn */
    uint64_t whole_ns; /* until then at least, if they go on launching */
};

static struct turn others_turn(const struct gpuslice_card *card, const struct gs_share *share, const struct gs_contention *met)
{
    struct turn turn = {0, 0};
    for (uint32_t i = 0; i < met->beside->count; i++) {
        const struct gs_neighbour *other = &met->beside->others[i];
        if (!other->ends_ns || other->interactive || other->overdrawn)
            continue;
        int64_t lead = gs_lead_over_ns(card, share, met->in_flight_ns, other); /* our lead, in the other's device time */
        uint64_t hold = gs_hold_ns(other); /* 0: its pauses are so long that the turn passes on */
        uint64_t until = -lead > LEAD_NS || !hold ? other->ends_ns - HAND_OVER_NS : other->ends_ns + hold;
        if (met->now_ns >= until || (met->in_flight_ns && lead <= 0))
            continue;
        turn.left_ns = greater(turn.left_ns, until - met->now_ns);
        turn.whole_ns = greater(turn.whole_ns, -lead < LEAD_NS ? (uint64_t)(LEAD_NS + lead) : 0);
    }
    turn.whole_ns = greater(turn.whole_ns, turn.left_ns);
    return turn;
}

/* How long the neighbours make a launch wait: a container does not have so much in flight that others wait long for the
 * card, does not launch in their turn, and does not get further ahead of those that want the card. */
static uint64_t wait_for_others_ns(struct gpuslice_card *card, const struct gs_share *share, const struct gs_contention *met,
                                   uint64_t estimate_ns, uint64_t *patience)
{
    uint64_t depth = DEPTH_NS, wait = 0;
    for (uint32_t i = 0; i < met->beside->count; i++)
        if (met->beside->others[i].interactive)
            depth = DEPTH_BESIDE_INTERACTIVE_NS;
    if (met->in_flight_ns + estimate_ns > depth && met->in_flight_ns > depth / 2) /* with less, the card could run dry */
        wait = greater(LEAST_WAIT_NS, lesser(met->in_flight_ns, depth + depth / 2) - depth / 2);
    int64_t lead = gs_lead_ns(card, share, met->in_flight_ns, met->beside, met->now_ns, estimate_ns);
    int64_t owed = gs_share_owed_ns(card, share, met->now_ns, met->in_flight_ns, met->waited_ns > 0);
    struct turn turn = {0, 0};
    if (!share->interactive && owed <= PATIENCE_NS)
        turn = others_turn(card, share, met);
    if (lead > LEAD_NS && owed <= 0)
        wait = greater(wait, 2 * LEAST_WAIT_NS);
    if (turn.left_ns) {
        wait = greater(wait, greater(SHORTEST_WAIT_NS, lesser(turn.left_ns, 2 * LEAST_WAIT_NS)));
        *patience = lesser(*patience, turn.whole_ns); /* longer, and the card would be idle until this thread woke up */
    }
    return lesser(wait, MOST_WAIT_NS);
}

uint64_t gs_queue_wait_ns(const struct gs_queue *queue, struct gpuslice_card *card, const struct gs_share *share,
                          const struct gs_contention *met, const struct gs_stream *stream, uint64_t key)
{
    if (is_held_up(queue, met))
        return 0;
    /* Work in flight that is not timed would be free, so no more may be in flight than can be timed. */
    uint64_t patience = lesser(met->waited_ns / 16, MOST_WAIT_NS); /* a thread that waits for long need not look often */
    if (queue->count >= GS_BATCHES || is_one_unknown_too_many(queue, met, stream, key))
        return greater(LEAST_WAIT_NS, patience);
    int64_t headroom = gs_share_headroom(card, share, met->now_ns, met->in_flight_ns, met->waited_ns > 0);
    uint64_t wait = headroom > 0 ? 0 : gs_share_wait_ns(share, headroom);
    if (met->beside->count)
        wait = greater(wait, wait_for_others_ns(card, share, met, gs_queue_estimate_ns(queue, key), &patience));
    if (!wait || goes_along(queue, stream, key) || is_awaited(queue, card, met, stream))
        return 0;
    return greater(wait, patience);
}

/* ---- may the next go ahead of the accounts? ---- */

static bool is_short(const struct gs_queue *queue, uint64_t key)
{
    uint32_t known = gs_queue_known_ns(queue, key);
    return known && known <= BATCH_NS;
}

void gs_queue_clear_next(struct gs_queue *queue, struct gpuslice_card *card, const struct gs_share *share,
                         const struct gs_contention *met, const struct gs_stream *stream, uint64_t key)
{
    bool cleared = is_short(queue, key) && !gs_queue_wait_ns(queue, card, share, met, stream, key);
    __atomic_store_n(&queue->next_cleared, cleared, __ATOMIC_RELAXED);
}

bool gs_queue_has_ended(const struct gs_queue *queue, const struct gs_events *events, uint64_t now_ns)
{
    FOR_EACH_BATCH(queue, batch) {
        uint64_t most = batch->estimate_ns + batch->estimate_ns / 4 + PROMPT_NS;
        if (!batch->fresh || batch->gone || now_ns - batch->recorded_ns > most || is_pending(batch, events, batch->end))
            return false;
    }
    return true;
}

bool gs_queue_is_cleared(struct gs_queue *queue, uint64_t key, uint64_t now_ns)
{
    bool cleared = queue->next_cleared && queue->ended_ns && now_ns - queue->ended_ns < PROMPT_NS && is_short(queue, key);
    __atomic_store_n(&queue->next_cleared, false, __ATOMIC_RELAXED);
    if (cleared)
        note_pause(queue, now_ns - queue->ended_ns);
    return cleared;
}
