/* Virtual memory management: physical memory by handle, addresses by reservation, and mappings between them. Physical
 * memory is given back when its last handle, its last mapping and its last exported descriptor are gone (CUDA C++
 * Programming Guide, "Virtual Memory Management"; for the descriptor see sim_export). */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "virtual.h"

#define STEP (2 * MIB)
#define FD_MAGIC UINT64_C(0x4c53474d454d5631)

struct mapping {
    uint64_t address, bytes, offset;
    struct physical *physical;
    struct mapping *next;
};

/* What stands in the file that carries a handle to another process. */
struct shared_handle {
    uint64_t magic;
    uint32_t card, group;
    uint64_t bytes;
    CUmemAllocationProp properties;
};

CUresult physical_of(CUmemGenericAllocationHandle handle, struct physical **physical)
{
    TRY(driver_ready());
    *physical = (struct physical *)(uintptr_t)handle;
    return object_is(*physical, OBJECT_PHYSICAL) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult check(const CUmemAllocationProp *properties, struct device **device)
{
    TRY(driver_ready());
    if (!properties || properties->type != 1)
        return CUDA_ERROR_INVALID_VALUE;
    if (properties->location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA && getenv("GPUSLICE_SIM_COHERENT"))
        return device_of(properties->location.id - 1, device); /* node 0 is the host's own, which is not simulated */
    if (properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
        return CUDA_ERROR_NOT_SUPPORTED;
    return device_of(properties->location.id, device);
}

static struct physical *physical_new(struct device *device, uint64_t bytes, const CUmemAllocationProp *properties,
                                     uint32_t record)
{
    struct physical *physical = record ? object_new(OBJECT_PHYSICAL, sizeof *physical, NULL) : NULL;
    if (!physical) {
        sim_release(record);
        return NULL;
    }
    physical->object.record = record;
    physical->device = device;
    physical->bytes = bytes;
    physical->properties = *properties;
    physical->handles = 1;
    return physical;
}

EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *made, size_t bytes, const CUmemAllocationProp *properties,
                            unsigned long long flags)
{
    struct device *device;
    TRY(check(properties, &device));
    if (!made || !bytes || bytes % STEP || flags)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(device_fault(device));
    uint32_t record = sim_charge(device->card, SIM_PHYSICAL, bytes, 0);
    struct physical *physical = physical_new(device, bytes, properties, record);
    *made = (CUmemGenericAllocationHandle)(uintptr_t)physical;
    return physical ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static struct mapping *mapping_at(CUdeviceptr address);

/* Under memory_lock. */
static void end_if_unused(struct physical *physical)
{
    if (physical->handles || physical->mappings)
        return;
    group_empty(physical);
    object_free(physical);
}

void physical_pin(struct physical *physical) { physical->mappings++; }

void physical_unpin(struct physical *physical)
{
    physical->mappings--;
    end_if_unused(physical);
}

struct physical *physical_mapped_at(CUdeviceptr address, uint64_t *bytes)
{
    const struct mapping *mapping = mapping_at(address);
    *bytes = mapping ? mapping->address + mapping->bytes - address : 0;
    return mapping ? mapping->physical : NULL;
}

EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
    struct physical *physical;
    CUresult result = CUDA_SUCCESS;
    TRY(physical_of(handle, &physical));
    memory_lock();
    if (!physical->handles)
        result = CUDA_ERROR_INVALID_VALUE;
    else if (--physical->handles == 0)
        end_if_unused(physical);
    memory_unlock();
    return result;
}

EXPORT CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *properties, int option)
{
    struct device *device;
    TRY(check(properties, &device));
    if (!bytes || option & ~1)
        return CUDA_ERROR_INVALID_VALUE;
    *bytes = STEP;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *properties, CUmemGenericAllocationHandle handle)
{
    struct physical *physical;
    TRY(physical_of(handle, &physical));
    if (!properties)
        return CUDA_ERROR_INVALID_VALUE;
    *properties = physical->properties;
    return CUDA_SUCCESS;
}

/* ------------------------------------------------------------------------------- addresses and mappings */

EXPORT CUresult cuMemAddressReserve(CUdeviceptr *address, size_t bytes, size_t alignment, CUdeviceptr wish,
                                    unsigned long long flags)
{
    (void)wish;
    TRY(driver_ready());
    if (!address || !bytes || bytes % STEP || flags || (alignment & (alignment - 1)))
        return CUDA_ERROR_INVALID_VALUE;
    memory_lock();
    struct allocation *reserved = allocation_new(bytes, ALLOCATION_RESERVED, NULL);
    if (reserved)
        *address = reserved->address;
    memory_unlock();
    return reserved ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static struct allocation *reservation_at(CUdeviceptr address)
{
    struct allocation *found = allocation_at(address);
    return found && found->kind == ALLOCATION_RESERVED ? found : NULL;
}

EXPORT CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes)
{
    TRY(driver_ready());
    memory_lock();
    struct allocation *reserved = reservation_at(address);
    bool whole = reserved && reserved->address == address && reserved->bytes == bytes && !reserved->detail;
    if (whole)
        allocation_drop(reserved);
    memory_unlock();
    return whole ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static bool overlaps(const struct allocation *reserved, uint64_t address, uint64_t bytes)
{
    for (const struct mapping *mapping = reserved->detail; mapping; mapping = mapping->next)
        if (address < mapping->address + mapping->bytes && mapping->address < address + bytes)
            return true;
    return false;
}

static CUresult map_locked(struct physical *physical, CUdeviceptr address, size_t bytes, size_t offset)
{
    struct allocation *reserved = reservation_at(address);
    if (!reserved || address + bytes > reserved->address + reserved->bytes || overlaps(reserved, address, bytes))
        return CUDA_ERROR_INVALID_VALUE;
    struct mapping *mapping = malloc(sizeof *mapping);
    if (!mapping)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *mapping = (struct mapping){address, bytes, offset, physical, reserved->detail};
    reserved->detail = mapping;
    reserved->device = physical->device;
    physical->mappings++;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                         unsigned long long flags)
{
    struct physical *physical;
    TRY(physical_of(handle, &physical));
    if (flags || !bytes || bytes % STEP || address % STEP || offset % STEP || offset + bytes > physical->bytes)
        return CUDA_ERROR_INVALID_VALUE;
    memory_lock();
    CUresult result = map_locked(physical, address, bytes, offset);
    memory_unlock();
    return result;
}

/* Whether the range is exactly made of whole mappings. */
static bool covers(const struct allocation *reserved, uint64_t address, uint64_t bytes)
{
    uint64_t covered = 0;
    for (const struct mapping *mapping = reserved->detail; mapping; mapping = mapping->next) {
        if (mapping->address >= address + bytes || mapping->address + mapping->bytes <= address)
            continue;
        if (mapping->address < address || mapping->address + mapping->bytes > address + bytes)
            return false;
        covered += mapping->bytes;
    }
    return covered == bytes;
}

static void unmap_range(struct allocation *reserved, uint64_t address, uint64_t bytes)
{
    for (struct mapping **link = (struct mapping **)&reserved->detail; *link;) {
        struct mapping *mapping = *link;
        if (mapping->address < address || mapping->address >= address + bytes) {
            link = &mapping->next;
            continue;
        }
        *link = mapping->next;
        physical_unpin(mapping->physical);
        free(mapping);
    }
}

EXPORT CUresult cuMemUnmap(CUdeviceptr address, size_t bytes)
{
    TRY(driver_ready());
    memory_lock();
    struct allocation *reserved = reservation_at(address);
    bool exact = reserved && bytes && covers(reserved, address, bytes);
    if (exact)
        unmap_range(reserved, address, bytes);
    memory_unlock();
    return exact ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static struct mapping *mapping_at(CUdeviceptr address)
{
    struct allocation *reserved = reservation_at(address);
    struct mapping *mapping = reserved ? reserved->detail : NULL;
    while (mapping && (address < mapping->address || address >= mapping->address + mapping->bytes))
        mapping = mapping->next;
    return mapping;
}

EXPORT CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address)
{
    TRY(driver_ready());
    if (!handle)
        return CUDA_ERROR_INVALID_VALUE;
    memory_lock();
    struct mapping *mapping = mapping_at((CUdeviceptr)(uintptr_t)address);
    if (mapping) {
        mapping->physical->handles++;
        *handle = (CUmemGenericAllocationHandle)(uintptr_t)mapping->physical;
    }
    memory_unlock();
    return mapping ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *access, size_t count)
{
    TRY(driver_ready());
    memory_lock();
    struct allocation *reserved = reservation_at(address);
    bool mapped = reserved && covers(reserved, address, bytes);
    memory_unlock();
    return mapped && access && count ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr address)
{
    TRY(driver_ready());
    if (!flags || !location)
        return CUDA_ERROR_INVALID_VALUE;
    memory_lock();
    struct mapping *mapping = mapping_at(address);
    *flags = mapping && mapping->physical->device->ordinal == location->id ? 3 : 0;
    memory_unlock();
    return mapping ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* ------------------------------------------------------------------------------------- other processes */

EXPORT CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle handle, int type, unsigned long long flags)
{
    struct physical *physical;
    TRY(physical_of(handle, &physical));
    if (!out || flags || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR ||
        !(physical->properties.requested_handle_types & type))
        return CUDA_ERROR_INVALID_VALUE;
    struct shared_handle shared = {FD_MAGIC, physical->device->card, physical->group, physical->bytes, physical->properties};
    int file = sim_export(physical->object.record, &shared, sizeof shared);
    if (file < 0)
        return CUDA_ERROR_OPERATING_SYSTEM;
    memcpy(out, &file, sizeof file);
    physical->shared = physical->group;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *made, void *handle, int type)
{
    struct shared_handle shared;
    struct sim_kept kept;
    TRY(driver_ready());
    if (!made || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_INVALID_VALUE;
    if (!sim_exported((int)(intptr_t)handle, &kept, &shared, sizeof shared) || shared.magic != FD_MAGIC)
        return CUDA_ERROR_INVALID_VALUE;
    struct device *device = device_on(shared.card);
    if (!device)
        return CUDA_ERROR_INVALID_DEVICE;
    uint32_t record = sim_import(kept.record, kept.generation);
    struct physical *physical = physical_new(device, shared.bytes, &shared.properties, record);
    if (physical)
        physical->group = physical->shared = shared.group;
    *made = (CUmemGenericAllocationHandle)(uintptr_t)physical;
    return physical ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
