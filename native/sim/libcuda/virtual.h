/* Physical memory by handle, and what keeps it besides handles and mappings. */
#ifndef SIM_VIRTUAL_H
#define SIM_VIRTUAL_H

#include "driver.h"

struct member;

struct physical {
    struct object object; /* its record is the memory, or the import of another process's; a group's has no bytes */
    struct device *device;
    CUmemAllocationProp properties;
    uint64_t bytes;
    unsigned handles, mappings;
    bool group, shared; /* shared: a group that was exported or imported */
    struct member *members;
};

CUresult physical_of(CUmemGenericAllocationHandle handle, struct physical **physical);
/* Under memory_lock. */
void physical_pin(struct physical *physical);
void physical_unpin(struct physical *physical);
struct physical *physical_mapped_at(CUdeviceptr address, uint64_t *bytes); /* and how much of the mapping is left */
void group_empty(struct physical *group);

#endif
