/* Where programs come in: dlsym, dlvsym, dlopen and cuGetProcAddress. */
#ifndef GPUSLICE_SYMBOL_LOOKUP_H
#define GPUSLICE_SYMBOL_LOOKUP_H

/* libc's own dlsym, for handles; NULL where there is none. */
void *gs_real_dlsym(void *handle, const char *name);

#endif
