/* Which physical memory is mapped where. */
#ifndef GPUSLICE_PHYSICAL_H
#define GPUSLICE_PHYSICAL_H

#include "hooks/objects.h"

/* The object that is mapped at this address, and the mapping's end; 0 if none. */
uint64_t gs_physical_behind(CUdeviceptr address, CUdeviceptr *end);

#endif
