/* cuGetProcAddress in a library that is not initialised. */
#ifndef GPUSLICE_PROC_ADDRESS_H
#define GPUSLICE_PROC_ADDRESS_H

#include <stdint.h>

int gs_candidate_proc_address(const char *name, void **function, int version, uint64_t flags);
int gs_candidate_proc_address_v2(const char *name, void **function, int version, uint64_t flags, int *status);

#endif
