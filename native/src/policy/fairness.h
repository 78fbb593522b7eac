/* Lends unused compute: decides which of the containers on a card that publish what they use may go next. */
#ifndef GPUSLICE_FAIRNESS_H
#define GPUSLICE_FAIRNESS_H

#include "policy/share.h"

#define GS_NEIGHBOURS 32u
/* Switching to another process and back costs the card more than idling for this long: a container that pauses for less
 * keeps its turn. */
#define GS_CHANGE_NS UINT64_C(150000)
/* A container that waits looks every few milliseconds, on a busy host somewhat later. One that has not looked for this
 * long was stopped. */
#define GS_STOPPED_NS UINT64_C(200000000)
#define GS_RESTS_NS UINT64_C(1000000000)      /* who has not wanted the card for this long rests */
#define GS_LONGEST_PAUSE_NS UINT64_C(2000000) /* a longer gap between two launches is idle time, not a pause */
#define GS_TURN_NS UINT64_C(2000000)          /* a driver's default time slice; work that ends earlier gives up the rest */

/* An interval in which work was on the card without a pause. */
struct gs_run {
    uint64_t from_ns, to_ns;
};

/* What is known about another container on the card. */
struct gs_neighbour {
    uint64_t name;       /* given by the agent: the neighbour cannot change it */
    uint64_t virtual_ns; /* work in flight included; or by how long it held this container back, if more */
    uint64_t busy_ns;    /* total, as far as is known now */
    uint32_t weight;
    bool interactive;
    bool wants;        /* it wants the card now */
    bool overdrawn;    /* it began its turn further ahead than a container that takes turns would */
    uint64_t ends_ns;  /* when its work on the card will have ended, as far as is known; 0: it has none */
    uint64_t pause_ns; /* mean time from then to its next launch */
    /* As published by it: it knows how much device time its own work needs, but not who else uses the card. */
    struct gs_report {
        uint64_t at_ns, work_ns, busy_ns, wants_until_ns;
        struct gs_run ran; /* its last run before that */
        bool has_turn;     /* it does not wait, and had work at least a moment ago */
        bool unknown;      /* the duration of its work is unknown */
    } report;
};

/* What one neighbour's claims have cost this container so far, by this container's own clock. */
struct gs_bill {
    uint64_t name;       /* of the neighbour; 0: unused */
    uint64_t virtual_ns; /* what it would be if the neighbour had worked whenever it held this container back */
    uint64_t done_ns;    /* the most finished work that it ever claimed, as virtual time */
    uint64_t turn_virtual_ns, turn_left_ns; /* virtual_ns when its turn began; how much longer the turn may last */
    bool in_turn;
};

/* All that is known about the neighbours; zeros: nothing. */
struct gs_neighbourhood {
    struct gs_neighbour others[GS_NEIGHBOURS];
    uint32_t count;
    struct gs_bill bills[GS_NEIGHBOURS];
    uint64_t billed_ns; /* monotonic time up to which they are billed */
    uint64_t read_ns;
    uint64_t busy_ns;    /* how long they worked since they were first read, all together */
    double rest_at_work; /* mean number of the container's other processes that worked in the last interval */
    uint64_t container_busy_ns, own_busy_ns; /* the container's at read_ns; this process's since then */
};

/* Work in flight of all processes of a container. */
struct gs_under_way {
    uint64_t ns;           /* estimated */
    uint64_t unknown;      /* number of launches of unknown duration */
    struct gs_run ran;     /* this process's last run that has ended */
    uint64_t uncharged_ns; /* how long this process has had work in flight that is not charged yet */
    uint64_t pause_ns;     /* this process's mean time from the end of all its work to its next launch */
    bool awaited;          /* the program waits for the card now and then, and so publishes the end of its work, too */
};

/* What a container publishes: its work in flight, when that ends as far as is known, and whether the container
 * waits. */
struct gpuslice_claim gs_claim(const struct gpuslice_card *card, const struct gs_share *share, uint64_t now_ns,
                               struct gs_under_way work, bool waits);
/* What a claim means at `now_ns`, taken by itself. */
struct gs_neighbour gs_heard(const struct gpuslice_claim *claim, uint64_t now_ns);
/* `own`: the run of this process, whose end may lie in the future. */
void gs_neighbourhood_update(struct gs_neighbourhood *beside, struct gpuslice_card *card, uint64_t now_ns,
                             const struct gs_neighbour *others, uint32_t count, struct gs_run own);
/* Charges neighbours for their claims as if the claimed work had been done: for the time since the last bill or, if
 * that is later, since `held_since_ns`, when this container began to be held back; UINT64_MAX: that is not known yet.
 * To be called after each gs_neighbourhood_update(). */
void gs_neighbourhood_bill(struct gs_neighbourhood *beside, const struct gpuslice_card *card, const struct gs_share *share,
                           uint64_t now_ns, uint64_t held_since_ns);
/* Recomputes when the neighbours' work ends, now that more is known about this process's own run. */
void gs_neighbourhood_divide(struct gs_neighbourhood *beside, uint64_t now_ns, struct gs_run own);

/* The device time by which this container is ahead of the neighbour furthest behind that wants the card; INT64_MIN if
 * none does. Interactive containers have a head start. A neighbour that pauses between two kernels counts only if a
 * launch that is expected to take `estimate_ns` would last beyond the pause. */
int64_t gs_lead_ns(const struct gpuslice_card *card, const struct gs_share *share, uint64_t in_flight_ns,
                   const struct gs_neighbourhood *beside, uint64_t now_ns, uint64_t estimate_ns);
/* Whether no neighbour has wanted the card for a while, even if its work took twice as long as it expected. */
bool gs_all_rest(const struct gs_neighbourhood *beside, uint64_t now_ns);
/* How long a neighbour keeps its turn after its work has ended. */
uint64_t gs_hold_ns(const struct gs_neighbour *other);
/* The lead over this one neighbour, converted to device time by the neighbour's weight. */
int64_t gs_lead_over_ns(const struct gpuslice_card *card, const struct gs_share *share, uint64_t in_flight_ns,
                        const struct gs_neighbour *other);
/* The container has work again: it saves up nothing for the time without work. `awaited_ns`: when its program last
 * returned from waiting for the card. */
void gs_wake(struct gpuslice_card *card, uint64_t now_ns, uint64_t awaited_ns, const struct gs_neighbourhood *beside);
/* Notes that the container has work or waits at `now_ns`. */
void gs_stay(struct gpuslice_card *card, uint64_t now_ns);
/* Whether no process of the container has looked for longer than a busy host or `busy_ns` of work can explain: then it
 * is treated as waking up, not as having waited. */
bool gs_was_stopped(const struct gpuslice_card *card, uint64_t now_ns, uint64_t busy_ns);

/* Which part of the busy time was this process's own, apart from the time of neighbours that publish theirs. Without
 * such neighbours NVML's samples say it. Otherwise the card is taken to divide its time evenly among the processes of
 * the container that have work. */
struct gs_own_part gs_own_part(struct gpuslice_card *card, uint64_t now_ns, const struct gs_neighbourhood *beside);

#endif
