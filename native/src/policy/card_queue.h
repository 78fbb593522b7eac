/* This process's work on one card, from its launch to its charge: which streams have work under way, for how long they
 * kept the card busy, and whether one more launch may go. Nothing here asks the driver, the clock or the kernel by itself,
 * so that it can be tried out in virtual time. */
#ifndef GPUSLICE_CARD_QUEUE_H
#define GPUSLICE_CARD_QUEUE_H

#include "policy/fairness.h"

#define GS_BATCHES 64u
#define GS_BATCH_LAUNCHES 16u
#define GS_KEYS 1024u

/* What is launched: work of the same key is expected to take as long as last time; a kernel never seen with so many
 * blocks, as long as with others. The function's in the low half, function and blocks in the high half. */
static inline uint64_t gs_work_key(const void *what, uint64_t blocks)
{
    uint64_t function = (uint64_t)(uintptr_t)what * UINT64_C(0x9e3779b97f4a7c15) >> 32;
    uint64_t both = (((uint64_t)(uintptr_t)what ^ blocks * UINT64_C(0x9e3779b97f4a7c15)) * UINT64_C(0xff51afd7ed558ccd)) >> 32;
    return both << 32 | function;
}

struct gs_stream {
    void *context, *handle;
    uint64_t thread; /* whose own default stream it is: nobody else can reach that; 0 of any other */
};

/* The driver's events. */
enum gs_event_state { GS_EVENT_PENDING, GS_EVENT_PASSED, GS_EVENT_LOST };
struct gs_events {
    void *(*create)(const struct gs_stream *stream);
    bool (*record)(void *event, const struct gs_stream *stream);
    bool (*record_late)(void *event, const struct gs_stream *stream); /* by a thread that is not launching there */
    enum gs_event_state (*query)(void *event);
    bool (*elapsed)(void *from, void *to, uint64_t *ns);
};

/* Launches on one stream that are timed together: from before the first to behind the last. */
struct gs_batch {
    struct gs_stream stream;
    void *start, *end;
    struct {
        uint16_t key, function;
        uint32_t estimate_ns;
    } launched[GS_BATCH_LAUNCHES];
    uint32_t launches;
    uint32_t begun;         /* of them not with the driver yet: nothing can be said of the batch before */
    uint32_t behind;        /* 1 + the number of the batch in front of it on its stream; 0: none */
    uint64_t number;        /* later ones have higher ones */
    uint64_t estimate_ns;   /* of all launches */
    uint64_t in_flight_ns;  /* what of it is still to come */
    uint64_t recorded_ns;   /* when `start` was given to the driver */
    uint64_t last_ns;       /* when the last launch was */
    uint64_t ready_ns;      /* when the batch in front of it ended */
    uint64_t waited_ns;     /* when `start` was last seen not to be passed */
    uint64_t others_ns;     /* how long neighbours had been at work when it could have begun */
    uint64_t unfinished_ns; /* when it was last seen to be under way */
    bool taken, open;
    bool fresh;   /* `end` stands right behind the last launch */
    bool late;    /* it was put there only when something else came up */
    bool running; /* `start` was passed */
    bool unknown; /* nobody knows how long it takes */
    bool gone;    /* its context is: it ran until then */
    bool unmarked; /* no event tells its end: it is taken for as long as expected */
};

/* Zeros are an empty one. */
struct gs_queue {
    uint64_t batches_ever;
    uint64_t in_flight_ns; /* of all batches */
    uint64_t run_ns;       /* how long it has had work without a pause, up to covered_ns */
    uint64_t covered_ns;   /* busy time up to here is charged: work on several streams at once is busy once */
    uint64_t turned_ns;    /* when work was last seen to wait for the card: processes take turns */
    uint64_t finished_ns;  /* when work was last seen to have finished */
    uint64_t awaited_ns;   /* when the program last came back from waiting for the card */
    uint64_t pause_ns;     /* from then, or the end of all work, to the next launch, in the mean */
    uint64_t ended_ns;     /* when the program came back from waiting, as long as that is not accounted for; 0: it is */
    bool next_cleared;     /* atomic: the next launch may go as soon as what is under way has been awaited */
    uint32_t waited;       /* of the last work that was awaited, how much began late */
    uint32_t count;        /* of batches */
    uint32_t unknown;      /* of these, nobody knows how long they take */
    uint32_t average_ns[GS_KEYS]; /* of a launch, by key; 0 unknown */
    uint32_t function_ns[GS_KEYS];
    uint64_t others_ns;    /* how long neighbours were at work, ever */
    struct gs_batch batches[GS_BATCHES];
};

/* Room in a batch for one more launch on the stream; NULL: it goes untimed. */
struct gs_batch *gs_queue_begin(struct gs_queue *queue, const struct gs_events *events, const struct gs_stream *stream,
                                uint64_t key, uint64_t now_ns);
/* A launch comes, before it waits for anything: what paused for it is over. */
void gs_queue_arrive(struct gs_queue *queue, uint64_t now_ns);
/* The next launch comes so soon after the last work's end that a turn goes on. */
static inline bool gs_pauses_briefly(const struct gs_queue *queue) { return queue->pause_ns < GS_CHANGE_NS; }
/* The driver has it. */
void gs_queue_end(struct gs_batch *batch, const struct gs_events *events, bool launched);
/* A stream is about to be destroyed, or a context has been: from then on nothing may be asked of it or of its events. */
void gs_queue_stream_ends(struct gs_queue *queue, const struct gs_events *events, void *handle);
void gs_queue_context_ended(struct gs_queue *queue, void *context, uint64_t now_ns);
/* How long such work is expected to take; a guess for what is unknown. */
uint64_t gs_queue_estimate_ns(const struct gs_queue *queue, uint64_t key);
/* What has finished, on any stream; answers for how long the process had work under way since it was last asked.
 * `paused`: its threads wait, so that no launch will follow closely on the last ones. `part`: of it that is its own. */
struct gs_busy gs_queue_look(struct gs_queue *queue, const struct gs_events *events, uint64_t now_ns, bool paused,
                             struct gs_own_part part);

/* A program has come back from waiting for all of it. If it ended long ago, a stopped process did not come back before. */
static inline void gs_queue_awaited(struct gs_queue *queue, uint64_t now_ns)
{
    if (!queue->count && now_ns - queue->covered_ns > GS_STOPPED_NS)
        queue->awaited_ns = queue->covered_ns;
}
/* The last run of work that is charged; and with what is under way, to its end. */
static inline struct gs_run gs_queue_ran(const struct gs_queue *queue)
{
    return (struct gs_run){queue->covered_ns - queue->run_ns, queue->covered_ns};
}
struct gs_run gs_queue_run(const struct gs_queue *queue, uint64_t now_ns);
/* Of it, what is not charged yet. */
uint64_t gs_queue_uncharged_ns(const struct gs_queue *queue, uint64_t now_ns);

/* What a launch meets. */
struct gs_contention {
    uint64_t now_ns, waited_ns;
    uint64_t in_flight_ns; /* of the container */
    uint64_t unknown;      /* likewise */
    const struct gs_neighbourhood *beside;
};
/* How long the launch must wait before it asks again; 0: it may go. */
uint64_t gs_queue_wait_ns(const struct gs_queue *queue, struct gpuslice_card *card, const struct gs_share *share,
                          const struct gs_contention *met, const struct gs_stream *stream, uint64_t key);

/* Programs that wait for each kernel leave the card idle for as long as their next launch is being decided on. So it is
 * decided while a kernel runs whether another short one may follow; if so, the accounts are done after that launch. */
static inline bool gs_queue_is_alone(const struct gs_queue *queue, const struct gs_batch *batch)
{
    return queue->count == 1 && batch->launches == 1;
}
void gs_queue_clear_next(struct gs_queue *queue, struct gpuslice_card *card, const struct gs_share *share,
                         const struct gs_contention *met, const struct gs_stream *stream, uint64_t key);
/* Whether this launch is the one that was cleared, and comes at once. */
bool gs_queue_is_cleared(struct gs_queue *queue, uint64_t key, uint64_t now_ns);

#endif
