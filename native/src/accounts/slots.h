/* The owners of slots: claiming a slot, and emptying those of processes that have ended. */
#ifndef GPUSLICE_SLOTS_H
#define GPUSLICE_SLOTS_H

#include <stdint.h>

#include "region.h"

/* No card has this much memory, so a counter above it was not written by us. Bounding counters keeps sums from overflowing. */
#define GS_MOST_BYTES (UINT64_C(1) << 50)

static inline uint64_t gs_load(const _Atomic uint64_t *word) { return atomic_load_explicit(word, memory_order_seq_cst); }

static inline uint64_t gs_bounded(const _Atomic uint64_t *word)
{
    uint64_t value = gs_load(word);
    return value < GS_MOST_BYTES ? value : GS_MOST_BYTES;
}

/* If somebody reset the counter, the subtraction wraps below zero (16 EiB), and what was missing is added back. Usually this
 * is a single atomic operation; a compare-and-exchange loop would cost twice as much. */
static inline void gs_subtract(_Atomic uint64_t *word, uint64_t bytes)
{
    uint64_t before = atomic_fetch_sub(word, bytes);
    if (before < bytes || before > GS_MOST_BYTES)
        atomic_fetch_add(word, before > GS_MOST_BYTES ? bytes : bytes - before);
}
void gs_raise_to(_Atomic uint64_t *word, uint64_t value);

/* The owner word of this process's slot. */
uint64_t gs_slot_owner(void);
/* Only slots [0, this) were ever taken. Includes `mine`, whatever the file says. */
uint64_t gs_slots_high(const struct gpuslice_region *region, const struct gpuslice_slot *mine);

/* Those that have an owner. */
#define GS_FOR_EACH_SLOT(slot, region, mine)                                                                                   \
    for (struct gpuslice_slot *slot = (region)->slots, *end = slot + gs_slots_high(region, mine); slot < end; slot++)          \
        if (gs_load(&slot->owner))

/* Claims a slot; NULL if none is free. `last` is the number of our previous slot, which is not reused soon, or
 * GPUSLICE_SLOTS. Only one thread of a process may call this at a time. */
struct gpuslice_slot *gs_slot_claim(struct gpuslice_region *region, uint64_t last);
/* Empties the slots of ended processes, except `mine`, and returns their number. `path` is the region's file, whose locks
 * show whether processes in other pid namespaces exist. */
uint32_t gs_slots_sweep(struct gpuslice_region *region, const struct gpuslice_slot *mine, const char *path);
/* What is counted on a card for processes that seem to be ending. */
uint64_t gs_slots_leaving(struct gpuslice_region *region, uint32_t card);
/* Locks the slot's byte of the file for as long as this program's address space exists. */
void gs_slot_lock(struct gpuslice_region *region, struct gpuslice_slot *slot, const char *path);
void gs_slots_forget_lock(void); /* in a forked child: the lock is the parent's */

#endif
