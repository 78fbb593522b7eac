/* The driver keeps memory as long as any process has a descriptor of it open, which only the kernel knows. */
#ifndef GPUSLICE_DESCRIPTORS_H
#define GPUSLICE_DESCRIPTORS_H

#include <stdbool.h>
#include <stdint.h>

/* A descriptor was made of an object of this many bytes on that card. */
void gs_descriptor_made(uint64_t object, uint32_t card, uint64_t bytes, int descriptor);
/* An object's last handle and mapping are gone: returns whether a descriptor keeps its memory, which then stays
 * counted. */
bool gs_descriptors_keep(uint64_t object);
/* Returns to the accounts what only descriptors kept that are closed by now; whether there was any. */
bool gs_descriptors_settle(void);

#endif
