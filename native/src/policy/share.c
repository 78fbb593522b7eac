/* Credit for device time, charged with work.
 *
 * Credit accrues with time × share. Events say how long work kept its process busy; on a card that others use too, this
 * includes their time slices, so it is an upper bound for what the work took itself. NVML's samples say what the
 * container's processes really took, a sixth of a second late and in whole percents. Therefore busy time is charged at
 * once, at our own part of it in the last samples; each new sample then corrects the account for its window exactly,
 * within what events allow. Containers that publish claims work one after the other (card_queue.c): their busy time was
 * their own, except for the time in which others claim to have worked. Without samples and without such neighbours busy
 * time is charged in full. */
#include "policy/share.h"

#include <stdatomic.h>

#define SECOND_NS INT64_C(1000000000)
/* What an idle container may save up: one percent of a second. */
#define MOST_SAVED_NS (SECOND_NS / 100)
/* The most that it keeps of what it could not use while others had the card. */
#define MOST_KEPT_NS (4 * SECOND_NS)
/* What a sample may refund beyond the saved credit: another percent of a second. */
#define MOST_REFUND_NS (SECOND_NS / 100)
/* Values beyond a minute were not written by us. */
#define MOST_DEBT_NS (60 * SECOND_NS)
/* No launch waits longer than this for what its container used before: larger debts are forgiven. */
#define LONGEST_WAIT_S 60
#define IDLE_NS 20000000 /* a longer time without work or waiting is idle */
#define LEAST_WAIT_NS 50000u
#define MOST_WAIT_NS 5000000u
#define SAMPLE_US 166667u                /* NVML's sampling period on most cards */
#define ASK_AGAIN_NS UINT64_C(20000000)  /* if a sample is late, or its period longer */
#define GAP_NS UINT64_C(250000000)       /* after this long without asking, a sample may have been missed */
#define KNOWN_FOR_NS UINT64_C(400000000) /* how long a sample says anything about the present */
#define MOST_SAMPLED 110                 /* percent, of all processes, each of them rounded: more is not device time */
/* The part of its due that a container gets whatever neighbours claim. */
#define SURELY_DUE 0.9

/* ---- credit ---- */

/* Adds `by`, up to `most`; what is already above that stays, up to `at_all`. */
static int64_t raised(int64_t before, int64_t by, int64_t most, int64_t at_all)
{
    int64_t after = before + by < most ? before + by : most;
    return gs_clamp(after > before ? after : before, -MOST_DEBT_NS, at_all);
}

static void give(struct gpuslice_credit *credit, int64_t ns, int64_t least, int64_t most, int64_t at_all)
{
    int64_t before = atomic_load(&credit->ns), after;
    do
        after = raised(gs_clamp(before, least, MOST_DEBT_NS), ns, most, at_all);
    while (!atomic_compare_exchange_weak(&credit->ns, &before, after));
}

static void take(struct gpuslice_credit *credit, int64_t ns)
{
    int64_t before = atomic_load(&credit->ns), after;
    do
        after = gs_clamp(gs_clamp(before, -MOST_DEBT_NS, MOST_DEBT_NS) - ns, -MOST_DEBT_NS, MOST_DEBT_NS);
    while (!atomic_compare_exchange_weak(&credit->ns, &before, after));
}

/* The thread that moves the time forward adds the credit for it, so that it is added once. A container that has work or
 * waits saves nothing up and loses nothing: it is still due what it could not use while others had the card. */
static void accrue(struct gpuslice_credit *credit, double rate, uint64_t now_ns, int64_t in_flight_ns, bool waits)
{
    uint64_t before = atomic_load(&credit->at_ns);
    bool begins = before == 0 || before > now_ns + SECOND_NS; /* a time in the future was not written by us */
    if ((now_ns <= before && !begins) || !atomic_compare_exchange_strong(&credit->at_ns, &before, now_ns))
        return;
    int64_t passed = begins ? 0 : gs_clamp((int64_t)(now_ns - before), 0, MOST_DEBT_NS);
    int64_t wanted = waits || in_flight_ns > passed ? passed : in_flight_ns;
    int64_t least = -(int64_t)(rate * LONGEST_WAIT_S * SECOND_NS), saved = MOST_SAVED_NS + in_flight_ns;
    bool idle = passed - wanted > IDLE_NS;
    if (wanted)
        give(credit, (int64_t)((double)wanted * rate), least, MOST_KEPT_NS, MOST_KEPT_NS);
    if (passed > wanted || !wanted)
        give(credit, (int64_t)((double)(passed - wanted) * rate), least, saved, idle ? saved + MOST_REFUND_NS : MOST_KEPT_NS);
}

static int64_t headroom(struct gpuslice_credit *credit, double rate, uint64_t now_ns, uint64_t in_flight_ns, bool waits)
{
    int64_t in_flight = in_flight_ns < (uint64_t)MOST_DEBT_NS ? (int64_t)in_flight_ns : MOST_DEBT_NS;
    accrue(credit, rate, now_ns, in_flight, waits);
    int64_t left = gs_clamp(atomic_load(&credit->ns), -MOST_DEBT_NS, MOST_DEBT_NS);
    return left - (int64_t)((double)in_flight * (1 - rate)); /* credit accrues while it runs */
}

int64_t gs_share_headroom(struct gpuslice_card *card, const struct gs_share *share, uint64_t now_ns, uint64_t in_flight_ns,
                          bool waits)
{
    return share->cap >= 100 ? MOST_SAVED_NS : headroom(&card->cap, share->cap / 100.0, now_ns, in_flight_ns, waits);
}

int64_t gs_share_owed_ns(struct gpuslice_card *card, const struct gs_share *share, uint64_t now_ns, uint64_t in_flight_ns,
                         bool waits)
{
    return headroom(&card->due, SURELY_DUE * gs_percent(share->weight) / 100.0, now_ns, in_flight_ns, waits);
}

void gs_share_accrue(struct gpuslice_card *card, const struct gs_share *share, uint64_t now_ns, uint64_t in_flight_ns,
                     bool waits)
{
    gs_share_headroom(card, share, now_ns, in_flight_ns, waits);
    gs_share_owed_ns(card, share, now_ns, in_flight_ns, waits);
}

uint64_t gs_share_wait_ns(const struct gs_share *share, int64_t headroom_ns)
{
    if (headroom_ns > 0)
        return LEAST_WAIT_NS;
    return (uint64_t)gs_clamp((1 - headroom_ns) * 100 / gs_percent(share->cap), LEAST_WAIT_NS, MOST_WAIT_NS);
}

/* ---- charges ---- */

int64_t gs_share_by_weight(const struct gs_share *share, int64_t own_ns) { return own_ns * 100 / gs_percent(share->weight); }

static void take_all(struct gpuslice_card *card, const struct gs_share *share, int64_t own_ns)
{
    atomic_fetch_add(&card->charged_ns, (uint64_t)own_ns);
    atomic_fetch_add(&card->virtual_ns, (uint64_t)gs_share_by_weight(share, own_ns));
    take(&card->cap, own_ns);
    take(&card->due, own_ns);
}

void gs_share_spend(struct gpuslice_card *card, const struct gs_share *share, uint64_t own_ns)
{
    take_all(card, share, own_ns < (uint64_t)MOST_DEBT_NS ? (int64_t)own_ns : MOST_DEBT_NS);
}

void gs_share_charge(struct gpuslice_card *card, const struct gs_share *share, struct gs_busy busy)
{
    uint64_t ns = busy.ns < (uint64_t)MOST_DEBT_NS ? busy.ns : (uint64_t)MOST_DEBT_NS;
    uint64_t own = busy.own_ns < ns ? busy.own_ns : ns;
    atomic_fetch_add(&card->busy_ns, ns);
    atomic_fetch_add(&card->billed_ns, own);
    gs_share_spend(card, share, own);
}

/* ---- corrections by NVML ---- */

bool gs_share_is_divided(struct gpuslice_card *card)
{
    return atomic_load_explicit(&card->recent_own_ns, memory_order_relaxed) <
           atomic_load_explicit(&card->recent_busy_ns, memory_order_relaxed);
}

double gs_share_sampled_part(struct gpuslice_card *card, uint64_t now_ns)
{
    int64_t busy = (int64_t)atomic_load(&card->recent_busy_ns), own = (int64_t)atomic_load(&card->recent_own_ns);
    bool known = now_ns - atomic_load(&card->learned_at_ns) < KNOWN_FOR_NS;
    return known && own > 0 && own <= busy && busy <= MOST_DEBT_NS ? (double)own / (double)busy : 0;
}

enum gs_share_ask gs_share_ask(struct gpuslice_card *card, uint64_t now_ns, uint64_t realtime_us)
{
    uint64_t last = atomic_load(&card->asked_at_ns), seen_us = atomic_load(&card->sampled_us);
    bool ahead = last > now_ns; /* not written by us */
    if (!ahead && (now_ns - last < ASK_AGAIN_NS || realtime_us - seen_us < SAMPLE_US))
        return GS_SHARE_NOT_NOW;
    if (!atomic_compare_exchange_strong(&card->asked_at_ns, &last, now_ns))
        return GS_SHARE_NOT_NOW;
    return ahead || now_ns - last > GAP_NS ? GS_SHARE_ASK_AFTER_GAP : GS_SHARE_ASK;
}

/* How much of the window the sample covers. After a gap it is the window's end: the rest counts as well if we were busy
 * throughout, otherwise nothing does. */
static int64_t covered_ns(int64_t window_ns, int64_t busy_ns, enum gs_share_ask how)
{
    if (how == GS_SHARE_ASK)
        return window_ns;
    return busy_ns >= window_ns * 8 / 10 ? busy_ns : 0;
}

static int64_t part(int64_t ns, int32_t percent) { return ns * gs_clamp(percent, 0, 100) / 100; }

/* The least of the busy time that can be our own: what others did not have of it, but at most an even part. Work that
 * lasts for several windows may have met others in earlier ones, yet the card gives each process with work its turn. */
static int64_t least_own_ns(const struct gs_share_sample *sample, int64_t covered_ns, int64_t busy_ns)
{
    int64_t even = busy_ns / (sample->listed ? sample->listed : 1);
    int64_t rest = busy_ns - part(covered_ns, sample->others_percent);
    return gs_clamp(rest, 0, even);
}

/* Adds to the recent past, which is limited to the busy time that the share allows in a second. */
static void remember(struct gpuslice_card *card, const struct gs_share *share, uint64_t now_ns, int64_t busy_ns, int64_t own_ns)
{
    int64_t most = SECOND_NS * gs_percent(share->weight) / 100;
    int64_t busy = gs_clamp((int64_t)atomic_load(&card->recent_busy_ns), 0, MOST_DEBT_NS) + busy_ns;
    int64_t own = gs_clamp((int64_t)atomic_load(&card->recent_own_ns), 0, MOST_DEBT_NS) + own_ns;
    if (busy > most) {
        own = (int64_t)((double)own * (double)most / (double)busy);
        busy = most;
    }
    atomic_store(&card->recent_busy_ns, (uint64_t)busy);
    atomic_store(&card->recent_own_ns, (uint64_t)own);
    atomic_store(&card->learned_at_ns, now_ns);
}

static void settle(struct gpuslice_card *card, const struct gs_share *share, int64_t charged_ns, int64_t own_ns,
                   int64_t in_flight_ns)
{
    int64_t most = MOST_SAVED_NS + in_flight_ns + MOST_REFUND_NS, refund = charged_ns - own_ns;
    if (refund <= 0) {
        take_all(card, share, -refund);
        return;
    }
    atomic_fetch_sub(&card->charged_ns, (uint64_t)refund);
    atomic_fetch_sub(&card->virtual_ns, (uint64_t)gs_share_by_weight(share, refund));
    give(&card->cap, refund, -MOST_DEBT_NS, most, MOST_KEPT_NS);
    give(&card->due, refund, -MOST_DEBT_NS, most, MOST_KEPT_NS);
}

/* ---- the past ---- */

#define MOMENT_NS 8000000u /* between two moments: two seconds in all */

static const struct gs_share_moment *moment(const struct gs_share_past *past, uint32_t number)
{
    return &past->moments[number % GS_SHARE_MOMENTS];
}

void gs_share_note(struct gs_share_past *past, struct gpuslice_card *card, uint64_t now_ns)
{
    if (past->count && now_ns - moment(past, past->count - 1)->at_ns < MOMENT_NS)
        return;
    past->moments[past->count++ % GS_SHARE_MOMENTS] =
        (struct gs_share_moment){now_ns, atomic_load(&card->busy_ns), atomic_load(&card->billed_ns)};
}

static uint64_t between(uint64_t from, uint64_t to, double part)
{
    return to > from ? from + (uint64_t)((double)(to - from) * part) : from;
}

/* The state of the account at `at_ns`, interpolated between two moments. False if nothing was noted that early. */
static bool account_at(const struct gs_share_past *past, const struct gs_share_moment *now, uint64_t at_ns,
                       struct gs_share_moment *account)
{
    uint32_t kept = past->count < GS_SHARE_MOMENTS ? past->count : GS_SHARE_MOMENTS;
    const struct gs_share_moment *after = now, *before;
    for (uint32_t back = 1; back <= kept; back++, after = before) {
        before = moment(past, past->count - back);
        if (before->at_ns > at_ns)
            continue;
        double part = after->at_ns > at_ns ? (double)(at_ns - before->at_ns) / (double)(after->at_ns - before->at_ns) : 1;
        *account = (struct gs_share_moment){at_ns, between(before->busy_ns, after->busy_ns, part),
                                            between(before->billed_ns, after->billed_ns, part)};
        return true;
    }
    return false;
}

/* ---- a sample ---- */

/* The account over the sample's window. */
struct window {
    int64_t ns, busy_ns, billed_ns;
};

/* The window begins where the last one ended, or, if another process settled that one, at the sample's own
 * beginning. */
static bool window_of(struct gs_share_past *past, const struct gs_share_moment *now, uint64_t from_ns, uint64_t until_ns,
                      struct window *window)
{
    struct gs_share_moment from = past->settled, until;
    uint64_t off_ns = from.at_ns > from_ns ? from.at_ns - from_ns : from_ns - from.at_ns;
    if (until_ns - from_ns > (uint64_t)MOST_DEBT_NS || !account_at(past, now, until_ns, &until))
        return false;
    past->settled = until;
    if (off_ns > MOMENT_NS && !account_at(past, now, from_ns, &from))
        return false;
    *window = (struct window){(int64_t)(until_ns - from_ns), gs_clamp((int64_t)(until.busy_ns - from.busy_ns), 0, MOST_DEBT_NS),
                              gs_clamp((int64_t)(until.billed_ns - from.billed_ns), 0, MOST_DEBT_NS)};
    return true;
}

void gs_share_learn(struct gpuslice_card *card, const struct gs_share *share, uint64_t now_ns, uint64_t in_flight_ns,
                    struct gs_share_past *past, const struct gs_share_sample *sample, uint64_t until_ns, enum gs_share_ask how)
{
    struct gs_share_moment now = {now_ns, atomic_load(&card->busy_ns), atomic_load(&card->billed_ns)};
    uint64_t from_us = atomic_load(&card->sampled_us), from_ns = until_ns - (sample->until_us - from_us) * 1000;
    struct window window;
    if (sample->until_us == from_us || !atomic_compare_exchange_strong(&card->sampled_us, &from_us, sample->until_us))
        return;
    int64_t covered = window_of(past, &now, from_ns, until_ns, &window) ? covered_ns(window.ns, window.busy_ns, how) : 0;
    bool is_device_time = sample->own_percent > 0 && sample->own_percent + sample->others_percent <= MOST_SAMPLED;
    if (!is_device_time || covered <= 0) {
        atomic_store(&card->unsettled_ns, 0);
        return;
    }
    /* What was sampled beyond our busy time belongs to work in flight whose event has not passed yet. */
    int64_t in_flight = gs_clamp((int64_t)in_flight_ns, 0, MOST_DEBT_NS);
    int64_t seen = gs_clamp((int64_t)atomic_load(&card->unsettled_ns), 0, MOST_DEBT_NS) + part(covered, sample->own_percent);
    int64_t own = gs_clamp(seen, least_own_ns(sample, covered, window.busy_ns), window.busy_ns);
    atomic_store(&card->unsettled_ns, (uint64_t)gs_clamp(seen - own, 0, in_flight));
    settle(card, share, window.billed_ns, own, in_flight);
    remember(card, share, now_ns, window.busy_ns, own);
}
