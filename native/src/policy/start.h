/* Whether this process has limits at all, and whether the driver is bound: every hook asks this first. */
#ifndef GPUSLICE_START_H
#define GPUSLICE_START_H

#include <stdbool.h>

#include "driver/driver.h"

/* Before the limits are read, and afterwards if there is no limits file, hooks only pass calls through. */
extern bool gs_active;
bool gs_start(void);

static inline bool gs_enter(void) { return gs_likely(__atomic_load_n(&gs_active, __ATOMIC_ACQUIRE)) || gs_start(); }

/* A hook is called only where there are limits and a driver (entry/entries.c). */
static inline bool gs_enter_cuda(void) { return true; }
static inline bool gs_enter_nvml(void) { return true; }

#endif
