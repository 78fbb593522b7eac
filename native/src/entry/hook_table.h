/* This library's hooks by name. */
#ifndef GPUSLICE_HOOK_TABLE_H
#define GPUSLICE_HOOK_TABLE_H

#include "driver/driver.h"

/* The newest cuda.h this list of hooks was checked against. */
#define GS_NEWEST_KNOWN_VERSION 13050

/* The hook of this symbol, e.g. "cuMemAlloc_v2"; -1 if there is none. */
int gs_hook_named(const char *symbol);
const char *gs_hook_symbol(int hook);
/* Whether an object defines a variable that has a hook's name. */
struct gs_elf_symbols;
bool gs_hook_is_variable_in(const struct gs_elf_symbols *symbols);
/* The hook for the function that cuGetProcAddress found for this name, version and flags. -1 if we do not know this variant: the
 * program then gets the driver's function. */
int gs_hook_variant(const char *name, int version, uint64_t flags, const void *found);
/* Whether this is a variant, newer than this library, of a function that we intercept: by its symbol, or as found by
 * cuGetProcAddress. Nobody would count the memory that it takes, so a program must not get it. */
bool gs_is_unknown_variant(const char *symbol);
bool gs_is_unknown_form(const char *name);

#endif
