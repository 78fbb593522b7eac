/* Exported descriptors: the driver keeps memory as long as one of it is open anywhere, which only the kernel knows. Each has
 * some bytes of the driver's file locked, far behind anything that anybody reads. Where they begin says which container's the
 * memory is, on which card, and who made it; they are as many as it has pages. Descriptors of the same memory share them. */
#ifndef GPUSLICE_EXPORTS_H
#define GPUSLICE_EXPORTS_H

#include <stdbool.h>
#include <stdint.h>

#include "region.h"
#include "system/open_file_locks.h"

struct gs_exports {
    uint32_t container;                      /* by which the kernel's locks name it: of a folder that the tenant cannot change */
    struct gpuslice_driver_file driver_file; /* as this process knows it */
};

void gs_exports_are_of(struct gs_exports *exports, const char *folder);
/* Locks the bytes of memory for one more descriptor of it; of zeros for the first. False: it cannot be followed. One thread
 * of a process at a time. */
bool gs_export_made(struct gs_exports *exports, struct gpuslice_region *region, const struct gpuslice_slot *mine,
                    struct gs_bytes *bytes, uint32_t card, uint64_t size, int descriptor);
/* How much memory a descriptor stands for, by what its maker locked; 0: not known. */
uint64_t gs_export_size(int descriptor);
/* Whether a descriptor of it is open anywhere. What cannot be found out is taken for open: no descriptor is left to ask with,
 * the file is out of sight (chroot) or another. */
bool gs_export_is_open(const struct gs_exports *exports, struct gs_bytes bytes);

/* Memory whose maker let go of it, or is gone: counts while other processes' memory is open in any slot, then as far as
 * descriptors of the dead keep it. Whether less is counted than before. */
bool gs_orphans_settle(const struct gs_exports *exports, struct gpuslice_region *region, const struct gpuslice_slot *mine);
/* The region is another, or was written over. */
void gs_exports_show(const struct gs_exports *exports, struct gpuslice_region *region);

#endif
