/* Whose slot is whose: claiming one, and emptying those of processes that are no more. */
#ifndef GPUSLICE_SLOTS_H
#define GPUSLICE_SLOTS_H

#include <stdint.h>

#include "region.h"

/* A counter above this was not written by us: no card has it, and sums stay clear of overflow. */
#define GS_MOST_BYTES (UINT64_C(1) << 50)

static inline uint64_t gs_load(const _Atomic uint64_t *word) { return atomic_load_explicit(word, memory_order_seq_cst); }

static inline uint64_t gs_bounded(const _Atomic uint64_t *word)
{
    uint64_t value = gs_load(word);
    return value < GS_MOST_BYTES ? value : GS_MOST_BYTES;
}

/* A counter that somebody else reset must not stay below zero, which is 16 EiB: what it lacked is put back. One step where
 * it lacks nothing, as a loop that compares would cost twice as much. */
static inline void gs_subtract(_Atomic uint64_t *word, uint64_t bytes)
{
    uint64_t before = atomic_fetch_sub(word, bytes);
    if (before < bytes || before > GS_MOST_BYTES)
        atomic_fetch_add(word, before > GS_MOST_BYTES ? bytes : bytes - before);
}
void gs_raise_to(_Atomic uint64_t *word, uint64_t value);

/* The word that a slot of this process bears. */
uint64_t gs_slot_owner(void);
/* [0, this) were ever taken; at least up to `mine`, whatever the file says. */
uint64_t gs_slots_high(const struct gpuslice_region *region, const struct gpuslice_slot *mine);

/* One thread of a process at a time. NULL when none is free. `last` is the number of the slot that was ours until now,
 * which does not come again soon; GPUSLICE_SLOTS for none. */
struct gpuslice_slot *gs_slot_claim(struct gpuslice_region *region, uint64_t last);
/* Empties the slots of the dead; how many. `mine` stays. `path`: of the region's file, for what only its locks tell. */
uint32_t gs_slots_sweep(struct gpuslice_region *region, const struct gpuslice_slot *mine, const char *path);
/* What is counted on a card for processes that are believed to be gone in a moment. */
uint64_t gs_slots_leaving(struct gpuslice_region *region, uint32_t card);
/* Locks the slot's byte of the file for as long as this program's memory lasts. */
void gs_slot_lock(struct gpuslice_region *region, struct gpuslice_slot *slot, const char *path);
void gs_slots_forget_lock(void); /* in a forked child: that lock is the parent's */

#endif
