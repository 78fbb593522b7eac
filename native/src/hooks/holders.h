#ifndef GPUSLICE_HOLDERS_H
#define GPUSLICE_HOLDERS_H

#include <stdint.h>

/* Whatever was mapped into it or bound to it is kept by it no more. */
void gs_unpin(uint64_t holder);
/* The members of a group that other processes may have from now on: these keep them when it is gone here. */
void gs_lend_members(uint64_t group);

#endif
