#ifndef GPUSLICE_HOLDERS_H
#define GPUSLICE_HOLDERS_H

#include <stdint.h>

/* Releases all memory that is mapped into this holder or bound to it. */
void gs_unpin(uint64_t holder);
/* The group has been exported: other processes may keep its members after it is gone here. */
void gs_lend_members(uint64_t group);

#endif
