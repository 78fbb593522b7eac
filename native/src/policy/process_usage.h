/* What does this process use of a card, besides the memory that the program requests: contexts, modules, heaps. */
#ifndef GPUSLICE_PROCESS_USAGE_H
#define GPUSLICE_PROCESS_USAGE_H

#include "policy/usage_reports.h"

/* Compares NVML's figure for this process with our accounts and charges the difference. False if NVML has no such figure. */
bool gs_measure(struct gs_card *card);
/* The same by whoever has a figure, once in a while, for what was not observed; on this card before others. */
uint64_t gs_measure_sometimes(struct gs_card *card); /* returns the time (gs_coarse_ns) */
/* The same now, if NVML has none. */
void gs_settle_own(struct gs_card *card);
bool gs_has_context(struct gs_card *card);
/* What is charged now. */
uint64_t gs_own_bytes(const struct gs_card *card);

/* Used where NVML hides processes: the card's memory before and after a call, and what our container held at that time.
 * The difference is attributed to the call, including what a neighbour took in the same instant: the count may be too
 * high, but not too low. */
struct gs_snapshot {
    bool known;
    uint64_t used; /* of the card, by all processes */
    uint64_t held; /* by this container */
    uint64_t mine; /* NVML's figure for this process, if its list was read; 0 for none */
};
/* `listed`: NVML's list, or NULL to spare that. */
void gs_snapshot(struct gs_card *card, struct gs_snapshot *snapshot, struct gs_processes *listed);
int64_t gs_grown(const struct gs_snapshot *before, const struct gs_snapshot *after);
/* What something took in a context, or returned; counted until it is dropped, or its context is. */
void gs_add_piece(struct gs_card *card, uint64_t key, uint64_t context, int64_t bytes);
uint64_t gs_piece(uint64_t key);
void gs_drop_piece(struct gs_card *card, uint64_t key);

void gs_context_made(struct gs_card *card, uint64_t key, uint64_t bytes);
/* Drops the context and the pieces in it. True for the last on this card: then the driver holds nothing of its own. */
bool gs_context_ended(struct gs_card *card, uint64_t key, uint64_t context);

#endif
