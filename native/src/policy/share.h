/* How much of a card's time a container may still use: arithmetic on its entry in the region, time and measurements
 * handed in. Nothing here asks the driver, the clock or the kernel, so that it can be tried out in virtual time. */
#ifndef GPUSLICE_SHARE_H
#define GPUSLICE_SHARE_H

#include <stdbool.h>
#include <stdint.h>

#include "region.h"

/* What NVML says of the card's processes: up to when, ours and the others together, and how many there are. */
struct gs_share_sample {
    uint64_t until_us;
    int32_t own_percent; /* 0 too if none of them is known to be ours */
    int32_t others_percent;
    uint32_t listed;
};

/* A container's part of one card's compute, from its limits file; all in percent of the card. */
struct gs_share {
    uint32_t weight; /* what it is due while others want the rest; 0: nothing is limited */
    uint32_t cap;    /* the most, no matter who else is idle; 100: what nobody wants is lent to it */
    bool interactive;
};

/* The cap lets a launch go while this is above zero. `in_flight_ns`: of the whole container, as estimated; `waits`: it has
 * wanted to launch since it last asked. */
int64_t gs_share_headroom(struct gpuslice_card *card, const struct gs_share *share, uint64_t now_ns, uint64_t in_flight_ns,
                          bool waits);
/* Before what has finished is charged: it had its credit coming. */
void gs_share_accrue(struct gpuslice_card *card, const struct gs_share *share, uint64_t now_ns, uint64_t in_flight_ns,
                     bool waits);
/* How long the cap may make a launch wait before it looks again. */
uint64_t gs_share_wait_ns(const struct gs_share *share, int64_t headroom_ns);
/* What of busy time was a process's own. On a card that others use too it has their turns between its own; but a run of
 * work begins with a turn of its own, in which nobody else has the card. */
struct gs_own_part {
    double part;      /* from 0 to 1 */
    uint64_t turn_ns; /* of which all was its own, at the beginning of each run; 0: `part` says it of all */
    uint64_t others_ns; /* how long neighbours that tell were at work, ever */
};
/* Work kept a process busy for so long, others' turns included, of which it is charged its own. */
struct gs_busy {
    uint64_t ns, own_ns;
};
void gs_share_charge(struct gpuslice_card *card, const struct gs_share *share, struct gs_busy busy);
/* Work that could not be timed. */
void gs_share_spend(struct gpuslice_card *card, const struct gs_share *share, uint64_t own_ns);

/* What it had less than it is due, whatever neighbours say of themselves; below zero it had more. */
int64_t gs_share_owed_ns(struct gpuslice_card *card, const struct gs_share *share, uint64_t now_ns, uint64_t in_flight_ns,
                         bool waits);

/* Whether less than busy time is charged: then samples must be followed, also while nobody waits. */
bool gs_share_is_divided(struct gpuslice_card *card);
/* The part of busy time that was our own, as NVML's last samples have it; 0 where they are too old to tell. */
double gs_share_sampled_part(struct gpuslice_card *card, uint64_t now_ns);
/* Device time as virtual time. */
int64_t gs_share_by_weight(const struct gs_share *share, int64_t own_ns);

enum gs_share_ask { GS_SHARE_NOT_NOW, GS_SHARE_ASK, GS_SHARE_ASK_AFTER_GAP };
/* Whether NVML may have something new, said to one caller at a time; `after gap` when nobody asked for so long that
 * samples may have gone by unseen. `realtime_us` is on the clock of the samples. */
enum gs_share_ask gs_share_ask(struct gpuslice_card *card, uint64_t now_ns, uint64_t realtime_us);

/* How far the account was at some moments of the last seconds: samples may be that old when they come. A process's own;
 * zeros are an empty one. */
#define GS_SHARE_MOMENTS 256u
struct gs_share_past {
    struct gs_share_moment {
        uint64_t at_ns, busy_ns, billed_ns;
    } moments[GS_SHARE_MOMENTS]; /* a ring */
    uint32_t count;              /* ever */
    struct gs_share_moment settled; /* the end of the last sample's window */
};
void gs_share_note(struct gs_share_past *past, struct gpuslice_card *card, uint64_t now_ns);
/* `until_ns`: of the sample, on the clock of `now_ns`. */
void gs_share_learn(struct gpuslice_card *card, const struct gs_share *share, uint64_t now_ns, uint64_t in_flight_ns,
                    struct gs_share_past *past, const struct gs_share_sample *sample, uint64_t until_ns,
                    enum gs_share_ask how);

#endif
