/* The entry points of stream-ordered allocation. */
#include <string.h>

#include "graph.h"
#include "pool.h"

enum { RELEASE_THRESHOLD = 4, RESERVED, RESERVED_HIGH, USED, USED_HIGH };
enum { ALLOCATION_TYPE = 9, HANDLE_TYPES, LOCATION_ID, LOCATION_TYPE };
enum { MANAGED_SINCE = 13000 };

static CUresult pool_of(CUmemoryPool pool)
{
    TRY(driver_ready());
    return object_is(pool, OBJECT_POOL) && !pool->destroyed ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static struct pool *pool_new(struct device *device)
{
    const struct pool initial = {
        .device = device, .location = {CU_MEM_LOCATION_TYPE_DEVICE, device->ordinal}, .type = PINNED, .reuse = {0, 1, 1, 1}};
    return object_new_as(OBJECT_POOL, sizeof initial, NULL, &initial);
}

static struct pool *default_pool(struct device *device)
{
    memory_lock();
    if (!device->default_pool && (device->default_pool = pool_new(device)))
        device->default_pool->is_default = true;
    memory_unlock();
    return device->default_pool;
}

static struct pool *current_pool(struct device *device)
{
    struct pool *pool = device->current_pool;
    return pool && !pool->destroyed ? pool : default_pool(device);
}

/* ---------------------------------------------------------------------------------- taking and giving */

static CUresult allocate(CUdeviceptr *address, size_t bytes, CUmemoryPool pool, CUstream handle)
{
    struct stream *stream;
    TRY(stream_of(handle, &stream));
    if (!address || !bytes)
        return CUDA_ERROR_INVALID_VALUE;
    if (stream->capturing)
        return capture_allocate(stream, bytes, address);
    struct pool *from = pool ? pool : current_pool(stream->device);
    return from ? pool_allocate(from, bytes, stream, address) : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuMemAllocAsync(CUdeviceptr *address, size_t bytes, CUstream stream)
{
    return allocate(address, bytes, NULL, stream);
}

EXPORT CUresult cuMemAllocAsync_ptsz(CUdeviceptr *address, size_t bytes, CUstream stream)
{
    return allocate(address, bytes, NULL, PER_THREAD(stream));
}

EXPORT CUresult cuMemAllocFromPoolAsync(CUdeviceptr *address, size_t bytes, CUmemoryPool pool, CUstream stream)
{
    TRY(pool_of(pool));
    if (pool->imported) /* its maker allocates */
        return CUDA_ERROR_INVALID_VALUE;
    return allocate(address, bytes, pool, stream);
}

EXPORT CUresult cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *address, size_t bytes, CUmemoryPool pool, CUstream stream)
{
    return cuMemAllocFromPoolAsync(address, bytes, pool, PER_THREAD(stream));
}

EXPORT CUresult cuMemFreeAsync(CUdeviceptr address, CUstream handle)
{
    struct stream *stream;
    TRY(stream_of(handle, &stream));
    if (stream->capturing)
        return capture_free(stream, address);
    return address ? memory_free(address, stream) : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemFreeAsync_ptsz(CUdeviceptr address, CUstream stream)
{
    return cuMemFreeAsync(address, PER_THREAD(stream));
}

/* ---------------------------------------------------------------------------------------------- pools */

/* Managed memory may be made for no place or for the host: it comes to the card that uses it. */
static CUresult device_for(const CUmemPoolProps *properties, struct device **device)
{
    struct context *context;
    if (properties->location.type == CU_MEM_LOCATION_TYPE_DEVICE)
        return device_of(properties->location.id, device);
    if (properties->type != MANAGED)
        return CUDA_ERROR_NOT_SUPPORTED;
    TRY(context_current(&context));
    *device = context->device;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemPoolCreate(CUmemoryPool *made, const CUmemPoolProps *properties)
{
    struct device *device;
    TRY(driver_ready());
    if (!made || !properties || (properties->type != PINNED && properties->type != MANAGED))
        return CUDA_ERROR_INVALID_VALUE;
    if (properties->type == MANAGED && sim_state()->cuda_version < MANAGED_SINCE)
        return CUDA_ERROR_NOT_SUPPORTED;
    TRY(device_for(properties, &device));
    *made = pool_new(device);
    if (!*made)
        return CUDA_ERROR_OUT_OF_MEMORY;
    (*made)->location = properties->location;
    (*made)->type = properties->type;
    (*made)->max_bytes = properties->max_bytes;
    (*made)->handle_types = properties->handle_types;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemPoolDestroy(CUmemoryPool pool)
{
    may_wait("cuMemPoolDestroy");
    TRY(pool_of(pool));
    if (pool->is_default)
        return CUDA_ERROR_INVALID_VALUE;
    memory_lock();
    pool->destroyed = true;
    pool_settle_destroyed(pool);
    memory_unlock();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t keep)
{
    may_wait("cuMemPoolTrimTo"); /* for the card to take memory back */
    TRY(capture_permits());
    TRY(pool_of(pool));
    pool_trim(pool, keep);
    return CUDA_SUCCESS;
}

static uint64_t *attribute_of(struct pool *pool, int attribute)
{
    switch (attribute) {
    case RELEASE_THRESHOLD: return &pool->release_threshold;
    case RESERVED: return &pool->reserved;
    case RESERVED_HIGH: return &pool->reserved_high;
    case USED: return &pool->used;
    case USED_HIGH: return &pool->used_high;
    default: return NULL;
    }
}

static const int *fact_of(const struct pool *pool, int attribute)
{
    switch (attribute) {
    case ALLOCATION_TYPE: return &pool->type;
    case HANDLE_TYPES: return &pool->handle_types;
    case LOCATION_ID: return &pool->location.id;
    case LOCATION_TYPE: return &pool->location.type;
    default: return attribute >= FOLLOW_EVENTS && attribute <= INTERNAL ? &pool->reuse[attribute] : NULL;
    }
}

EXPORT CUresult cuMemPoolGetAttribute(CUmemoryPool pool, int attribute, void *value)
{
    TRY(capture_permits());
    TRY(pool_of(pool));
    const int *fact = fact_of(pool, attribute);
    const uint64_t *bytes = attribute_of(pool, attribute);
    if (!value || (!fact && !bytes))
        return CUDA_ERROR_INVALID_VALUE;
    memory_lock();
    if (fact)
        memcpy(value, fact, sizeof *fact);
    else
        memcpy(value, bytes, sizeof *bytes);
    memory_unlock();
    return CUDA_SUCCESS;
}

static CUresult lower_high(uint64_t *high, uint64_t now, uint64_t value)
{
    if (value)
        return CUDA_ERROR_INVALID_VALUE;
    *high = now;
    return CUDA_SUCCESS;
}

static CUresult set_attribute(struct pool *pool, int attribute, const void *value)
{
    uint64_t wide;
    if (attribute >= FOLLOW_EVENTS && attribute <= INTERNAL) {
        memcpy(&pool->reuse[attribute], value, sizeof(int));
        return CUDA_SUCCESS;
    }
    memcpy(&wide, value, sizeof wide);
    switch (attribute) {
    case RELEASE_THRESHOLD: pool->release_threshold = wide; return CUDA_SUCCESS;
    case RESERVED_HIGH: return lower_high(&pool->reserved_high, pool->reserved, wide);
    case USED_HIGH: return lower_high(&pool->used_high, pool->used, wide);
    default: return CUDA_ERROR_INVALID_VALUE;
    }
}

EXPORT CUresult cuMemPoolSetAttribute(CUmemoryPool pool, int attribute, void *value)
{
    TRY(capture_permits());
    TRY(pool_of(pool));
    if (!value)
        return CUDA_ERROR_INVALID_VALUE;
    memory_lock();
    CUresult result = set_attribute(pool, attribute, value);
    memory_unlock();
    return result;
}

EXPORT CUresult cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc *access, size_t count)
{
    TRY(pool_of(pool));
    return count && !access ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

EXPORT CUresult cuMemPoolGetAccess(int *flags, CUmemoryPool pool, CUmemLocation *location)
{
    TRY(pool_of(pool));
    if (!flags || !location)
        return CUDA_ERROR_INVALID_VALUE;
    *flags = location->id == pool->device->ordinal ? 3 : 0;
    return CUDA_SUCCESS;
}

/* ------------------------------------------------------------------------------------ a device's pools */

EXPORT CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *pool, CUdevice ordinal)
{
    struct device *device;
    TRY(device_of(ordinal, &device));
    if (!pool)
        return CUDA_ERROR_INVALID_VALUE;
    *pool = default_pool(device);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice ordinal)
{
    struct device *device;
    TRY(device_of(ordinal, &device));
    if (!pool)
        return CUDA_ERROR_INVALID_VALUE;
    *pool = current_pool(device);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceSetMemPool(CUdevice ordinal, CUmemoryPool pool)
{
    struct device *device;
    TRY(device_of(ordinal, &device));
    TRY(pool_of(pool));
    if (pool->device != device)
        return CUDA_ERROR_INVALID_VALUE;
    device->current_pool = pool;
    return CUDA_SUCCESS;
}

/* The forms of CUDA 13 name a place and a kind of memory; here only a device's own is modelled. */
static CUresult located(const CUmemLocation *location, int type)
{
    if (!location || type != 1)
        return CUDA_ERROR_INVALID_VALUE;
    return location->type == CU_MEM_LOCATION_TYPE_DEVICE ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
}

EXPORT CUresult cuMemGetDefaultMemPool(CUmemoryPool *pool, CUmemLocation *location, int type)
{
    TRY(located(location, type));
    return cuDeviceGetDefaultMemPool(pool, location->id);
}

EXPORT CUresult cuMemGetMemPool(CUmemoryPool *pool, CUmemLocation *location, int type)
{
    TRY(located(location, type));
    return cuDeviceGetMemPool(pool, location->id);
}

EXPORT CUresult cuMemSetMemPool(CUmemLocation *location, int type, CUmemoryPool pool)
{
    TRY(located(location, type));
    return cuDeviceSetMemPool(location->id, pool);
}
