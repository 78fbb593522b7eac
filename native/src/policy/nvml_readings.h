/* What NVML says of a card and of this process on it. */
#ifndef GPUSLICE_NVML_READINGS_H
#define GPUSLICE_NVML_READINGS_H

#include "policy/cards.h"

#define GS_LISTED 256

struct own {
    struct gs_card *card;
    uint64_t charged;
    uint64_t least, most; /* of one measurement: what it can be */
    uint64_t loaned; /* of what is charged: it came while memory of others was open here, which may have moved into our figure */
    uint64_t last; /* what the last look while it worked found: what is less twice is less */
    uint64_t due_ns; /* for the next look; 0: none is planned */
    uint64_t pause_ns;
    uint64_t figure_at_ns; /* of the last figure of the agent's that was used */
    uint32_t contexts;
    bool provisional; /* charged by difference: the driver's figure has not been heard */
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
void gs_read_memory(const struct own *own, struct reading *reading);
void gs_read_processes(const struct own *own, struct reading *reading); /* a thousand times as slow on many a driver */
bool gs_reading_lists(const struct reading *reading, uint32_t pid);
/* By which number NVML speaks of us shows when our first context comes to life. */
void gs_learn_nvml_pid(struct own *own, const struct reading *before, struct reading *after);
void gs_assume_nvml_pid(struct own *own);
bool gs_nvml_pid_known(void);

#endif
