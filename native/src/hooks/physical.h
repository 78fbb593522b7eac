/* Physical memory, identified by a number of our own (the object), since the driver reuses handles. */
#ifndef GPUSLICE_PHYSICAL_H
#define GPUSLICE_PHYSICAL_H

#include "policy/cards.h"

void gs_physical_made(CUmemGenericAllocationHandle handle, const struct gs_card *card, uint64_t bytes, uint32_t kind);
uint64_t gs_physical_of_handle(CUmemGenericAllocationHandle handle); /* 0 for an unknown handle */
uint64_t gs_physical_behind(CUdeviceptr address,
                            CUdeviceptr *end); /* mapped at this address, and the mapping's end; 0 if none */
uint32_t gs_physical_card(uint64_t object);
void gs_physical_hold(uint64_t object);
void gs_physical_drop(uint64_t object);
/* Whether it was exported or imported, so that other processes may hold it. */
bool gs_physical_is_lent(uint64_t object);
/* Memory that is bound to such a group counts as exported while it is bound. */
void gs_physical_lend(uint64_t object);
void gs_physical_unlend(uint64_t object);

/* What is mapped into holders of memory, or bound to them (holders.c): released with the holder, and lent if a group is exported,
 * since other processes may keep it then. */
struct gs_members {
    void (*release)(uint64_t holder), (*lend)(uint64_t group);
};
void gs_physical_has_members(const struct gs_members *members);
void gs_physical_let_go(uint64_t holder);

#endif
