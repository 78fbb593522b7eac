/* Calling the driver's own functions. */
#ifndef GPUSLICE_DRIVER_H
#define GPUSLICE_DRIVER_H

#include <stdbool.h>

#include "driver/driver_abi.h"

#define gs_likely(condition) __builtin_expect(!!(condition), 1)
#define gs_unlikely(condition) __builtin_expect(!!(condition), 0)

enum gs_function {
#define HOOK(library, symbol, name, since, stream, parameters) GS_##symbol,
#define BORROW(library, symbol, parameters) GS_##symbol,
#include "driver/hooks.def"
    GS_FUNCTIONS
};

/* What the list says of each. */
struct gs_described {
    const char *symbol, *name;
    bool intercepted; /* else we only call it */
    int since;
    unsigned char library;
    enum { EITHER, LEGACY, OWN } stream;
};
extern const struct gs_described gs_described[GS_FUNCTIONS];

/* A hook's C function. Programs are given its entry (entry/entries.c), which leads there once there is a driver and a limit. A
 * function that is only borrowed gets a type and no symbol. */
#define HOOK(library, symbol, name, since, stream, parameters)                                                                 \
    int symbol parameters __asm__("gs_hooked_" #symbol);                                                                       \
    typedef int(*gs_type_##symbol) parameters;
#define BORROW(library, symbol, parameters) typedef int(*gs_type_##symbol) parameters;
#include "driver/hooks.def"

/* The driver's function, or one that returns "not found". Valid once there is a driver. */
extern void *gs_driver[GS_FUNCTIONS];
#define DRIVER(symbol) ((gs_type_##symbol)__atomic_load_n(&gs_driver[GS_##symbol], __ATOMIC_RELAXED))
bool gs_driver_has(enum gs_function function);

enum gs_library { CUDA, NVML, GS_LIBRARIES };

/* A candidate is a loaded libcuda or libnvidia-ml, and is told by any address in it. The first one found to be initialised is the
 * driver from then on, and stays loaded; before that nothing of a candidate is kept.
 * Returns 0 if this candidate is initialised, else what it answers; without one, whether the driver is, or any candidate. */
int gs_driver_prove(enum gs_library library, const void *candidate);
/* Whether this is in the driver. Until there is one: in the candidate that was loaded first, which probably will be. */
bool gs_driver_holds(enum gs_library library, const void *address);
bool gs_driver_is_bound(enum gs_library library);
/* Opens NVML for ourselves if no NVML is initialised. */
bool gs_driver_open_nvml(void);
/* Any function of the driver, hooked or not; NULL for what it lacks. `candidate`: of that one instead. */
void *gs_driver_symbol(enum gs_library library, const char *name);
void *gs_candidate_symbol(enum gs_library library, const char *name);

#endif
