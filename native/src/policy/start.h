/* Whether this process has limits at all. A hook is called only where there are limits and a driver (entry/entries.c). */
#ifndef GPUSLICE_START_H
#define GPUSLICE_START_H

#include <stdbool.h>

#include "driver/driver.h"

extern bool gs_active;
bool gs_start(void);

static inline bool gs_enter(void) { return gs_likely(__atomic_load_n(&gs_active, __ATOMIC_ACQUIRE)) || gs_start(); }

#endif
