/* libc's own dlsym and dlopen, bypassing ours. */
#ifndef GPUSLICE_SYMBOL_LOOKUP_H
#define GPUSLICE_SYMBOL_LOOKUP_H

#include <stdbool.h>

void *gs_real_dlsym(void *handle, const char *name);
void *gs_real_dlopen(const char *path, int flags);
bool gs_is_driver_name(const char *name);

#endif
