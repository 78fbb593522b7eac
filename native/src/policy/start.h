/* Whether this process has limits at all, and whether the driver is bound: every hook asks this first. */
#ifndef GPUSLICE_START_H
#define GPUSLICE_START_H

#include <stdbool.h>

#include "driver/driver.h"

/* Before the limits are read, and afterwards if there is no limits file, hooks only pass calls through. */
extern bool gs_active;
bool gs_start(void);

static inline bool gs_enter(void) { return gs_likely(__atomic_load_n(&gs_active, __ATOMIC_ACQUIRE)) || gs_start(); }

/* To be called first in every hook: whether there is anything to limit. Afterwards DRIVER() can be called. */
extern bool gs_cuda_ready, gs_nvml_ready;
bool gs_start_cuda(void);
bool gs_start_nvml(void);
static inline bool gs_enter_cuda(void)
{
    return gs_likely(__atomic_load_n(&gs_cuda_ready, __ATOMIC_ACQUIRE)) || gs_start_cuda();
}
static inline bool gs_enter_nvml(void)
{
    return gs_likely(__atomic_load_n(&gs_nvml_ready, __ATOMIC_ACQUIRE)) || gs_start_nvml();
}

#endif
