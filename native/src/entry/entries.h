/* The addresses that programs get for the driver's functions. */
#ifndef GPUSLICE_ENTRIES_H
#define GPUSLICE_ENTRIES_H

#include "driver/driver.h"

/* What a program gets that found the function `own` of this name; NULL for `own` itself. `hook`: -1 for a function without one. */
void *gs_entry_for(enum gs_library library, int hook, const char *name, void *own);

/* The address that stands for a hook, exported under the driver's name; NULL for a function without one. */
void *gs_hook_address(int hook);

#endif
