/* This library's hooks by name. */
#ifndef GPUSLICE_HOOK_TABLE_H
#define GPUSLICE_HOOK_TABLE_H

#include "driver/driver.h"

/* The newest cuda.h this list of hooks was checked against. */
#define GS_NEWEST_KNOWN_VERSION 13050

/* A hook by the symbol's name; -1 if there is none. Starts with "cu" or "nvml" as a rule. */
int gs_hook_named(const char *symbol);
void *gs_hook_address(enum gs_function function);
/* Whether an object has a variable of a hook's name. */
struct gs_elf_symbols;
bool gs_hook_is_variable_in(const struct gs_elf_symbols *symbols);
/* The hook for what cuGetProcAddress found: `found` is the driver's function for this name, version and flags. NULL
 * when the variant is none we know: then the program must get what the driver gave. */
void *gs_hook_variant(const char *name, int version, uint64_t flags, void *found);
/* A variant that is newer than this library, of a function that it stands in front of: what it takes nobody would count,
 * so a program must not get it. By the symbol, or as cuGetProcAddress found it. */
bool gs_is_unknown_variant(const char *symbol);
bool gs_is_unknown_form(const char *name, const void *found);

#endif
