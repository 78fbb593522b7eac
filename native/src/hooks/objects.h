/* Physical memory, identified by a number of our own (the object), since the driver reuses handles. */
#ifndef GPUSLICE_OBJECTS_H
#define GPUSLICE_OBJECTS_H

#include "policy/cards.h"

extern struct gs_table gs_handles; /* handle → the references that it holds, in `bytes`, and the object, in `owner` */

void gs_object_made(CUmemGenericAllocationHandle handle, const struct gs_card *card, uint64_t bytes, uint32_t kind);
uint64_t gs_object_of_handle(CUmemGenericAllocationHandle handle); /* 0 for an unknown handle */
bool gs_object_made_with(uint64_t object, CUmemGenericAllocationHandle handle);
uint32_t gs_object_card(uint64_t object);
void gs_object_hold(uint64_t object);
void gs_object_drop(uint64_t object);

/* A descriptor was made of it, or (-1) another kind of handle. False if nobody would count the memory that the descriptor keeps. */
bool gs_object_export(uint64_t object, int descriptor);
/* Whether it was exported or imported, so that other processes may hold it. */
bool gs_object_is_lent(uint64_t object);

/* At a place of a holder, which may be a group of other objects: what such a group holds counts as exported if the group is. */
void gs_object_pin(struct gs_entry place); /* `owner`: the object; `bytes`: its holder; `kind`: where there, in steps */
void gs_object_unpin(uint64_t place);
struct gs_pins {
    uint64_t holder, from, to; /* offsets in steps */
    uint32_t card;             /* GPUSLICE_CARDS for any */
};
void gs_object_unpin_range(struct gs_pins pins);
void gs_object_holder_ends(uint64_t holder);

/* The object that is mapped at this address, and the mapping's end; 0 if none (physical.c). */
uint64_t gs_physical_behind(CUdeviceptr address, CUdeviceptr *end);

#endif
