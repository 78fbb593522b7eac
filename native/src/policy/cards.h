/* The cards of this container: which they are, how much of each it may use, and how much it holds. */
#ifndef GPUSLICE_CARDS_H
#define GPUSLICE_CARDS_H

#include <stdbool.h>
#include <stdint.h>

#include "accounts/accounts.h"
#include "driver/driver.h"
#include "policy/limits.h"
#include "policy/share.h"
#include "system/table.h"

#define GS_PAGE_BYTES (UINT64_C(2) << 20) /* the driver allocates physical memory in these */

struct gs_card {
    uint32_t index;                              /* in the region; GPUSLICE_CARDS for a card that is not ours */
    _Atomic uint64_t limit_bytes;                /* GS_NO_LIMIT for none; 0 for a card that is not ours; changes while we run */
    _Atomic uint64_t request_bytes, shown_bytes; /* likewise: what is its own, and what programs see */
    struct gs_share share;                       /* of compute; weight 0: not limited */
    char uuid[GPUSLICE_UUID_BYTES];
};

extern struct gs_accounts gs_accounts;
/* The card's entry in the region; NULL without a region, or for a card that is not ours. */
static inline struct gpuslice_card *gs_region_card(const struct gs_card *card)
{
    struct gpuslice_region *region = gs_accounts_at(&gs_accounts).region;
    return region && card->index < GPUSLICE_CARDS ? &region->cards[card->index] : NULL;
}
/* For what the driver itself takes in a process, which cannot wait until it is given back: less is lent than is unused. */
static inline uint64_t gs_own_limit(const struct gs_card *card)
{
    return card->request_bytes > card->limit_bytes ? card->request_bytes : card->limit_bytes;
}
void gs_cards_make(const struct gs_limits *limits);
/* From the file below that prefix, later: its memory limits are in force as soon as they have changed there. */
void gs_cards_follow(const char *prefix);
void gs_cards_look(uint64_t now); /* cheap enough for each allocation; `now` by the coarse clock */
void gs_cards_look_now(void);     /* at a change of the agent's alone, which this sees at once: a few ns */

/* NULL if the driver does not identify the card: then let the driver answer the call. */
struct gs_card *gs_card_of_device(CUdevice device);
/* On which card memory at this place is; NULL for host memory. */
struct gs_card *gs_card_of_location(int type, int id);
struct gs_card *gs_card_of_uuid(const char *uuid);
uint32_t gs_card_count(void);
struct gs_card *gs_card_at(uint32_t position); /* in the limits file's order */

/* Where a thread allocates. */
struct gs_place {
    struct gs_card *card;
    CUcontext context;
    CUdevice device;
};

/* While a stream is being captured, by this thread or another, calls that could disturb the capture are refused and
 * invalidate it: what we query beside a program's own call must not do that. */
static inline int gs_relax_capture(void)
{
    int mode = 2; /* relaxed */
    DRIVER(cuThreadExchangeStreamCaptureMode)(&mode);
    return mode;
}

/* Until the block is left. */
#define GS_RELAX_CAPTURE int relaxed __attribute__((cleanup(gs_restore_capture), unused)) = gs_relax_capture()
static inline void gs_restore_capture(int *mode) { DRIVER(cuThreadExchangeStreamCaptureMode)(mode); }

/* This context is current until the block is left, if it can be: events and the legacy default stream are of the current one. */
#define GS_IN_CONTEXT(context) bool entered __attribute__((cleanup(gs_leave_context), unused)) = gs_enter_context(context)
static inline bool gs_enter_context(CUcontext context)
{
    CUcontext current = NULL;
    return DRIVER(cuCtxGetCurrent)(&current) == CUDA_SUCCESS && current != context &&
           DRIVER(cuCtxPushCurrent_v2)(context) == CUDA_SUCCESS;
}
static inline void gs_leave_context(const bool *entered)
{
    CUcontext popped;
    if (*entered)
        DRIVER(cuCtxPopCurrent_v2)(&popped);
}

static inline uint64_t gs_round_up(uint64_t bytes, uint64_t step) /* UINT64_MAX on overflow */
{
    uint64_t rest = bytes % step;
    return !rest ? bytes : bytes > UINT64_MAX - step ? UINT64_MAX : bytes - rest + step;
}

/* What this process holds, by address. */
enum gs_kind {
    GS_LINEAR = 1, /* has pages of its own: bytes are what is charged */
    GS_SMALL,      /* shares pages with others: bytes are its length */
    GS_STREAM_ORDERED,
    GS_SMALL_ARRAY, /* shares pages with others: bytes are its page << 8 | its steps in it */
    GS_IMPORT,
    GS_OPENED,           /* other processes' memory that is open here: bytes are how often */
    GS_GROUP,            /* a group of other objects, which it keeps alive */
    GS_EXPORTED = 0x100, /* a flag, added to the kind */
    GS_MANAGED = 0x200,  /* likewise */
    GS_LENT = 0x400,     /* likewise: others may have opened this block of a pool, or the group that lends this memory */
};
extern struct gs_table gs_held;

/* Changes what is already counted from `before` to `now` bytes. */
void gs_recharge(struct gs_card *card, uint64_t before, uint64_t now);
uint64_t gs_used(const struct gs_card *card);

#endif
