/* The share of compute: launches wait while the container has used up its credit. */
#ifndef GPUSLICE_THROTTLE_H
#define GPUSLICE_THROTTLE_H

#include "policy/card_queue.h"
#include "policy/cards.h"

/* `prefix`: before the paths in which the containers of a card meet. */
void gs_throttle_start(const char *prefix);
/* This process has a context on the card: its neighbours learn of it, long before its first launch. */
void gs_throttle_meet(struct gs_card *card);

/* Around every piece of work. */
struct gs_work {
    struct gs_place place; /* card NULL: not throttled */
    struct gs_batch *batch; /* that it is timed with; NULL: it is not */
    struct gs_stream stream;
    uint64_t key;
};
/* No neighbour was at work a moment ago, and nothing needs to be timed. All that a launch pays then is a look at the clock. */
extern uint64_t gs_alone_until_ns;
static inline bool gs_is_alone(void)
{
    uint64_t until = __atomic_load_n(&gs_alone_until_ns, __ATOMIC_RELAXED);
    return until && gs_coarse_ns() < until;
}
bool gs_throttles(void); /* whether any card has a share */
/* The program has waited for work on the card, and comes back. */
void gs_throttle_awaited(void);
/* Waits for its turn, where its card has a share. */
void gs_work_begin(struct gs_work *work);
void gs_work_end(const struct gs_work *work, bool launched);

/* A stream is about to be destroyed: nothing may be asked of it afterwards. */
void gs_throttle_stream_ends(CUstream stream);
/* Around a call that may end contexts, whose streams and events end with them: in between nobody asks for any, and those
 * that ended are forgotten. */
void gs_throttle_hold(void);
void gs_throttle_forget_context(CUcontext context);
void gs_throttle_let_go(void);

#endif
