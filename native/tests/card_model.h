/* A card in virtual time, for tests of shares (tests/shares): processes with work take turns, evenly at every moment or in
 * slices; the streams of one run side by side. All times are nanoseconds; a piece of work has its own time left, which runs
 * as fast as its process has the card. */
#ifndef GPUSLICE_CARD_MODEL_H
#define GPUSLICE_CARD_MODEL_H

#include <stddef.h>

#include "policy/card_queue.h"

#define PROCESSES 16

struct card; /* begins with a double: the time now */

/* `slice_ns`: how long a turn is, 0 evenly at every moment; `switch_ns`: from one process to another, when nobody computes
 * and no sample counts anybody; `age_ns`: how late samples come. */
struct card *card_new(uint64_t slice_ns, uint64_t switch_ns, uint64_t age_ns);
void card_free(struct card *card);
double card_now(const struct card *card);
uint32_t card_add_process(struct card *card);

void card_launch(struct card *card, uint32_t process, double own_ns, uint32_t stream);
bool card_has_work(const struct card *card, uint32_t process);
bool card_has_work_on(const struct card *card, uint32_t process, uint32_t stream);
void card_kill(struct card *card, uint32_t process);
/* card_advance then ends as soon as the process has nothing left. */
void card_watch(struct card *card, uint32_t process);

/* Up to that time, or to the moment at which a process that is watched has nothing left: it is then watched no more, and
 * its number the answer, which is else -1. */
int card_advance(struct card *card, double to);

/* What each process had at each step of 50 ms, and now. */
const double *card_series(const struct card *card, uint32_t process, size_t *steps);
double card_done(const struct card *card, uint32_t process);
/* The newest sample that can be had, taken every sixth of a second: of each process its percent, -1 if it was not at work;
 * the answer is until when, 0 for none. */
uint64_t card_sample(const struct card *card, int32_t percents[PROCESSES]);

/* The driver's events. */
void *card_event(struct card *card, uint32_t process);
bool card_event_record(void *event, const struct gs_stream *stream);
bool card_event_is_pending(void *event);
bool card_event_elapsed(void *from, void *to, uint64_t *ns);

#endif
