#ifndef GPUSLICE_HOLDERS_H
#define GPUSLICE_HOLDERS_H

#include <stdint.h>

/* Whatever was mapped into it or bound to it is kept by it no more. */
void gs_unpin(uint64_t holder);

#endif
