/* What throttle.c does with the driver, the clock and the neighbours' files, told again in virtual time: the launches of
 * one process of a container. What it decides, and when work counts as done, is the library's own code. Who calls sleeps:
 * between one function and the next the tests let the card's time pass. */
#include <stdlib.h>

#include "card_model.h"
#include "policy/alone.h"

#define LOOK_EVERY_NS 50000u
#define TELL_NS 100000u
#define SOON_TOLD_NS 2000000u
#define NEIGHBOURS 8
#define MEMBERS 8

/* What the processes of a container share: the entry in the region, and the claim that neighbours read. */
struct container {
    struct gpuslice_card entry; /* first: the tests read it in place */
    struct gs_share share;
    struct gpuslice_claim claim;
    struct container *met[NEIGHBOURS]; /* containers that tell each other what they want, this one among them */
    uint32_t met_count;                /* 0: it tells nobody */
    struct throttle *members[MEMBERS];
    uint32_t member_count;
};

struct throttle {
    struct container *box;
    struct card *card;
    uint32_t process;
    struct gs_queue queue;
    struct gs_share_past past;
    struct gs_neighbourhood beside;
    struct gs_alone alone;
    struct gs_under_way under_way; /* as the container's other processes see it */
    uint64_t looked_ns, told_end_ns;
    bool untold;
};

static void *allocate(size_t size)
{
    void *room = calloc(1, size);
    if (!room)
        abort();
    return room;
}

struct container *container_new(uint32_t weight, uint32_t cap, bool interactive)
{
    struct container *box = allocate(sizeof *box);
    box->share = (struct gs_share){weight, cap, interactive};
    return box;
}

void container_free(struct container *box)
{
    for (uint32_t i = 0; i < box->member_count; i++)
        free(box->members[i]);
    free(box);
}

void container_meet(struct container *box, struct container *other)
{
    if (box->met_count == NEIGHBOURS)
        abort();
    box->met[box->met_count++] = other;
}

static struct gs_under_way under_way_of(const struct container *box)
{
    struct gs_under_way sum = {0};
    for (uint32_t i = 0; i < box->member_count; i++) {
        sum.ns += box->members[i]->under_way.ns;
        sum.unknown += box->members[i]->under_way.unknown;
    }
    return sum;
}

uint64_t container_under_way_ns(const struct container *box) { return under_way_of(box).ns; }

static uint64_t now_of(const struct throttle *at) { return (uint64_t)*(const double *)at->card; }

static void tell(struct throttle *at, bool waits)
{
    struct container *box = at->box;
    struct gs_under_way work = under_way_of(box);
    work.ran = gs_queue_ran(&at->queue);
    work.pause_ns = at->queue.pause_ns;
    work.awaited = at->queue.awaited_ns != 0;
    work.uncharged_ns = gs_queue_uncharged_ns(&at->queue, now_of(at));
    box->claim = gs_claim(&box->entry, &box->share, now_of(at), work, waits);
    at->told_end_ns = gs_heard(&box->claim, now_of(at)).ends_ns;
    at->untold = false;
}

struct throttle *throttle_new(struct container *box, struct card *card, uint32_t process)
{
    struct throttle *at = allocate(sizeof *at);
    *at = (struct throttle){.box = box, .card = card, .process = process};
    if (box->member_count == MEMBERS)
        abort();
    box->members[box->member_count++] = at;
    if (box->met_count)
        tell(at, false);
    return at;
}

/* It says that it has work for so long, or with `waits` wants to, whatever it has; and that its virtual time is such. */
void throttle_claim(struct throttle *at, uint64_t ns, bool waits, uint64_t virtual_ns, uint64_t weight)
{
    at->box->claim = gs_claim(&at->box->entry, &at->box->share, now_of(at), (struct gs_under_way){.ns = ns}, waits);
    at->box->claim.virtual_ns = virtual_ns;
    at->box->claim.weight = weight;
}

/* ---- the driver's events ---- */

static struct throttle *at_work; /* whose event is created */

static void *create_event(const struct gs_stream *stream)
{
    (void)stream;
    return card_event(at_work->card, at_work->process);
}

static const struct gs_events events = {create_event, card_event_record, card_event_record, card_event_query, card_event_elapsed};

/* ---- looking ---- */

static void show(struct throttle *at) { at->under_way = (struct gs_under_way){.ns = at->queue.in_flight_ns, .unknown = at->queue.unknown}; }

static void read_neighbours(struct throttle *at, uint64_t now_ns, bool waits)
{
    struct gs_neighbour others[NEIGHBOURS];
    uint32_t count = 0;
    for (uint32_t i = 0; i < at->box->met_count; i++)
        if (at->box->met[i] != at->box && at->box->met[i]->claim.magic) {
            others[count] = gs_heard(&at->box->met[i]->claim, now_ns);
            others[count++].name = i + 1;
        }
    gs_neighbourhood_update(&at->beside, &at->box->entry, now_ns, others, count, gs_queue_run(&at->queue, now_ns));
    bool works = under_way_of(at->box).ns, held = waits && gs_share_headroom(&at->box->entry, &at->box->share, now_ns, 0, true) > 0;
    uint64_t since_ns = waits && works ? UINT64_MAX : held ? at->queue.covered_ns : now_ns; /* when its work ended is told later */
    gs_neighbourhood_bill(&at->beside, &at->box->entry, &at->box->share, now_ns, since_ns);
    if (!gs_all_rest(&at->beside, now_ns))
        at->alone.until_ns = 0;
}

static void account(struct throttle *at, uint64_t now_ns, bool paused, bool waits)
{
    struct gpuslice_card *entry = &at->box->entry;
    struct gs_own_part part = gs_own_part(entry, now_ns, &at->beside);
    uint64_t finished = at->queue.finished_ns;
    gs_share_accrue(entry, &at->box->share, now_ns, under_way_of(at->box).ns, waits);
    at_work = at;
    struct gs_busy busy = gs_queue_look(&at->queue, &events, now_ns, paused, part);
    if (busy.ns) {
        gs_share_charge(entry, &at->box->share, busy);
        at->beside.own_busy_ns += busy.ns;
    }
    if (at->queue.finished_ns != finished)
        entry->finished_at_ns = now_ns;
    gs_neighbourhood_divide(&at->beside, now_ns, gs_queue_run(&at->queue, now_ns));
    at->looked_ns = now_ns;
    show(at);
    if (at->queue.count || busy.ns)
        gs_stay(entry, at->queue.count ? now_ns : at->queue.covered_ns);
    gs_share_note(&at->past, entry, now_ns);
}

static void settle(struct throttle *at)
{
    uint64_t ended_ns = at->queue.ended_ns;
    if (!ended_ns)
        return;
    at->queue.ended_ns = 0;
    show(at);
    read_neighbours(at, ended_ns, false);
    account(at, ended_ns, true, false);
    gs_queue_awaited(&at->queue, ended_ns);
    at->untold = true;
}

void throttle_look(struct throttle *at, bool waits)
{
    struct gpuslice_card *entry = &at->box->entry;
    uint64_t now = now_of(at);
    settle(at);
    bool due = waits || now - at->looked_ns >= LOOK_EVERY_NS;
    struct gs_under_way work = under_way_of(at->box);
    uint64_t busy_ns = waits ? 0 : work.unknown ? UINT64_MAX / 2 : work.ns * (1 + at->beside.count);
    bool stopped = gs_was_stopped(entry, now, busy_ns);
    if (!waits)
        gs_queue_arrive(&at->queue, now);
    if (due || at->untold)
        read_neighbours(at, now, waits);
    if (stopped)
        gs_wake(entry, now, 0, &at->beside);
    if (due)
        account(at, now, waits, waits && !stopped);
    if (!waits && (due || at->untold) && !under_way_of(at->box).ns)
        gs_wake(entry, now, at->queue.awaited_ns, &at->beside);
    if (!due)
        return;
    if (waits)
        gs_stay(entry, now);
    at->untold = at->box->met_count && !waits;
    if (at->box->met_count && waits)
        tell(at, true);
}

/* ---- launching ---- */

/* Whether NVML has something new, and how it was asked: the caller says what it tells, to throttle_learn. */
static enum gs_share_ask ask(struct throttle *at)
{
    int32_t percents[PROCESSES];
    uint64_t now = now_of(at);
    enum gs_share_ask how = gs_share_ask(&at->box->entry, now, now / 1000);
    uint64_t until = how ? card_sample(at->card, percents) : 0;
    return until && until / 1000 != at->box->entry.sampled_us ? how : GS_SHARE_NOT_NOW;
}

void throttle_learn(struct throttle *at, enum gs_share_ask how, uint64_t until_ns, int32_t own_percent, int32_t others_percent,
                    uint32_t listed)
{
    if (how == GS_SHARE_ASK_AFTER_GAP && at->beside.count)
        own_percent = 0;
    struct gs_share_sample sample = {until_ns / 1000, own_percent, others_percent, listed};
    gs_share_learn(&at->box->entry, &at->box->share, now_of(at), under_way_of(at->box).ns, &at->past, &sample, until_ns, how);
}

bool throttle_goes_untimed(struct throttle *at, uint64_t key)
{
    return now_of(at) < at->alone.until_ns && gs_alone_affords(&at->alone, &at->queue, key);
}

/* A launch that needs to be timed arrives, unless it turns out that it does not. */
bool throttle_arrives_alone(struct throttle *at, uint64_t key)
{
    uint64_t now = now_of(at);
    throttle_look(at, false);
    if (!at->box->met_count || at->box->share.cap < 100 || !gs_alone_may_begin(&at->alone, &at->queue, &at->beside, now))
        return false;
    read_neighbours(at, now, false);
    if (!gs_alone_may_begin(&at->alone, &at->queue, &at->beside, now))
        return false;
    gs_alone_begin(&at->alone, &at->beside, now);
    return throttle_goes_untimed(at, key);
}

enum gs_share_ask throttle_arrive(struct throttle *at)
{
    return gs_share_is_divided(&at->box->entry) ? ask(at) : GS_SHARE_NOT_NOW;
}

static struct gs_stream stream_of(uint32_t stream) { return (struct gs_stream){(void *)1, (void *)(uintptr_t)stream, 0}; }

static struct gs_contention contention(const struct throttle *at, uint64_t waited_ns)
{
    struct gs_under_way work = under_way_of(at->box);
    return (struct gs_contention){now_of(at), waited_ns, work.ns, work.unknown, &at->beside};
}

/* Whether the launch needs neither to arrive nor to wait. */
bool throttle_is_cleared(struct throttle *at, uint64_t key) { return gs_queue_is_cleared(&at->queue, key, now_of(at)); }

/* How long the launch has to sleep before it is woken; 0: it may go. */
uint64_t throttle_wait_ns(struct throttle *at, uint32_t number, uint64_t key, uint64_t waited_ns)
{
    struct gs_stream stream = stream_of(number);
    struct gs_contention met = contention(at, waited_ns);
    uint64_t ns = gs_queue_wait_ns(&at->queue, &at->box->entry, &at->box->share, &met, &stream, key);
    if (ns)
        throttle_look(at, true);
    return ns;
}

enum gs_share_ask throttle_wake(struct throttle *at)
{
    throttle_look(at, true);
    return ask(at);
}

struct gs_batch *throttle_begin(struct throttle *at, uint32_t number, uint64_t key)
{
    struct gs_stream stream = stream_of(number);
    uint64_t now = now_of(at);
    at_work = at;
    struct gs_batch *batch = gs_queue_begin(&at->queue, &events, &stream, key, now);
    if (!batch)
        gs_share_spend(&at->box->entry, &at->box->share, gs_queue_estimate_ns(&at->queue, key));
    show(at);
    at->alone.timed_ns = now;
    bool longer = at->beside.count && at->told_end_ns + TELL_NS < now + at->queue.in_flight_ns;
    if ((at->untold || longer) && !at->queue.ended_ns)
        tell(at, false);
    return batch;
}

void throttle_end(struct throttle *at, struct gs_batch *batch, uint32_t number, uint64_t key)
{
    struct gs_stream stream = stream_of(number);
    if (!batch)
        return;
    at_work = at;
    gs_queue_end(batch, &events, true);
    if (at->queue.ended_ns) {
        settle(at);
        tell(at, false);
    }
    if (at->beside.count && gs_queue_is_alone(&at->queue, batch)) {
        struct gs_contention met = contention(at, 0);
        gs_queue_clear_next(&at->queue, &at->box->entry, &at->box->share, &met, &stream, key);
    }
}

/* The process has died, and the others have found out. */
void throttle_forget(struct throttle *at) { at->under_way = (struct gs_under_way){0}; }

void throttle_awaited(struct throttle *at)
{
    uint64_t now = now_of(at);
    if (now < at->alone.until_ns)
        return;
    settle(at);
    if (at->queue.count)
        at->queue.awaited_ns = now;
    if (!at->beside.count || !at->queue.count)
        return;
    bool launches_soon = gs_pauses_briefly(&at->queue) && now - at->looked_ns < SOON_TOLD_NS;
    at->queue.ended_ns = now;
    if (launches_soon && at->queue.next_cleared && gs_queue_has_ended(&at->queue, &events, now))
        at->under_way.ns = 0;
    else
        settle(at);
    if (!launches_soon)
        tell(at, false);
}
