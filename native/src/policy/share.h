/* How much of a card's time a container may still use: arithmetic on its entry in the region, with time and
 * measurements passed in. Nothing here calls the driver, the clock or the kernel, so that tests can run it in virtual
 * time. */
#ifndef GPUSLICE_SHARE_H
#define GPUSLICE_SHARE_H

#include <stdbool.h>
#include <stdint.h>

#include "region.h"

/* What NVML reports about the card's processes: up to when, the use by ours and by the others, and how many are
 * listed. */
struct gs_share_sample {
    uint64_t until_us;
    int32_t own_percent; /* also 0 if none of them is known to be ours */
    int32_t others_percent;
    uint32_t listed;
};

/* A container's part of one card's compute, from its limits file; all in percent of the card. */
struct gs_share {
    uint32_t weight; /* what it is due while others want the rest; 0: no limit */
    uint32_t cap;    /* the most it may use, even if others are idle; 100: unused compute is lent to it */
    bool interactive;
};

static inline int64_t gs_clamp(int64_t value, int64_t least, int64_t most)
{
    return value < least ? least : value > most ? most : value;
}
static inline uint32_t gs_percent(uint64_t value) { return value < 1 ? 1 : value > 100 ? 100 : (uint32_t)value; }

/* Headroom under the cap, in ns of device time: a launch may go while it is above zero. `in_flight_ns`: of the whole
 * container, estimated; `waits`: it has wanted to launch since the last call. */
int64_t gs_share_headroom(struct gpuslice_card *card, const struct gs_share *share, uint64_t now_ns, uint64_t in_flight_ns,
                          bool waits);
/* Adds the credit that has accrued up to now. To be called before finished work is charged. */
void gs_share_accrue(struct gpuslice_card *card, const struct gs_share *share, uint64_t now_ns, uint64_t in_flight_ns,
                     bool waits);
/* How long a launch that the cap holds back waits before it looks again. */
uint64_t gs_share_wait_ns(const struct gs_share *share, int64_t headroom_ns);
/* Which part of busy time was a process's own. On a card that others use too, busy time contains their turns; but a run
 * of work begins with a turn of its own, in which no other process has the card. */
struct gs_own_part {
    double part;        /* from 0 to 1 */
    uint64_t turn_ns;   /* the beginning of each run that is all its own; 0: `part` applies to all of it */
    uint64_t others_ns; /* how long neighbours that publish it have worked, in total */
};
/* How long work kept a process busy, others' turns included, and how much of that is charged as its own. */
struct gs_busy {
    uint64_t ns, own_ns;
};
void gs_share_charge(struct gpuslice_card *card, const struct gs_share *share, struct gs_busy busy);
/* Charges work that could not be timed. */
void gs_share_spend(struct gpuslice_card *card, const struct gs_share *share, uint64_t own_ns);

/* How much less device time the container had than it is due, whatever neighbours claim; below zero it had more. */
int64_t gs_share_owed_ns(struct gpuslice_card *card, const struct gs_share *share, uint64_t now_ns, uint64_t in_flight_ns,
                         bool waits);

/* Whether less than the busy time is charged: then samples must be read even while nothing waits. */
bool gs_share_is_divided(struct gpuslice_card *card);
/* Our own part of busy time according to NVML's last samples; 0 if they are too old to say. */
double gs_share_sampled_part(struct gpuslice_card *card, uint64_t now_ns);
/* Converts device time to virtual time. */
int64_t gs_share_by_weight(const struct gs_share *share, int64_t own_ns);

enum gs_share_ask { GS_SHARE_NOT_NOW, GS_SHARE_ASK, GS_SHARE_ASK_AFTER_GAP };
/* Whether NVML may have a new sample; only one caller at a time is sent to ask. GS_SHARE_ASK_AFTER_GAP: nobody asked
 * for so long that samples may have been missed. `realtime_us` is on the samples' clock. */
enum gs_share_ask gs_share_ask(struct gpuslice_card *card, uint64_t now_ns, uint64_t realtime_us);

/* The state of the account at moments of the last seconds, because samples arrive that late. One per process; zeros are
 * an empty one. */
#define GS_SHARE_MOMENTS 256u
struct gs_share_past {
    struct gs_share_moment {
        uint64_t at_ns, busy_ns, billed_ns;
    } moments[GS_SHARE_MOMENTS];    /* a ring */
    uint32_t count;                 /* in total */
    struct gs_share_moment settled; /* the end of the last sample's window */
};
void gs_share_note(struct gs_share_past *past, struct gpuslice_card *card, uint64_t now_ns);
/* `until_ns`: the sample's end, on the clock of `now_ns`. */
void gs_share_learn(struct gpuslice_card *card, const struct gs_share *share, uint64_t now_ns, uint64_t in_flight_ns,
                    struct gs_share_past *past, const struct gs_share_sample *sample, uint64_t until_ns, enum gs_share_ask how);

#endif
