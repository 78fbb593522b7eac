/* Everything this process holds, by address: what was charged for it is given back with it. */
#ifndef GPUSLICE_HELD_H
#define GPUSLICE_HELD_H

#include "policy/cards.h"
#include "system/table.h"

enum gs_kind {
    GS_LINEAR = 1, /* pages of its own: bytes are what is charged */
    GS_SMALL,      /* shares pages with others: bytes are its length */
    GS_STREAM_ORDERED,
    GS_ARRAY,
    GS_SMALL_ARRAY, /* shares pages with others: bytes are its page << 8 | its steps in it */
    GS_IMPORT,
    GS_EXTERNAL,
    GS_GROUP, /* of other objects, which it keeps alive */
    GS_EXPORTED = 0x100, /* added to the kind */
    GS_MANAGED = 0x200,  /* likewise */
    GS_LENT = 0x400,     /* of a pool's block that other processes may have opened; of memory, by a group that they may have */
};
extern struct gs_table gs_held;

/* Linear memory that was allocated at `address`, for which `reserved` bytes were reserved. */
void gs_hold(struct gs_place place, CUdeviceptr address, uint64_t bytes, uint64_t reserved, uint32_t managed);
/* Something that the driver is asked to free: its entry is out of the table meanwhile, since another thread may be given
 * the same address as soon as it is free, and a call in flight. */
struct gs_giving {
    bool known;
    struct gs_entry entry;
    uint64_t bytes; /* in flight */
};
struct gs_giving gs_give(uint64_t key);
/* The driver's answer, which is returned: given back to the accounts, or held on. */
int gs_gave(struct gs_giving *giving, int result);
/* Gives back what an entry was charged. It must be out of the table of entries. */
uint64_t gs_release_entry(struct gs_entry *entry);
/* A context that goes takes its memory along. */
void gs_drop_context(CUcontext context);

#endif
