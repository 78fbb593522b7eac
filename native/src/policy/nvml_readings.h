/* What NVML reports about a card and about this process on it. */
#ifndef GPUSLICE_NVML_READINGS_H
#define GPUSLICE_NVML_READINGS_H

#include "policy/cards.h"

#define GS_LISTED 256

struct process_usage {
    struct gs_card *card;
    uint64_t charged;
    uint64_t least, most; /* bounds of one measurement */
    uint64_t loaned;      /* of what is charged: added while memory of others was open here, which our figure may contain */
    uint64_t last;        /* what the last periodic look found: a decrease counts when it is seen twice */
    uint64_t pause_ns;
    uint64_t figure_at_ns; /* time of the agent's last figure that was used */
    uint32_t contexts;
};

struct reading {
    bool known;
    uint64_t device_used; /* by all processes */
    bool listed;          /* this process is in NVML's list, by the PID that we know and with a figure */
    uint64_t mine;
    uint32_t count;
    uint32_t pids[GS_LISTED];
    uint64_t bytes[GS_LISTED]; /* 0 if NVML gives none */
};

bool gs_open_device(const struct gs_card *card, nvmlDevice_t *device);
void gs_read_memory(const struct process_usage *own, struct reading *reading);
void gs_read_processes(const struct process_usage *own,
                       struct reading *reading); /* a thousand times slower with many drivers */
bool gs_reading_lists(const struct reading *reading, uint32_t pid);
/* When our first context is created, it shows by which PID NVML lists us. */
void gs_learn_nvml_pid(struct process_usage *own, const struct reading *before, struct reading *after);
void gs_assume_nvml_pid(struct process_usage *own);
bool gs_nvml_pid_known(void);

#endif
