/* Everything this process holds, by address: what was charged for it is returned with it. */
#ifndef GPUSLICE_HELD_H
#define GPUSLICE_HELD_H

#include "policy/cards.h"
#include "system/table.h"

enum gs_kind {
    GS_LINEAR = 1, /* has pages of its own: bytes are what is charged */
    GS_SMALL,      /* shares pages with others: bytes are its length */
    GS_STREAM_ORDERED,
    GS_ARRAY,
    GS_SMALL_ARRAY, /* shares pages with others: bytes are its page << 8 | its steps in it */
    GS_IMPORT,
    GS_EXTERNAL,
    GS_GROUP, /* a group of other objects, which it keeps alive */
    GS_EXPORTED = 0x100, /* a flag, added to the kind */
    GS_MANAGED = 0x200,  /* likewise */
    GS_LENT = 0x400,     /* likewise: others may have opened this block of a pool, or the group that lends this memory */
};
extern struct gs_table gs_held;

/* Records linear memory that was allocated at `address`, for which `reserved` bytes were reserved. */
void gs_hold(struct gs_place place, CUdeviceptr address, uint64_t bytes, uint64_t reserved, uint32_t managed);
/* Something that the driver is asked to free: in the meantime its entry is not in the table, since another thread may
 * get the same address as soon as it is free, and a call is in flight. */
struct gs_giving {
    bool known;
    struct gs_entry entry;
    uint64_t bytes; /* in flight */
};
struct gs_giving gs_give(uint64_t key);
/* Takes the driver's answer, and returns it: the bytes go back to the accounts, or the entry to the table. */
int gs_gave(struct gs_giving *giving, int result);
struct gs_giver;
int gs_gave_on(struct gs_giving *giving, int result, const struct gs_giver *on); /* when that stream gets there */
/* Returns to the accounts what an entry was charged. The entry must not be in the table any more. */
uint64_t gs_release_entry(struct gs_entry *entry);
/* Releases what a destroyed context held. */
void gs_drop_context(CUcontext context);

#endif
