/* A stream that gives blocks back to a pool. Until it gets there they are for later work on the same stream, or for another
 * stream that waits for it. */
#ifndef GPUSLICE_POOL_GIVERS_H
#define GPUSLICE_POOL_GIVERS_H

#include "policy/cards.h"

#define GS_GIVERS 8

struct gs_giver {
    CUstream stream;
    CUcontext context; /* of a context's own streams, else NULL */
    uint64_t own;      /* the thread whose own default stream it is, which others reach by the event alone; 0: another stream */
    CUevent event;     /* marks its last free; NULL: the stream itself can be asked */
    uint64_t bytes, last;
};

/* The stream frees so many bytes. `in_use`: another thread may be using one of the givers. */
void gs_givers_add(struct gs_giver givers[GS_GIVERS], const struct gs_giver *on, uint64_t bytes, bool in_use);
/* The one that freed most recently, of those that are still to give so much. */
struct gs_giver *gs_givers_newest(struct gs_giver givers[GS_GIVERS], uint64_t bytes, bool in_use);
/* Whether all streams have got to all that they were to free. */
bool gs_givers_have_given(const struct gs_giver givers[GS_GIVERS]);
bool gs_giver_is_same(const struct gs_giver *one, const struct gs_giver *other);
/* Marks the end of what the stream was given so far, for when it cannot be asked itself. */
void gs_giver_mark(struct gs_giver *giver);
void gs_giver_forget(struct gs_giver *giver);

#endif
