/* The driver's figures as the agent publishes them: for processes that NVML, inside this container, does not tell of. */
#ifndef GPUSLICE_FIGURES_H
#define GPUSLICE_FIGURES_H

#include "policy/cards.h"

void gs_figures_start(const char *prefix);
/* Monotonic time of those that are there, before the driver was asked; 0 where the agent publishes none. */
uint64_t gs_figures_at(void);

struct gs_figure {
    uint64_t at_ns; /* monotonic time, before the driver was asked */
    uint64_t bytes;
};
/* False where none is published for that process, or what is published is stale or damaged. */
bool gs_figure_of(const struct gs_card *card, uint64_t pid, uint64_t start_time, struct gs_figure *figure);
/* Whether figures of that time are of a moment when the last change was done. */
bool gs_figures_are_after(uint64_t at_ns, uint64_t changed_ns);

#endif
