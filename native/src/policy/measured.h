/* What NVML says of a card and of this process on it, and what of it is charged as the driver's own. */
#ifndef GPUSLICE_MEASURED_H
#define GPUSLICE_MEASURED_H

#include "policy/core.h"

#define GS_LISTED 256

struct own {
    struct gs_card *card;
    uint64_t charged;
    uint64_t last; /* what the last look while it worked found: what is less twice is less */
    uint64_t due_ns; /* for the next look; 0: none is planned */
    uint64_t pause_ns;
    uint32_t contexts;
};

struct reading {
    bool known;
    uint64_t device_used; /* by everybody */
    bool listed;          /* this process is in NVML's list, by the number that we know and with a figure */
    uint64_t mine;
    uint32_t count;
    uint32_t pids[GS_LISTED];
    uint64_t bytes[GS_LISTED]; /* 0 where NVML gives none */
};

bool gs_open_device(const struct gs_card *card, nvmlDevice_t *device);
struct own *gs_own_of(struct gs_card *card);
void gs_read_memory(const struct own *own, struct reading *reading);
void gs_read_processes(const struct own *own, struct reading *reading); /* a thousand times as slow on many a driver */
bool gs_reading_lists(const struct reading *reading, uint32_t pid);
/* By which number NVML speaks of us shows when our first context comes to life. */
void gs_learn_number(struct own *own, const struct reading *before, struct reading *after);
void gs_charge_own(struct own *own, uint64_t bytes);

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

void gs_assume_number(struct own *own);
bool gs_number_known(void);
void gs_forget_contexts(void);
void gs_forget_readings(void);

#endif
