/* The share of compute: launches wait while the container has used up its credit. */
#ifndef GPUSLICE_THROTTLE_H
#define GPUSLICE_THROTTLE_H

#include "policy/card_queue.h"
#include "policy/cards.h"

/* `prefix` is put before the paths under which the containers of a card exchange their claims. */
void gs_throttle_start(const char *prefix);
/* Tells the neighbours that this process has a context on the card, long before its first launch. */
void gs_throttle_meet(struct gs_card *card);

/* One piece of work, from gs_work_begin() to gs_work_end(). */
struct gs_work {
    struct gs_place place;  /* a NULL card: not throttled */
    struct gs_batch *batch; /* the batch that times it; NULL: it is not timed */
    struct gs_stream stream;
    uint64_t key;
};
/* Whether this container takes itself to be alone: no neighbour wanted the card a moment ago. Then not all work has to be timed, and
 * what is not costs little more than a read of the clock. */
bool gs_is_alone(void);
bool gs_goes_untimed(uint64_t key);
bool gs_throttles(void); /* whether any card has a share */
/* The program has returned from waiting for work on the card. */
void gs_throttle_awaited(void);
/* Waits until the work may be launched, if its card has a share. */
void gs_work_begin(struct gs_work *work);
void gs_work_end(const struct gs_work *work, bool launched);

/* The stream is about to be destroyed: nothing may query it afterwards. */
void gs_throttle_stream_ends(CUstream stream);
/* Bracket a call that may destroy the context, and its streams and events with it: in between, which may take as long as its
 * work, no thread queries any of what it was given until then. `gone`: it was destroyed, and is forgotten. */
void gs_throttle_context_ends(CUcontext context);
void gs_throttle_context_ended(CUcontext context, bool gone);

#endif
