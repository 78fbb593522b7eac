/* Exported descriptors. The driver keeps memory allocated while any process has a descriptor of it open, which only the
 * kernel knows. So each descriptor holds a lock on some bytes of the driver's file, at offsets that nobody reads. The first
 * byte encodes the container, the card and the process that allocated the memory (its maker); the number of bytes is the
 * number of its 2 MiB pages. Descriptors of the same memory share the same bytes. */
#ifndef GPUSLICE_EXPORTS_H
#define GPUSLICE_EXPORTS_H

#include <stdbool.h>
#include <stdint.h>

#include "region.h"
#include "system/open_file_locks.h"

struct gs_exports {
    uint32_t container;                      /* its number in the locks: a hash of a folder that the tenant cannot change */
    struct gpuslice_driver_file driver_file; /* as seen by this process */
};

void gs_exports_are_of(struct gs_exports *exports, const char *folder);
/* Locks the bytes of this memory for one more descriptor of it; `first`, the first of them, is 0 for the first descriptor and is set
 * then. False if the descriptor cannot be tracked. Only one thread of a process may call this at a time. */
bool gs_export_made(struct gs_exports *exports, struct gpuslice_region *region, const struct gpuslice_slot *mine,
                    uint64_t *first, uint32_t card, uint64_t size, int descriptor);
/* The size of the memory behind a descriptor, from the lock of its maker; 0 if unknown. */
uint64_t gs_export_size(int descriptor);
/* Whether a descriptor of this memory is open in any process. If that cannot be found out, it counts as open: no descriptor
 * is free to query with, or the file cannot be reached (chroot) or is another. */
bool gs_export_is_open(const struct gs_exports *exports, uint64_t first, uint64_t size);

/* Reduces the orphaned memory, which is memory whose maker has released it or has ended. All of it counts while any process
 * has imported memory open; after that, only what descriptors exported by dead processes keep. True if less is counted than
 * before. */
bool gs_orphans_settle(const struct gs_exports *exports, struct gpuslice_region *region, const struct gpuslice_slot *mine);
/* Writes the driver's file into a region that is new or was overwritten. */
void gs_exports_show(const struct gs_exports *exports, struct gpuslice_region *region);

#endif
