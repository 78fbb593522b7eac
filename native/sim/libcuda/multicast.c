/* Multicast groups: each device of one binds memory of its own at the same offset, and the group keeps it alive. */
#include <stdlib.h>

#include "virtual.h"

#define STEP (2 * MIB)

struct member {
    uint64_t offset, bytes;
    CUdevice device;
    struct physical *memory;
    struct member *next;
};

struct group_properties {
    unsigned devices;
    size_t bytes;
    unsigned long long handle_types, flags;
};

static CUresult group_of(CUmemGenericAllocationHandle handle, struct physical **group)
{
    TRY(physical_of(handle, group));
    return (*group)->group ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMulticastCreate(CUmemGenericAllocationHandle *made, const struct group_properties *properties)
{
    TRY(driver_ready());
    if (!made || !properties || !properties->devices || !properties->bytes || properties->bytes % STEP || properties->flags)
        return CUDA_ERROR_INVALID_VALUE;
    struct physical *group = object_new(OBJECT_PHYSICAL, sizeof *group, NULL);
    if (!group)
        return CUDA_ERROR_OUT_OF_MEMORY;
    group->group = true;
    group->device = &devices[0];
    group->bytes = properties->bytes;
    group->handles = 1;
    group->properties.requested_handle_types = (int)properties->handle_types;
    if (properties->handle_types) /* of no bytes, by which other processes find it */
        group->object.record = sim_charge(group->device->card, SIM_PHYSICAL, 0, 0);
    *made = (CUmemGenericAllocationHandle)(uintptr_t)group;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMulticastAddDevice(CUmemGenericAllocationHandle handle, CUdevice ordinal)
{
    struct physical *group;
    struct device *device;
    TRY(group_of(handle, &group));
    return device_of(ordinal, &device);
}

EXPORT CUresult cuMulticastGetGranularity(size_t *bytes, const struct group_properties *properties, int option)
{
    TRY(driver_ready());
    if (!bytes || !properties || option & ~1)
        return CUDA_ERROR_INVALID_VALUE;
    *bytes = STEP;
    return CUDA_SUCCESS;
}

/* Under memory_lock. */
static CUresult bind(struct physical *group, CUdevice device, uint64_t offset, struct physical *memory, uint64_t bytes)
{
    if (memory->group || !bytes || offset % STEP || bytes % STEP || offset + bytes > group->bytes)
        return CUDA_ERROR_INVALID_VALUE;
    for (struct member *each = group->members; each; each = each->next)
        if (each->device == device && offset < each->offset + each->bytes && each->offset < offset + bytes)
            return CUDA_ERROR_INVALID_VALUE;
    struct member *member = malloc(sizeof *member);
    if (!member)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *member = (struct member){offset, bytes, device, memory, group->members};
    group->members = member;
    physical_pin(memory);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMulticastBindMem_v2(CUmemGenericAllocationHandle handle, CUdevice device, size_t group_offset,
                                      CUmemGenericAllocationHandle memory_handle, size_t offset, size_t bytes,
                                      unsigned long long flags)
{
    struct physical *group, *memory;
    TRY(group_of(handle, &group));
    TRY(physical_of(memory_handle, &memory));
    if (flags || offset % STEP || offset + bytes > memory->bytes || memory->device->ordinal != device)
        return CUDA_ERROR_INVALID_VALUE;
    memory_lock();
    CUresult result = bind(group, device, group_offset, memory, bytes);
    memory_unlock();
    return result;
}

EXPORT CUresult cuMulticastBindMem(CUmemGenericAllocationHandle handle, size_t group_offset,
                                   CUmemGenericAllocationHandle memory_handle, size_t offset, size_t bytes,
                                   unsigned long long flags)
{
    struct physical *memory;
    TRY(physical_of(memory_handle, &memory));
    return cuMulticastBindMem_v2(handle, memory->device->ordinal, group_offset, memory_handle, offset, bytes, flags);
}

/* The addresses may be mapped piece by piece. Under memory_lock. */
static CUresult bind_pieces(struct physical *group, size_t group_offset, CUdeviceptr address, size_t bytes)
{
    while (bytes) {
        uint64_t piece;
        struct physical *memory = physical_mapped_at(address, &piece);
        if (!memory)
            return CUDA_ERROR_INVALID_VALUE;
        piece = piece < bytes ? piece : bytes;
        TRY(bind(group, memory->device->ordinal, group_offset, memory, piece));
        group_offset += piece;
        address += piece;
        bytes -= piece;
    }
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMulticastBindAddr(CUmemGenericAllocationHandle handle, size_t group_offset, CUdeviceptr address, size_t bytes,
                                    unsigned long long flags)
{
    struct physical *group;
    TRY(group_of(handle, &group));
    if (flags || !bytes)
        return CUDA_ERROR_INVALID_VALUE;
    memory_lock();
    CUresult result = bind_pieces(group, group_offset, address, bytes);
    memory_unlock();
    return result;
}

EXPORT CUresult cuMulticastBindAddr_v2(CUmemGenericAllocationHandle handle, CUdevice device, size_t group_offset,
                                       CUdeviceptr address, size_t bytes, unsigned long long flags)
{
    (void)device;
    return cuMulticastBindAddr(handle, group_offset, address, bytes, flags);
}

static bool is_within(const struct member *member, CUdevice device, uint64_t from, uint64_t bytes)
{
    return member->device == device && member->offset >= from && member->offset + member->bytes <= from + bytes;
}

EXPORT CUresult cuMulticastUnbind(CUmemGenericAllocationHandle handle, CUdevice device, size_t offset, size_t bytes)
{
    struct physical *group;
    bool found = false;
    TRY(group_of(handle, &group));
    memory_lock();
    for (struct member **link = &group->members; *link;) {
        struct member *member = *link;
        if (!is_within(member, device, offset, bytes)) {
            link = &member->next;
            continue;
        }
        *link = member->next;
        physical_unpin(member->memory);
        free(member);
        found = true;
    }
    memory_unlock();
    return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* One that other processes may have keeps them: who there let go of it last is not followed, so for as long as this one lives. */
void group_empty(struct physical *group)
{
    while (!group->shared && group->members) {
        struct member *member = group->members;
        group->members = member->next;
        physical_unpin(member->memory);
        free(member);
    }
}
