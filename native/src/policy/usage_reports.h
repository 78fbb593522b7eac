/* Who says how much of a card this process has: NVML, if it lists us, or the agent, which publishes the driver's figures for
 * processes that NVML does not list inside their container. */
#ifndef GPUSLICE_USAGE_REPORTS_H
#define GPUSLICE_USAGE_REPORTS_H

#include "policy/cards.h"

/* ---- NVML ---- */

#define GS_LISTED 256
struct gs_processes {
    uint32_t count;
    uint32_t pids[GS_LISTED];
    uint64_t bytes[GS_LISTED]; /* 0 if NVML gives none */
};

bool gs_open_device(const struct gs_card *card, nvmlDevice_t *device);
/* What all processes use of the card. False if nobody tells. */
bool gs_read_memory(const struct gs_card *card, uint64_t *used);
/* What NVML's list says of this process, and all of the list unless `listed` is NULL. 0 if it does not list us, by the PID that we
 * know and with a figure. A thousand times slower than gs_read_memory() with many drivers. */
uint64_t gs_read_processes(const struct gs_card *card, struct gs_processes *listed);
bool gs_lists(const struct gs_processes *listed, uint32_t pid);
/* By which PID NVML lists us. When our first context is created, the list before and after it shows that. Returns our figure. */
uint64_t gs_learn_nvml_pid(const struct gs_processes *before, const struct gs_processes *after);
void gs_assume_nvml_pid(const struct gs_card *card);
bool gs_nvml_pid_known(void);

/* ---- the agent ---- */

void gs_figures_start(const char *prefix);
/* Monotonic time of the published figures, taken before the driver was asked; 0 if the agent publishes none. */
uint64_t gs_figures_at(void);

struct gs_figure {
    uint64_t at_ns; /* monotonic time, before the driver was asked */
    uint64_t bytes;
};
/* False if none is published for that process, or if the figures are stale or damaged. */
bool gs_figure_of(const struct gs_card *card, uint64_t pid, uint64_t start_time, struct gs_figure *figure);
/* Whether figures of that time were taken after the last change was complete. */
bool gs_figures_are_after(uint64_t at_ns, uint64_t changed_ns);

#endif
