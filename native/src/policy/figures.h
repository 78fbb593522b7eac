/* The driver's figures as the agent publishes them, for processes that NVML does not list inside this container. */
#ifndef GPUSLICE_FIGURES_H
#define GPUSLICE_FIGURES_H

#include "policy/cards.h"

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
