/* Reserve, call, settle: the container's limit is checked before the driver is asked for memory. */
#ifndef GPUSLICE_RESERVE_H
#define GPUSLICE_RESERVE_H

#include "policy/cards.h"

/* On success, the call is in flight until it is settled. */
bool gs_reserve(struct gs_card *card, uint64_t bytes);
bool gs_reserve_quietly(struct gs_card *card, uint64_t bytes); /* a refusal is not counted */

/* What the container holds of a card, less what its processes are known to be charged too much: a measurement by difference is valid
 * until the driver's figure is known, and no longer. */
uint64_t gs_used_by_figures(struct gs_card *card);
/* Whether more is held than the limit allows, according to the driver's figures where they are available. */
bool gs_over_limit(struct gs_card *card);
/* Memory that another container lent and has freed since is held by this one alone, and is in its figures. Returns
 * whether that exceeds the limit: then nothing more is opened. */
bool gs_borrowed_too_much(struct gs_card *card);

/* ---- the steps ---- */

void gs_refuse(struct gs_card *card); /* counts it */
/* Reserves these bytes under the limit and what is `beyond` it, for a call that is in flight from then on, until it is settled. */
bool gs_take_room(struct gs_card *card, uint64_t bytes, uint64_t beyond);
bool gs_take_room_at_once(struct gs_card *card, uint64_t bytes); /* under its own limit, without waiting */
/* The call has returned: `reserved` bytes were reserved, and `taken` bytes, perhaps more, were taken. */
void gs_settle(struct gs_card *card, uint64_t reserved, uint64_t taken);
/* Bracket calls by which the driver releases an unknown amount, on any card, and its return to the accounts. */
void gs_releasing_begins(void);
void gs_releasing_ends(void);

/* ---- what this process holds, by address: what was charged for it is returned with it ---- */

/* Records linear memory that was allocated at `address`, for which `reserved` bytes were reserved. */
void gs_hold(struct gs_place place, CUdeviceptr address, uint64_t bytes, uint64_t reserved, uint32_t managed);
/* Something that the driver is asked to free: in the meantime its entry is not in the table, since another thread may
 * get the same address as soon as it is free, and a call is in flight. */
struct gs_releasing {
    bool known;
    struct gs_entry entry;
    uint64_t bytes; /* in flight */
};
struct gs_releasing gs_release_begins(uint64_t key);
/* Takes the driver's answer, and returns it: the bytes go back to the accounts, or the entry to the table. `on`: the stream that
 * frees it when it gets there; NULL: it is free. */
struct gs_giver;
int gs_released(struct gs_releasing *releasing, int result, const struct gs_giver *on);
/* Returns to the accounts what an entry was charged. The entry must not be in the table any more. */
uint64_t gs_release_entry(struct gs_entry *entry);
/* Releases what a destroyed context held. */
void gs_drop_context(CUcontext context);

/* Arrays smaller than a page of the driver's share pages. */
#define GS_ARRAY_STEP (UINT64_C(64) << 10)

struct gs_array_part {
    uint32_t page;  /* from 1 on; 0: none, because no page can be recorded */
    uint32_t steps; /* of GS_ARRAY_STEP */
};

/* A part of an open page of that context with room, page 0 if there is none; or, for a caller that has reserved one, of another. */
struct gs_array_part gs_array_page_take(uint64_t context, uint64_t bytes, bool may_open, bool *opened);
/* True for the last part of its page. */
bool gs_array_page_leave(struct gs_array_part part);

#endif
