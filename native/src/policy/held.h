/* Everything this process holds, by address: what was charged for it is returned with it. */
#ifndef GPUSLICE_HELD_H
#define GPUSLICE_HELD_H

#include "policy/cards.h"

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
/* Takes the driver's answer, and returns it: the bytes go back to the accounts, or the entry to the table. */
int gs_released(struct gs_releasing *releasing, int result);
struct gs_giver;
int gs_released_on(struct gs_releasing *releasing, int result, const struct gs_giver *on); /* when that stream gets there */
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

/* A part of a page of that context that is already open; page 0 if none has room. */
struct gs_array_part gs_array_page_join(uint64_t context, uint64_t bytes);
/* The same for a caller that has reserved a page; `needless` is set if another page has room by now. */
struct gs_array_part gs_array_page_open(uint64_t context, uint64_t bytes, bool *needless);
/* True for the last part of its page. */
bool gs_array_page_leave(struct gs_array_part part);

#endif
