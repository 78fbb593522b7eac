/* What nobody uses is lent: who may go next of the containers on a card that tell each other what they use. */
#ifndef GPUSLICE_FAIRNESS_H
#define GPUSLICE_FAIRNESS_H

#include "policy/share.h"

#define GS_NEIGHBOURS 32u
/* A change to another process and back costs the card more than to wait for so long: who pauses for less keeps its turn. */
#define GS_CHANGE_NS UINT64_C(150000)
/* Who waits looks every few milliseconds, on a busy host somewhat later. One that did not for so long was stopped. */
#define GS_STOPPED_NS UINT64_C(200000000)
#define GS_LONGEST_PAUSE_NS UINT64_C(2000000) /* of a program that is said to pause, and not to rest */
#define GS_TURN_NS UINT64_C(2000000) /* a driver's default time slice for a process; work that ends in its turn gives up the rest */

/* Work on the card without a pause. */
struct gs_run {
    uint64_t from_ns, to_ns;
};

/* What is known of another container on the card. */
struct gs_neighbour {
    uint64_t name;       /* the agent's for it: it cannot change that */
    uint64_t virtual_ns; /* its work under way included; and for which it held this container back, if that is more */
    uint64_t busy_ns;    /* ever, as far as is known now */
    uint32_t weight;
    bool interactive;
    bool wants;       /* the card, now */
    bool overdrawn;   /* it began its turn further ahead than one that takes turns would */
    uint64_t ends_ns; /* when its work on the card will have ended, as far as is known; 0: it has none */
    uint64_t pause_ns; /* how long after that it launches again, in the mean */
    /* As it told them: it knows of its own work alone how much of the card that needs, and not who else is there. */
    struct gs_report {
        uint64_t at_ns, work_ns, busy_ns, wants_until_ns;
        struct gs_run ran; /* before that */
        bool has_turn; /* it does not wait, and had work a moment ago at the least */
        bool unknown;  /* nobody knows how long the work takes */
    } report;
};

/* What one neighbour's claims have cost this container so far, by the container's own clock. */
struct gs_bill {
    uint64_t name;       /* whose; 0: nobody's */
    uint64_t virtual_ns; /* as of a container that has worked while it held this one back */
    uint64_t done_ns;    /* the most of that it ever said it had done */
    uint64_t turn_virtual_ns, turn_left_ns; /* virtual_ns when its turn began; what it may still last */
    bool in_turn;
};

/* All that is known of them; zeros: nothing. */
struct gs_neighbourhood {
    struct gs_neighbour others[GS_NEIGHBOURS];
    uint32_t count;
    struct gs_bill bills[GS_NEIGHBOURS];
    uint64_t billed_ns; /* up to when */
    uint64_t read_ns;
    uint64_t busy_ns;    /* what they were at work since they were first read, all together */
    double rest_at_work; /* how many of the container's other processes were at work in the last interval, in the mean */
    uint64_t container_busy_ns, own_busy_ns; /* at read_ns; this process's since then */
};

/* Work of all processes of a container. */
struct gs_under_way {
    uint64_t ns;      /* as estimated */
    uint64_t unknown; /* launches of which nobody knows how long they take */
    struct gs_run ran; /* the last of this process that has ended */
    uint64_t uncharged_ns; /* how long this process has had it without being charged for that */
    uint64_t pause_ns; /* between the end of all of it and the next launch, of this process in the mean */
    bool awaited;      /* the program waits for the card now and then: it tells the end, too */
};

/* What a container tells: what it has under way, the end of its work as far as known, whether it waits. */
struct gpuslice_claim gs_claim(const struct gpuslice_card *card, const struct gs_share *share, uint64_t now_ns,
                               struct gs_under_way work, bool waits);
/* What a claim says now, by itself. */
struct gs_neighbour gs_heard(const struct gpuslice_claim *claim, uint64_t now_ns);
/* `own`: the run of this process, of which the end may lie ahead. */
void gs_neighbourhood_update(struct gs_neighbourhood *beside, struct gpuslice_card *card, uint64_t now_ns,
                             const struct gs_neighbour *others, uint32_t count, struct gs_run own);
/* A claim costs its maker what the work would: the time since the last bill, or since this container was held back for it, if that
 * is later; UINT64_MAX: that is not known yet. Behind each gs_neighbourhood_update. */
void gs_neighbourhood_bill(struct gs_neighbourhood *beside, const struct gpuslice_card *card, const struct gs_share *share,
                           uint64_t now_ns, uint64_t held_since_ns);
/* Its own run is known better now: others' work ends earlier or later by that. */
void gs_neighbourhood_divide(struct gs_neighbourhood *beside, uint64_t now_ns, struct gs_run own);

/* The device time by which this container is ahead of the neighbour furthest behind that wants the card; INT64_MIN if
 * none does. Interactive ones have a head start. One that pauses between two kernels wants it as far as a launch that is
 * expected to take `estimate_ns` would keep it waiting. */
int64_t gs_lead_ns(const struct gpuslice_card *card, const struct gs_share *share, uint64_t in_flight_ns,
                   const struct gs_neighbourhood *beside, uint64_t now_ns, uint64_t estimate_ns);
/* For so long after its work's end a neighbour keeps its turn. */
uint64_t gs_hold_ns(const struct gs_neighbour *other);
/* By which it is ahead of this one, as device time of that one. */
int64_t gs_lead_over_ns(const struct gpuslice_card *card, const struct gs_share *share, uint64_t in_flight_ns,
                        const struct gs_neighbour *other);
/* The container has work again: what it did not use while it had none is not saved up. `awaited_ns`: when its program last
 * came back from waiting for the card. */
void gs_wake(struct gpuslice_card *card, uint64_t now_ns, uint64_t awaited_ns, const struct gs_neighbourhood *beside);
/* Has work or waits, now. */
void gs_stay(struct gpuslice_card *card, uint64_t now_ns);
/* Nobody of it has looked for so long that no busy host explains it, nor work that takes so long: it wakes, as if it had not
 * waited. */
bool gs_was_stopped(const struct gpuslice_card *card, uint64_t now_ns, uint64_t busy_ns);

/* The part of busy time that was our own, neighbours that tell apart: as NVML's samples have it where there are none of
 * these. Else as of a card that gives each process of the container with work an even part of its time. */
struct gs_own_part gs_own_part(struct gpuslice_card *card, uint64_t now_ns, const struct gs_neighbourhood *beside);

#endif
