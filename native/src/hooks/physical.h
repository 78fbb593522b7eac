/* Physical memory by the number it was given here, which no handle's reuse can confuse. */
#ifndef GPUSLICE_PHYSICAL_H
#define GPUSLICE_PHYSICAL_H

#include "policy/cards.h"

void gs_physical_made(CUmemGenericAllocationHandle handle, const struct gs_card *card, uint64_t bytes, uint32_t kind);
uint64_t gs_physical_of_handle(CUmemGenericAllocationHandle handle); /* 0 for one we do not know */
uint64_t gs_physical_behind(CUdeviceptr address, CUdeviceptr *end);  /* of the mapping there; 0 for none */
uint32_t gs_physical_card(uint64_t object);
void gs_physical_hold(uint64_t object);
void gs_physical_drop(uint64_t object);
/* Exported or imported: other processes may have it. */
bool gs_physical_is_lent(uint64_t object);
/* By such a group: if this process ends meanwhile, memory counts as if it were exported. */
void gs_physical_lend(uint64_t object);
void gs_physical_unlend(uint64_t object);

#endif
