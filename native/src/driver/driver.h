/* Calling the driver's own functions. */
#ifndef GPUSLICE_DRIVER_H
#define GPUSLICE_DRIVER_H

#include <stdbool.h>

#include "driver/driver_abi.h"

#define GS_EXPORT __attribute__((visibility("default")))
#define gs_likely(condition) __builtin_expect(!!(condition), 1)
#define gs_unlikely(condition) __builtin_expect(!!(condition), 0)

enum gs_function {
#define HOOK(library, symbol, name, since, stream, parameters) GS_##symbol,
#define BORROW(library, symbol, parameters) GS_##symbol,
#include "driver/hooks.def"
    GS_FUNCTIONS
};

/* The linker exports each hook under the driver's name (src.mk). A function that is only borrowed gets a type and no symbol. */
#define HOOK(library, symbol, name, since, stream, parameters)                                                        \
    GS_EXPORT int symbol parameters __asm__("gs_hook_" #symbol);                                                      \
    typedef int (*gs_type_##symbol) parameters;
#define BORROW(library, symbol, parameters) typedef int (*gs_type_##symbol) parameters;
#include "driver/hooks.def"

/* The driver's function, or one that returns "not found". Valid once the driver is bound. */
extern void *gs_driver[GS_FUNCTIONS];
#define DRIVER(symbol) ((gs_type_##symbol)__atomic_load_n(&gs_driver[GS_##symbol], __ATOMIC_RELAXED))
bool gs_driver_has(enum gs_function function);

/* Looks up the driver's functions once: in the library in which the program found the function `known` by its own handle;
 * without a handle, in the library that the program would get. */
void gs_bind_cuda(void *handle, const void *known);
void gs_bind_nvml(void *handle, const void *known);
/* Any of its functions, hooked or not, once it is bound; NULL for what it lacks. */
void *gs_driver_symbol(const char *name);

#endif
