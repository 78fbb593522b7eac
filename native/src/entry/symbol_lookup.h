/* libc's own dlsym and dlopen, bypassing ours. */
#ifndef GPUSLICE_SYMBOL_LOOKUP_H
#define GPUSLICE_SYMBOL_LOOKUP_H

#include <stdbool.h>
#include <stdint.h>

void *gs_real_dlsym(void *handle, const char *name);
void *gs_real_dlopen(const char *path, int flags);
/* Ours instead of libc's dlsym, dlvsym or dlopen, and that function; NULL for other names. */
void *gs_own_entry(const char *name);
void *gs_real_entry(const char *name);
/* Something was opened with RTLD_DEEPBIND. What binds the objects that were loaded since so many ever were; and to call it now, if
 * any are not bound yet. */
bool gs_opens_deep(void);
void gs_when_opened_deep(void (*bind)(uint64_t loaded_before));
void gs_bind_what_was_opened_deep(void);
bool gs_is_driver_name(const char *name);
const char *gs_driver_file(const char *name); /* how the file begins that has a function of this name */

#endif
