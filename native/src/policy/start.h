/* Whether this process has limits at all, and the driver bound: the first thing that every hook asks. */
#ifndef GPUSLICE_START_H
#define GPUSLICE_START_H

#include <stdbool.h>

#include "driver/driver.h"

/* Until the limits were read, and from then on without a limits file, hooks only pass through. */
extern bool gs_active;
bool gs_start(void);

static inline bool gs_enter(void) { return gs_likely(__atomic_load_n(&gs_active, __ATOMIC_ACQUIRE)) || gs_start(); }

/* First thing in every hook: whether there is anything to limit. From then on DRIVER() can be called. */
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
