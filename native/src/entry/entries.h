/* The addresses that programs get for the driver's functions. */
#ifndef GPUSLICE_ENTRIES_H
#define GPUSLICE_ENTRIES_H

#include "driver/driver.h"

/* What a program gets that found the function `own` of this name; NULL for `own` itself. `hook`: -1 for a function without one. */
void *gs_entry_for(enum gs_library library, int hook, const char *name, void *own);

/* For the entries of cuGetProcAddress before there is a driver: the candidate's own function. */
void *gs_entry_own(void);

#endif
