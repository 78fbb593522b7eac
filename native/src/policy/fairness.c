/* Start-time fair queueing. A container's virtual time is the device time that it was charged, divided by its weight. Who
 * is ahead of a neighbour that wants the card lets it go first; who has no work keeps nothing of what it did not use. So
 * what nobody wants is lent, and taken back as soon as it is wanted.
 *
 * Neighbours tell their numbers themselves. One that lies changes what is lent; what a container is due it gets all the
 * same (share.c).
 */
#include "policy/fairness.h"

#include <stdatomic.h>

#define SECOND_NS INT64_C(1000000000)
#define LONG_NS INT64_C(60000000000000) /* more was not written by us */
/* Between the end of a kernel that a program waited for and its next launch there is always a pause: a program that launches
 * again so soon after its work wanted the card all the time. */
#define STILL_WANTS_NS UINT64_C(500000)
#define WAITING_FOR_NS UINT64_C(20000000) /* a claim to be waiting holds: sleeps end late on a busy host */
#define LONGEST_CLAIM_NS (600 * SECOND_NS)
#define LONGEST_UNKNOWN_NS (10 * SECOND_NS) /* what nobody knows the length of is believed to last, at the most */
#define HEAD_START_NS INT64_C(50000000) /* device time by which interactive containers may be ahead of others */

enum { UNDER_WAY = 1, UNDER_WAY_UNKNOWN = 2, UNDER_WAY_KIND = 255, UNDER_WAY_BITS = 8 };

static int64_t clamp(int64_t value, int64_t least, int64_t most)
{
    return value < least ? least : value > most ? most : value;
}

static uint32_t percent(uint64_t value) { return value < 1 ? 1 : value > 100 ? 100 : (uint32_t)value; }

/* ---- claims ---- */

struct gpuslice_claim gs_claim(const struct gpuslice_card *card, const struct gs_share *share, uint64_t now_ns,
                               struct gs_under_way work, bool waits)
{
    bool rests = work.pause_ns >= GS_LONGEST_PAUSE_NS / 10 * 9; /* a mean comes near to that and never there */
    uint64_t still_wants = rests ? 0 : 2 * work.pause_ns > STILL_WANTS_NS ? 2 * work.pause_ns : STILL_WANTS_NS;
    uint64_t longer = work.awaited && work.ns / 4 > still_wants ? work.ns / 4 : still_wants; /* its end will be told */
    uint64_t until = work.ns ? now_ns + work.ns + longer : work.ran.to_ns + still_wants;
    if (waits && until < now_ns + WAITING_FOR_NS)
        until = now_ns + WAITING_FOR_NS;
    return (struct gpuslice_claim){
        .magic = GPUSLICE_CLAIM_MAGIC,
        .virtual_ns = atomic_load(&card->virtual_ns) + (uint64_t)gs_share_by_weight(share, (int64_t)work.ns),
        .busy_ns = atomic_load(&card->busy_ns) + work.uncharged_ns,
        .busy_at_ns = work.ns ? now_ns : work.ran.to_ns,
        .wants_until_ns = until,
        .under_way = (work.unknown ? UNDER_WAY_UNKNOWN : waits && !work.ns ? 0 : UNDER_WAY) | work.ns << UNDER_WAY_BITS,
        .weight = share->weight,
        .interactive = share->interactive,
        .pause_ns = work.pause_ns,
        .ran_from_ns = work.ran.from_ns,
        .ran_to_ns = work.ran.to_ns,
    };
}

/* What is known at this moment of a neighbour whose work others on the card delay by so much. */
static void delay(struct gs_neighbour *other, uint64_t by_ns, uint64_t now_ns)
{
    const struct gs_report *report = &other->report;
    uint64_t ends = report->at_ns + report->work_ns + by_ns, until = report->unknown ? report->at_ns + LONGEST_UNKNOWN_NS : ends;
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
        .weight = percent(claim->weight),
        .interactive = claim->interactive == 1,
        .pause_ns = claim->pause_ns < GS_LONGEST_PAUSE_NS ? claim->pause_ns : GS_LONGEST_PAUSE_NS,
        .report = {.at_ns = at, .work_ns = work < until - at ? work : until - at, .busy_ns = claim->busy_ns, .wants_until_ns = until,
                   .ran = {claim->ran_from_ns, claim->ran_to_ns < at ? claim->ran_to_ns : at},
                   .has_turn = until && claim->under_way,
                   .unknown = (claim->under_way & UNDER_WAY_KIND) == UNDER_WAY_UNKNOWN},
    };
    delay(&other, 0, now_ns);
    return other;
}

static bool runs(struct gs_run run, uint64_t at_ns) { return run.from_ns <= at_ns && at_ns < run.to_ns; }

/* The next moment at which it begins or ends, if that is before. */
static uint64_t sooner(uint64_t next_ns, struct gs_run run, uint64_t at_ns)
{
    uint64_t changes = run.from_ns > at_ns ? run.from_ns : run.to_ns;
    return run.from_ns < run.to_ns && changes > at_ns && changes < next_ns ? changes : next_ns;
}

/* Each tells how much of the card its work needs, and what it had before. Work ends later where others had some meanwhile: the
 * card gives each its even part. One that only said when its work ends by itself would invite the next to launch beside it:
 * that one's would last longer, too, and so the card would be divided evenly for good. */
void gs_neighbourhood_divide(struct gs_neighbourhood *beside, uint64_t now_ns, struct gs_run own)
{
    double left[GS_NEIGHBOURS];
    uint64_t at = UINT64_MAX;
    for (uint32_t i = 0; i < beside->count; i++) {
        const struct gs_report *report = &beside->others[i].report;
        left[i] = report->at_ns <= now_ns ? (double)report->work_ns : 0;
        at = left[i] > 0 && report->at_ns < at ? report->at_ns : at;
    }
    for (uint32_t working = 1; working;) { /* from one moment at which somebody begins or ends to the next */
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
    bool same = beside->read_ns && count == beside->count; /* one that comes or goes is noticed once more soon */
    for (uint32_t i = 0; i < count; i++) {
        before[i] = beside->others[i].busy_ns;
        beside->others[i] = others[i];
    }
    beside->count = count;
    gs_neighbourhood_divide(beside, now_ns, own);
    for (uint32_t i = 0; i < count; i++) {
        int64_t more = same ? (int64_t)(beside->others[i].busy_ns - before[i]) : 0;
        beside->busy_ns += (uint64_t)clamp(more, 0, (int64_t)passed); /* it may say less than it was thought to have */
    }
    uint64_t container = atomic_load(&card->busy_ns), rest = container - beside->container_busy_ns - beside->own_busy_ns;
    bool known = beside->read_ns && passed && rest < passed * GPUSLICE_SLOTS;
    beside->rest_at_work = known ? (double)rest / (double)passed : 0;
    beside->container_busy_ns = container;
    beside->own_busy_ns = 0;
    beside->read_ns = now_ns;
}

/* ---- who goes first ---- */

static int64_t difference(uint64_t one, uint64_t other) { return clamp((int64_t)(one - other), -LONG_NS, LONG_NS); }

static int64_t head_start_ns(uint32_t weight, bool interactive)
{
    return interactive ? HEAD_START_NS * 100 / percent(weight) : 0;
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
    return virtual_lead_ns(card, share, in_flight_ns, other) / 100 * percent(other->weight);
}

uint64_t gs_hold_ns(const struct gs_neighbour *other)
{
    uint64_t late = other->report.work_ns ? GS_CHANGE_NS : 0; /* its end is not told yet: it may have begun by a change later */
    return other->pause_ns < GS_CHANGE_NS ? GS_CHANGE_NS + late : 0;
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
    return most == INT64_MIN ? most : most / 100 * percent(share->weight);
}

void gs_stay(struct gpuslice_card *card, uint64_t now_ns)
{
    uint64_t before = atomic_load(&card->active_at_ns);
    if (before < now_ns || before > now_ns + SECOND_NS) /* a time to come was not written by us */
        atomic_compare_exchange_strong(&card->active_at_ns, &before, now_ns);
}

/* The virtual time of those who want the card: of the one furthest behind; where none does, of the one furthest ahead.
 * With the weight of all of them. */
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
        *weight += percent(other->weight);
    }
    return time;
}

/* While it had no work the others' virtual time went on, by what they used; so does its own, as far as theirs. */
void gs_wake(struct gpuslice_card *card, uint64_t now_ns, uint64_t awaited_ns, const struct gs_neighbourhood *beside)
{
    uint32_t weight;
    uint64_t others = virtual_time(beside, &weight), active = atomic_load(&card->active_at_ns);
    active = awaited_ns > active && awaited_ns <= now_ns ? awaited_ns : active;
    uint64_t own = atomic_load(&card->virtual_ns);
    int64_t idle = active ? clamp((int64_t)(now_ns - active - GS_CHANGE_NS), 0, LONG_NS) : LONG_NS;
    int64_t behind = difference(others, own), passed = weight ? idle / percent(weight) * 100 : 0;
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
