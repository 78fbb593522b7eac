/* What a process's contexts take and release besides the memory that the program requests. */
#ifndef GPUSLICE_PROCESS_USAGE_H
#define GPUSLICE_PROCESS_USAGE_H

#include "policy/nvml_readings.h"

/* Compares the driver's figure for this process with our accounts and charges the difference. False if the driver has
 * no such figure. */
bool gs_measure(struct gs_card *card);
/* The same once in a while, for what was not observed; on this card before others. */
void gs_measure_sometimes(struct gs_card *card);
/* The same with the figure that the agent publishes for this process, if NVML has none and a newer one is published. */
void gs_settle_own(struct gs_card *card);
bool gs_has_context(struct gs_card *card);

struct process_usage *gs_process_usage_of(struct gs_card *card);

/* Used where NVML hides processes: the card's memory before and after a call, and what our container held at that time.
 * The difference is attributed to the call, including what a neighbour took in the same instant: the count may be too
 * high, but not too low. */
struct gs_card_snapshot {
    struct reading reading;
    uint64_t held;
};
enum gs_snapshot_depth { GS_MEMORY, GS_MEMORY_AND_PROCESSES };
void gs_snapshot_card(struct gs_card *card, struct gs_card_snapshot *snapshot, enum gs_snapshot_depth depth);
/* The same, of memory alone. */
struct gs_memory_snapshot {
    bool known;
    uint64_t device_used, held;
};
void gs_snapshot_memory(struct gs_card *card, struct gs_memory_snapshot *snapshot);
int64_t gs_grown(const struct gs_card_snapshot *before, const struct gs_card_snapshot *after);
/* What something took in a context, or returned; counted until it is dropped, or its context is. */
void gs_add_piece(struct gs_card *card, uint64_t key, uint64_t context, int64_t bytes);
uint64_t gs_piece(uint64_t key);
void gs_drop_piece(struct gs_card *card, uint64_t key);

void gs_context_made(struct gs_card *card, uint64_t key, uint64_t bytes);
/* Drops the context and the pieces in it. True for the last on this card: then the driver holds nothing of its own. */
bool gs_context_ended(struct gs_card *card, uint64_t key, uint64_t context);

#endif
