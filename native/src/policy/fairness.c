/* Start-time fair queueing. A container's virtual time is the device time that it was charged, divided by its weight. A
 * container that is ahead of a neighbour that wants the card lets the neighbour go first; one without work saves up
 * nothing. Thus unused compute is lent, and taken back as soon as it is wanted.
 *
 * Neighbours publish their own numbers. A neighbour that lies changes what is lent; each container still gets what it
 * is due (share.c). */
#include "policy/fairness.h"

#include <stdatomic.h>
#include <stddef.h>

#define SECOND_NS INT64_C(1000000000)
#define LONG_NS INT64_C(60000000000000) /* larger values were not written by us */
/* There is always a pause between the end of a kernel that a program waited for and its next launch: a program that
 * launches again this soon wanted the card all the time. */
#define STILL_WANTS_NS UINT64_C(500000)
#define WAITING_FOR_NS UINT64_C(20000000) /* how long a claim to be waiting is valid: sleeps end late on a busy host */
#define LONGEST_CLAIM_NS (600 * SECOND_NS)
#define LONGEST_UNKNOWN_NS (10 * SECOND_NS) /* work of unknown duration is believed to last this long at most */
/* How much of the time for which a neighbour holds others back it is billed for: it may have lost the rest itself, to
 * process switches and late wakeups. */
#define BILLED_PERCENT 95
#define PAUSES_PERCENT 50 /* of its work, credited to a neighbour for the pauses in it */
#define UNBILLED_NS 50000000
#define LONGEST_LAG_NS 1000000000u           /* how far a neighbour's own figures may lag behind its bill */
#define LONGEST_TURN_NS UINT64_C(4000000000) /* the longest turn of a neighbour that is believed before it is billed */
#define HEAD_START_NS INT64_C(50000000)      /* device time by which interactive containers may be ahead of others */

enum { UNDER_WAY = 1, UNDER_WAY_UNKNOWN = 2, UNDER_WAY_KIND = 255, UNDER_WAY_BITS = 8 };

/* ---- claims ---- */

struct gpuslice_claim gs_claim(const struct gpuslice_card *card, const struct gs_share *share, uint64_t now_ns,
                               struct gs_under_way work, bool waits)
{
    bool rests = work.pause_ns >= GS_LONGEST_PAUSE_NS / 10 * 9; /* a mean approaches this value but never reaches it */
    uint64_t still_wants = rests ? 0 : 2 * work.pause_ns > STILL_WANTS_NS ? 2 * work.pause_ns : STILL_WANTS_NS;
    /* The end of awaited work will be published, once the card has served it between the turns of others. */
    uint64_t served = work.ns / 4 > 2 * GS_TURN_NS ? work.ns / 4 : 2 * GS_TURN_NS;
    uint64_t longer = work.awaited ? served : still_wants;
    uint64_t until = work.ns ? now_ns + work.ns + longer : work.ran.to_ns + still_wants;
    if (waits && until < now_ns + WAITING_FOR_NS)
        until = now_ns + WAITING_FOR_NS;
    return (struct gpuslice_claim){
        .magic = GPUSLICE_CLAIM_MAGIC,
        .virtual_ns = atomic_load(&card->virtual_ns) + (uint64_t)gs_share_by_weight(share, (int64_t)work.ns),
        .busy_ns = atomic_load(&card->busy_ns) + work.uncharged_ns,
        .busy_at_ns = work.ns ? now_ns : work.ran.to_ns,
        .wants_until_ns = until,
        .under_way = (work.unknown        ? UNDER_WAY_UNKNOWN
                      : waits && !work.ns ? 0
                                          : UNDER_WAY) |
                     work.ns << UNDER_WAY_BITS,
        .weight = share->weight,
        .interactive = share->interactive,
        .pause_ns = work.pause_ns,
        .ran_from_ns = work.ran.from_ns,
        .ran_to_ns = work.ran.to_ns,
    };
}

/* Computes the neighbour's state at `now_ns`, given that others on the card delay its work by `by_ns`. */
static void delay(struct gs_neighbour *other, uint64_t by_ns, uint64_t now_ns)
{
    const struct gs_report *report = &other->report;
    uint64_t ends = report->at_ns + report->work_ns + by_ns,
             until = report->unknown ? report->at_ns + LONGEST_UNKNOWN_NS : ends;
    until = until < now_ns ? until : now_ns;
    other->busy_ns = report->busy_ns + (report->has_turn && until > report->at_ns ? until - report->at_ns : 0);
    other->wants = report->wants_until_ns + by_ns > now_ns;
    other->ends_ns = report->has_turn ? ends : 0;
}

struct gs_neighbour gs_heard(const struct gpuslice_claim *claim, uint64_t now_ns)
{
    uint64_t until = claim->wants_until_ns < now_ns + (uint64_t)LONGEST_CLAIM_NS ? claim->wants_until_ns : 0;
    uint64_t at = claim->busy_at_ns < until ? claim->busy_at_ns : until, work = claim->under_way >> UNDER_WAY_BITS;
    struct gs_neighbour other = {
        .virtual_ns = claim->virtual_ns,
        .weight = gs_percent(claim->weight),
        .interactive = claim->interactive == 1,
        .pause_ns = claim->pause_ns < GS_LONGEST_PAUSE_NS ? claim->pause_ns : GS_LONGEST_PAUSE_NS,
        .report = {.at_ns = at,
                   .work_ns = work < until - at ? work : until - at,
                   .busy_ns = claim->busy_ns,
                   .wants_until_ns = until,
                   .ran = {claim->ran_from_ns, claim->ran_to_ns < at ? claim->ran_to_ns : at},
                   .has_turn = until && claim->under_way,
                   .unknown = (claim->under_way & UNDER_WAY_KIND) == UNDER_WAY_UNKNOWN},
    };
    delay(&other, 0, now_ns);
    return other;
}

static bool runs(struct gs_run run, uint64_t at_ns) { return run.from_ns <= at_ns && at_ns < run.to_ns; }

/* When the run next begins or ends, if that is before `next_ns`; otherwise `next_ns`. */
static uint64_t sooner(uint64_t next_ns, struct gs_run run, uint64_t at_ns)
{
    uint64_t changes = run.from_ns > at_ns ? run.from_ns : run.to_ns;
    return run.from_ns < run.to_ns && changes > at_ns && changes < next_ns ? changes : next_ns;
}

/* Each neighbour publishes how much device time its work needs and when it ran before. Work ends later if others had
 * work at the same time, because the card divides its time evenly among them. A container that published only when its
 * work would end by itself would invite the next to launch beside it; the work of that one would last longer, too, and
 * the card would stay evenly divided for good. */
void gs_neighbourhood_divide(struct gs_neighbourhood *beside, uint64_t now_ns, struct gs_run own)
{
    double left[GS_NEIGHBOURS];
    uint64_t at = UINT64_MAX;
    for (uint32_t i = 0; i < beside->count; i++) {
        const struct gs_report *report = &beside->others[i].report;
        left[i] = report->at_ns <= now_ns ? (double)report->work_ns : 0;
        at = left[i] > 0 && report->at_ns < at ? report->at_ns : at;
    }
    for (uint32_t working = 1; working;) { /* from each time at which work begins or ends to the next */
        uint64_t next = sooner(UINT64_MAX, own, at);
        uint32_t sharers = runs(own, at);
        double least = (double)LONG_NS;
        working = 0;
        for (uint32_t i = 0; i < beside->count; i++) {
            const struct gs_report *report = &beside->others[i].report;
            next = sooner(next, report->ran, at);
            working += left[i] > 0;
            if (left[i] > 0 && report->at_ns > at)
                next = report->at_ns < next ? report->at_ns : next;
            bool works = left[i] > 0 && report->at_ns <= at;
            sharers += works || runs(report->ran, at);
            least = works && left[i] < least ? left[i] : least;
        }
        uint64_t first_ends = at + (uint64_t)(least * (sharers ? sharers : 1)) + 1;
        next = first_ends < next ? first_ends : next;
        for (uint32_t i = 0; i < beside->count; i++) {
            struct gs_neighbour *other = &beside->others[i];
            if (left[i] <= 0 || other->report.at_ns > at)
                continue;
            left[i] -= (double)(next - at) / sharers;
            if (left[i] <= 0)
                delay(other, next - other->report.at_ns - other->report.work_ns, now_ns);
        }
        at = next;
    }
}

void gs_neighbourhood_update(struct gs_neighbourhood *beside, struct gpuslice_card *card, uint64_t now_ns,
                             const struct gs_neighbour *others, uint32_t count, struct gs_run own)
{
    uint64_t passed = now_ns - beside->read_ns, before[GS_NEIGHBOURS];
    bool same = beside->read_ns && count == beside->count; /* if not, this interval is left out */
    for (uint32_t i = 0; i < count; i++) {
        before[i] = beside->others[i].busy_ns;
        beside->others[i] = others[i];
    }
    beside->count = count;
    gs_neighbourhood_divide(beside, now_ns, own);
    for (uint32_t i = 0; i < count; i++) {
        int64_t more = same ? (int64_t)(beside->others[i].busy_ns - before[i]) : 0;
        beside->busy_ns += (uint64_t)gs_clamp(more, 0, (int64_t)passed); /* it may report less than was assumed */
    }
    uint64_t container = atomic_load(&card->busy_ns), rest = container - beside->container_busy_ns - beside->own_busy_ns;
    bool known = beside->read_ns && passed && rest < passed * GPUSLICE_SLOTS;
    beside->rest_at_work = known ? (double)rest / (double)passed : 0;
    beside->container_busy_ns = container;
    beside->own_busy_ns = 0;
    beside->read_ns = now_ns;
}

static int64_t difference(uint64_t one, uint64_t other) { return gs_clamp((int64_t)(one - other), -LONG_NS, LONG_NS); }

/* ---- what claims cost ---- */

static bool is_known(const struct gs_neighbourhood *beside, uint64_t name)
{
    for (uint32_t i = 0; i < beside->count; i++)
        if (beside->others[i].name == name)
            return true;
    return false;
}

/* Finds the neighbour's bill; a new one replaces that of a neighbour that has gone, as there is room for as many bills
 * as neighbours. */
static struct gs_bill *bill_of(struct gs_neighbourhood *beside, uint64_t name, uint64_t virtual_ns, uint64_t done_ns)
{
    struct gs_bill *bill = beside->bills, *last = beside->bills + GS_NEIGHBOURS - 1;
    while (bill < last && bill->name != name)
        bill++;
    if (bill->name == name)
        return bill;
    for (bill = beside->bills; bill < last && is_known(beside, bill->name); bill++)
        ;
    *bill = (struct gs_bill){.name = name, .virtual_ns = virtual_ns, .done_ns = done_ns};
    return bill;
}

/* When no neighbour is in its turn, the next could be the one furthest behind that wants the card. */
static const struct gs_neighbour *next_of(const struct gs_neighbourhood *beside)
{
    const struct gs_neighbour *next = NULL;
    for (uint32_t i = 0; i < beside->count; i++) {
        const struct gs_neighbour *other = &beside->others[i];
        if (other->wants && (!next || difference(other->virtual_ns, next->virtual_ns) < 0))
            next = other;
    }
    return next;
}

static int64_t by_weight(uint64_t ns, uint32_t weight) { return gs_clamp((int64_t)ns, 0, LONG_NS) / weight * 100; }

/* The weight by which a neighbour is billed: all neighbours together count for no more than this container's own share
 * leaves, whatever they claim. */
static uint32_t weight_of(const struct gs_neighbourhood *beside, const struct gs_neighbour *other, const struct gs_share *share)
{
    uint32_t all = 0, left = 100 - gs_percent(share->weight);
    for (uint32_t i = 0; i < beside->count; i++)
        all += beside->others[i].weight;
    return all > left ? gs_percent(other->weight * left / all) : other->weight;
}

/* A container that takes turns begins none while it is ahead of one that waits. A neighbour that claims to do so is not
 * believed. */
static bool begins_ahead(struct gs_bill *bill, const struct gs_neighbour *other, uint64_t own_ns, uint32_t weight)
{
    if (!bill->in_turn || !bill->turn_left_ns) {
        uint64_t work = other->report.work_ns;
        bill->turn_virtual_ns = bill->virtual_ns;
        bill->turn_left_ns = (2 * work < LONGEST_TURN_NS ? 2 * work : LONGEST_TURN_NS) + UNBILLED_NS;
    }
    return difference(bill->turn_virtual_ns, own_ns) > by_weight(2 * UNBILLED_NS, weight);
}

/* Takes into the bill what the neighbour itself claims to have done, each part once. Work with pauses, in which it
 * keeps its turn, holds others back for longer than the work itself: hence the credit for pauses. */
static void own_up(struct gs_bill *bill, uint64_t done_ns, uint64_t own_ns, uint32_t weight)
{
    int64_t more = difference(done_ns, bill->done_ns), off = difference(done_ns, own_ns);
    if (more <= 0 || off <= -LONG_NS || off >= LONG_NS) /* no real value is that far off */
        return;
    bill->done_ns = done_ns;
    if (difference(bill->virtual_ns, done_ns) < by_weight(LONGEST_LAG_NS, weight))
        bill->virtual_ns -= (uint64_t)more / 100 * PAUSES_PERCENT;
    if (difference(done_ns, bill->virtual_ns) > 0)
        bill->virtual_ns = done_ns;
}

void gs_neighbourhood_bill(struct gs_neighbourhood *beside, const struct gpuslice_card *card, const struct gs_share *share,
                           uint64_t now_ns, uint64_t held_since_ns)
{
    uint64_t from = held_since_ns > beside->billed_ns ? held_since_ns : beside->billed_ns, own = atomic_load(&card->virtual_ns);
    uint64_t passed = from < now_ns ? now_ns - from : 0;
    uint32_t in_turn = 0;
    bool at_work = false;
    struct gs_bill *bills[GS_NEIGHBOURS];
    const struct gs_neighbour *next = next_of(beside);
    passed = passed < WAITING_FOR_NS ? passed : WAITING_FOR_NS; /* not held back any longer: this container was stopped */
    if (held_since_ns <= now_ns)
        beside->billed_ns = now_ns;
    for (uint32_t i = 0; i < beside->count; i++) {
        struct gs_neighbour *other = &beside->others[i];
        uint64_t done = other->virtual_ns - (uint64_t)by_weight(other->report.work_ns, other->weight);
        struct gs_bill *bill = bills[i] = bill_of(beside, other->name, own, done);
        bool turns = other->ends_ns && !other->interactive && now_ns < other->ends_ns + gs_hold_ns(other);
        own_up(bill, done, own, other->weight);
        if (!other->wants && difference(own, bill->virtual_ns) > 0)
            bill->virtual_ns = own; /* unwanted time is not saved up */
        other->overdrawn = turns && begins_ahead(bill, other, own, weight_of(beside, other, share));
        bill->in_turn = turns;
        in_turn += turns && !other->overdrawn;
        at_work |= turns && !other->overdrawn && now_ns < other->ends_ns;
    }
    for (uint32_t i = 0; i < beside->count; i++) {
        struct gs_neighbour *other = &beside->others[i];
        struct gs_bill *bill = bills[i];
        uint32_t weight = weight_of(beside, other, share);
        uint64_t part = bill->in_turn && !other->overdrawn ? passed / in_turn : !at_work && other == next ? passed : 0;
        bill->virtual_ns += (uint64_t)by_weight(part / 100 * BILLED_PERCENT, weight);
        bill->turn_left_ns -= bill->in_turn && part < bill->turn_left_ns ? part : bill->in_turn ? bill->turn_left_ns : 0;
        uint64_t believed = bill->virtual_ns - (uint64_t)by_weight(UNBILLED_NS, weight);
        if (difference(believed, other->virtual_ns) > 0)
            other->virtual_ns = believed;
    }
}

/* ---- who goes first ---- */

static int64_t head_start_ns(uint32_t weight, bool interactive)
{
    return interactive ? HEAD_START_NS * 100 / gs_percent(weight) : 0;
}

static int64_t virtual_lead_ns(const struct gpuslice_card *card, const struct gs_share *share, uint64_t in_flight_ns,
                               const struct gs_neighbour *other)
{
    int64_t in_flight = in_flight_ns < (uint64_t)LONG_NS ? (int64_t)in_flight_ns : LONG_NS;
    uint64_t own = atomic_load(&card->virtual_ns) + (uint64_t)gs_share_by_weight(share, in_flight);
    return difference(own, other->virtual_ns) - head_start_ns(share->weight, share->interactive) +
           head_start_ns(other->weight, other->interactive);
}

int64_t gs_lead_over_ns(const struct gpuslice_card *card, const struct gs_share *share, uint64_t in_flight_ns,
                        const struct gs_neighbour *other)
{
    return virtual_lead_ns(card, share, in_flight_ns, other) / 100 * gs_percent(other->weight);
}

uint64_t gs_hold_ns(const struct gs_neighbour *other)
{
    uint64_t late = other->report.work_ns ? GS_CHANGE_NS : 0; /* it may have begun one process switch later than published */
    return other->pause_ns < GS_CHANGE_NS ? GS_CHANGE_NS + late : 0;
}

bool gs_all_rest(const struct gs_neighbourhood *beside, uint64_t now_ns)
{
    for (uint32_t i = 0; i < beside->count; i++) {
        const struct gs_report *report = &beside->others[i].report;
        uint64_t works_ns = report->unknown ? LONGEST_UNKNOWN_NS : report->work_ns;
        if (beside->others[i].wants || now_ns < report->wants_until_ns + works_ns + GS_RESTS_NS)
            return false;
    }
    return true;
}

int64_t gs_lead_ns(const struct gpuslice_card *card, const struct gs_share *share, uint64_t in_flight_ns,
                   const struct gs_neighbourhood *beside, uint64_t now_ns, uint64_t estimate_ns)
{
    int64_t most = INT64_MIN;
    for (uint32_t i = 0; i < beside->count; i++) {
        const struct gs_neighbour *other = &beside->others[i];
        uint64_t pauses_since = other->ends_ns ? other->ends_ns + gs_hold_ns(other) : UINT64_MAX;
        bool fits = pauses_since <= now_ns && now_ns + in_flight_ns + estimate_ns <= other->ends_ns + other->pause_ns;
        int64_t lead = virtual_lead_ns(card, share, in_flight_ns, other);
        if (other->wants && lead > most && !fits)
            most = lead;
    }
    return most == INT64_MIN ? most : most / 100 * gs_percent(share->weight);
}

void gs_stay(struct gpuslice_card *card, uint64_t now_ns)
{
    uint64_t before = atomic_load(&card->active_at_ns);
    if (before < now_ns || before > now_ns + SECOND_NS) /* a time in the future was not written by us */
        atomic_compare_exchange_strong(&card->active_at_ns, &before, now_ns);
}

/* The virtual time of those that want the card: that of the one furthest behind, or, if none wants it, of the one
 * furthest ahead. `*weight` is set to their total weight. */
static uint64_t virtual_time(const struct gs_neighbourhood *beside, uint32_t *weight)
{
    bool wanted = false;
    uint64_t time = 0;
    *weight = 0;
    for (uint32_t i = 0; i < beside->count; i++)
        wanted |= beside->others[i].wants;
    for (uint32_t i = 0, seen = 0; i < beside->count; i++) {
        const struct gs_neighbour *other = &beside->others[i];
        if (other->wants != wanted)
            continue;
        if (!seen++ || (difference(other->virtual_ns, time) < 0) == wanted)
            time = other->virtual_ns;
        *weight += gs_percent(other->weight);
    }
    return time;
}

/* While the container had no work, the others' virtual time advanced with their use. Its own now advances by what they
 * can have used in its idle time, but not beyond theirs. */
void gs_wake(struct gpuslice_card *card, uint64_t now_ns, uint64_t awaited_ns, const struct gs_neighbourhood *beside)
{
    uint32_t weight;
    uint64_t others = virtual_time(beside, &weight), active = atomic_load(&card->active_at_ns);
    active = awaited_ns > active && awaited_ns <= now_ns ? awaited_ns : active;
    uint64_t own = atomic_load(&card->virtual_ns);
    int64_t idle = active ? gs_clamp((int64_t)(now_ns - active - GS_CHANGE_NS), 0, LONG_NS) : LONG_NS;
    int64_t behind = difference(others, own), passed = weight ? idle / gs_percent(weight) * 100 : 0;
    if (behind > 0 && passed > 0)
        atomic_compare_exchange_strong(&card->virtual_ns, &own, own + (uint64_t)(passed < behind ? passed : behind));
}

bool gs_was_stopped(const struct gpuslice_card *card, uint64_t now_ns, uint64_t busy_ns)
{
    uint64_t active = atomic_load(&card->active_at_ns);
    return active && active < now_ns && now_ns - active > GS_STOPPED_NS + busy_ns;
}

struct gs_own_part gs_own_part(struct gpuslice_card *card, uint64_t now_ns, const struct gs_neighbourhood *beside)
{
    double sampled = beside->count ? 0 : gs_share_sampled_part(card, now_ns);
    if (sampled > 0)
        return (struct gs_own_part){.part = sampled, .others_ns = beside->busy_ns};
    return (struct gs_own_part){.part = 1 / (1 + beside->rest_at_work), .turn_ns = GS_TURN_NS, .others_ns = beside->busy_ns};
}
