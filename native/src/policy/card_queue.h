/* This process's work on one card, from launch to charge: which streams have work in flight, how long they kept the
 * card busy, and whether another launch may go. Nothing here calls the driver, the clock or the kernel by itself, so
 * that tests can run it in virtual time. */
#ifndef GPUSLICE_CARD_QUEUE_H
#define GPUSLICE_CARD_QUEUE_H

#include "policy/fairness.h"

#define GS_BATCHES 64u
#define GS_BATCH_LAUNCHES 16u
#define GS_KEYS 1024u

/* Key of a launch: work with the same key is expected to take as long as last time; a kernel never seen with this
 * number of blocks, as long as with other numbers. The low half identifies the function, the high half the function and
 * its blocks. */
static inline uint64_t gs_work_key(const void *what, uint64_t blocks)
{
    uint64_t function = (uint64_t)(uintptr_t)what * UINT64_C(0x9e3779b97f4a7c15) >> 32;
    uint64_t both = (((uint64_t)(uintptr_t)what ^ blocks * UINT64_C(0x9e3779b97f4a7c15)) * UINT64_C(0xff51afd7ed558ccd)) >> 32;
    return both << 32 | function;
}

struct gs_stream {
    void *context, *handle;
    uint64_t thread; /* the thread whose own default stream it is, which no other thread can reach; 0 for other streams */
};

/* The driver's event functions. */
struct gs_events {
    void *(*create)(const struct gs_stream *stream);
    bool (*record)(void *event, const struct gs_stream *stream);
    bool (*record_late)(void *event, const struct gs_stream *stream); /* by a thread that is not launching on that stream */
    bool (*is_pending)(void *event);
    bool (*elapsed)(void *from, void *to, uint64_t *ns);
};

/* Launches on one stream that are timed together: one event precedes the first, one follows the last. */
struct gs_batch {
    struct gs_stream stream;
    void *start, *end;
    struct {
        uint16_t key, function;
        uint32_t estimate_ns;
    } launched[GS_BATCH_LAUNCHES];
    uint32_t launches;
    uint32_t begun;         /* launches that the driver does not have yet: until then the batch cannot be queried */
    uint32_t behind;        /* 1 + the index of the batch in front of it on its stream; 0: none */
    uint64_t number;        /* later batches have higher numbers */
    uint64_t estimate_ns;   /* of all launches */
    uint64_t in_flight_ns;  /* estimated time that is still to come */
    uint64_t ahead_ns;      /* of the batches in front of it on its stream, likewise; only kept of the last one there */
    uint64_t recorded_ns;   /* when `start` was recorded */
    uint64_t last_ns;       /* when the last launch was made */
    uint64_t ready_ns;      /* when the batch in front of it ended */
    uint64_t waited_ns;     /* when `start` was last seen pending */
    uint64_t others_ns;     /* how long neighbours had worked in total when this batch could have begun */
    uint64_t unfinished_ns; /* when it was last seen unfinished */
    bool taken, open;
    bool fresh;    /* `end` directly follows the last launch */
    bool late;     /* `end` was recorded later, when the batch had to be closed */
    bool running;  /* `start` has passed */
    bool unknown;  /* its duration is unknown */
    bool ending;   /* its context is being destroyed: its events may not be queried */
    bool gone;     /* its context was destroyed: it ran until then */
    bool unmarked; /* no event marks its end: it is assumed to take as long as expected */
};

/* Zeros are an empty queue. */
struct gs_queue {
    uint64_t batches_ever;
    uint64_t in_flight_ns;        /* on the stream that has most */
    uint64_t run_ns;              /* how long it has had work without a pause, up to covered_ns */
    uint64_t covered_ns;          /* busy time up to here is charged; work on several streams at once counts once */
    uint64_t turned_ns;           /* when work was last seen waiting for the card: processes take turns */
    uint64_t finished_ns;         /* when work was last seen to have finished */
    uint64_t awaited_ns;          /* when the program last returned from waiting for the card */
    uint64_t pause_ns;            /* mean time from then, or from the end of all work, to the next launch */
    uint64_t ended_ns;            /* when the program returned from waiting, while that is not accounted for; 0: it is */
    bool next_cleared;            /* atomic: the next launch may go as soon as the program has waited for the work in flight */
    uint32_t waited;              /* counts awaited work that began late up, other awaited work down */
    uint32_t count;               /* of batches */
    uint32_t unknown;             /* of these, of unknown duration */
    uint32_t average_ns[GS_KEYS]; /* of a launch, by key; 0: unknown */
    uint32_t function_ns[GS_KEYS];
    uint64_t others_ns; /* how long neighbours have worked, in total */
    struct gs_batch batches[GS_BATCHES];
};

/* A batch with room for one more launch on the stream; NULL: the launch is not timed. */
struct gs_batch *gs_queue_begin(struct gs_queue *queue, const struct gs_events *events, const struct gs_stream *stream,
                                uint64_t key, uint64_t now_ns);
/* A launch arrives, before it waits for anything: the pause before it is over. */
void gs_queue_arrive(struct gs_queue *queue, uint64_t now_ns);
/* Whether the next launch follows the end of the last work so soon that the turn continues. */
static inline bool gs_pauses_briefly(const struct gs_queue *queue) { return queue->pause_ns < GS_CHANGE_NS; }
/* The call to the driver has returned. */
void gs_queue_end(struct gs_batch *batch, const struct gs_events *events, bool launched);
/* A stream or a context is about to be destroyed: afterwards neither it nor its events may be queried. */
void gs_queue_stream_ends(struct gs_queue *queue, const struct gs_events *events, void *handle);
void gs_queue_context_ends(struct gs_queue *queue, void *context);
void gs_queue_context_ended(struct gs_queue *queue, void *context, bool gone, uint64_t now_ns);
/* How long such work took before; 0: unknown. May be called without the lock. */
uint32_t gs_queue_known_ns(const struct gs_queue *queue, uint64_t key);
/* How long such work is expected to take; a guess if that is unknown. */
uint64_t gs_queue_estimate_ns(const struct gs_queue *queue, uint64_t key);
/* Takes out what has finished, on any stream, and returns how long the process had work in flight since the last call.
 * `paused`: its threads wait, so that no launch will closely follow the last ones. `part`: how much of that time is its
 * own. */
struct gs_busy gs_queue_look(struct gs_queue *queue, const struct gs_events *events, uint64_t now_ns, bool paused,
                             struct gs_own_part part);

/* A program has returned from waiting for all of it. If the work ended long ago, the process was stopped and could not
 * return before. */
static inline void gs_queue_awaited(struct gs_queue *queue, uint64_t now_ns)
{
    if (!queue->count && now_ns - queue->covered_ns > GS_STOPPED_NS)
        queue->awaited_ns = queue->covered_ns;
}
/* The last run of work that is charged; below, the run that includes work in flight, up to its expected end. */
static inline struct gs_run gs_queue_ran(const struct gs_queue *queue)
{
    return (struct gs_run){queue->covered_ns - queue->run_ns, queue->covered_ns};
}
struct gs_run gs_queue_run(const struct gs_queue *queue, uint64_t now_ns);
/* How long work has been in flight without being charged. */
uint64_t gs_queue_uncharged_ns(const struct gs_queue *queue, uint64_t now_ns);

/* What a launch competes with. */
struct gs_contention {
    uint64_t now_ns, waited_ns;
    uint64_t in_flight_ns; /* of the container, estimated */
    uint64_t unknown;      /* likewise: number of launches of unknown duration */
    const struct gs_neighbourhood *beside;
};
/* How long the launch must wait before it asks again, in ns; 0: it may go. */
uint64_t gs_queue_wait_ns(const struct gs_queue *queue, struct gpuslice_card *card, const struct gs_share *share,
                          const struct gs_contention *met, const struct gs_stream *stream, uint64_t key);

/* Whether the batch's only launch is all that is in flight. */
static inline bool gs_queue_is_alone(const struct gs_queue *queue, const struct gs_batch *batch)
{
    return queue->count == 1 && batch->launches == 1;
}
/* Programs that wait for each kernel leave the card idle while their next launch is being decided on. Therefore the
 * decision whether another short kernel may follow is made while a kernel runs; if it may, the accounting is done after
 * that launch. */
void gs_queue_clear_next(struct gs_queue *queue, struct gpuslice_card *card, const struct gs_share *share,
                         const struct gs_contention *met, const struct gs_stream *stream, uint64_t key);
/* Whether all work in flight has ended, in about the expected time. Otherwise accounting is not postponed: the program
 * may have waited for something else, others may have had the card in between, or the work took longer than known. */
bool gs_queue_has_ended(const struct gs_queue *queue, const struct gs_events *events, uint64_t now_ns);
/* Whether this launch is the one that was cleared and follows at once. */
bool gs_queue_is_cleared(struct gs_queue *queue, uint64_t key, uint64_t now_ns);

#endif
