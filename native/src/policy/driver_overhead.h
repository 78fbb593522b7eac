/* What a process's contexts take and release beside the memory a program asks for. */
#ifndef GPUSLICE_DRIVER_OVERHEAD_H
#define GPUSLICE_DRIVER_OVERHEAD_H

#include "policy/nvml_readings.h"

/* Compares the driver's own figure for this process with ours and takes the difference into the accounts. False where the
 * driver has no such figure. */
bool gs_measure(struct gs_card *card);
/* The same once in a while, for what came unseen; on this card before others. */
void gs_measure_sometimes(struct gs_card *card);
/* The same by the figure that the agent publishes for this process, where NVML has none and a newer one is there. */
void gs_settle_own(struct gs_card *card);
bool gs_has_context(struct gs_card *card);

struct own *gs_own_of(struct gs_card *card);

/* Where NVML hides processes: the card before and after a call, and what our container held at that moment. The
 * difference is the call's, and a neighbour's that grew in the same instant: too much is counted rather than too
 * little. */
struct gs_sight {
    struct reading reading;
    uint64_t held;
};
enum gs_depth { GS_MEMORY, GS_MEMORY_AND_PROCESSES };
void gs_look_at_card(struct gs_card *card, struct gs_sight *sight, enum gs_depth depth);
/* The same in few words. */
struct gs_glance {
    bool known;
    uint64_t device_used, held;
};
void gs_glance(struct gs_card *card, struct gs_glance *glance);
int64_t gs_grown(const struct gs_sight *before, const struct gs_sight *after);
/* What something took in a context, or gave back; until it is dropped, or its context is. */
void gs_add_piece(struct gs_card *card, uint64_t key, uint64_t context, int64_t bytes);
uint64_t gs_piece(uint64_t key);
void gs_drop_piece(struct gs_card *card, uint64_t key);

void gs_context_made(struct gs_card *card, uint64_t key, uint64_t bytes);
/* With the pieces in it. True for the last on this card: then nothing of the driver's own is left. */
bool gs_context_ended(struct gs_card *card, uint64_t key, uint64_t context);

/* Bytes that we count and the driver's figure for this process may lack, and such as it lacks: managed memory, which is
 * nvidia-uvm's, and what only a descriptor keeps. */
enum gs_doubt { GS_PERHAPS_MISSING, GS_UNLISTED, GS_DOUBTS };
void gs_doubt(uint32_t card, enum gs_doubt doubt, int64_t bytes);
/* Memory of another process is no longer open here; what of it stood in our figure shows soon. */
void gs_loan_ended(uint32_t card);

#endif
