/* Pools of other processes: the pool is found by a descriptor, each allocation by 64 bytes. What is opened here is
 * counted where it was allocated. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "pool.h"

#define FD_MAGIC UINT64_C(0x4c53504f4f4c5631)

struct shared_pool {
    uint64_t magic;
    uint32_t card, padding;
};

struct shared_block {
    uint32_t record, generation;
    uint64_t offset, bytes, chunk_bytes;
};

EXPORT CUresult cuMemPoolExportToShareableHandle(void *out, CUmemoryPool pool, int type, unsigned long long flags)
{
    TRY(driver_ready());
    if (!object_is(pool, OBJECT_POOL) || !out || flags || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR ||
        !(pool->handle_types & type))
        return CUDA_ERROR_INVALID_VALUE;
    struct shared_pool shared = {FD_MAGIC, pool->device->card, 0};
    return share_by_file("cuda-pool", &shared, sizeof shared, out);
}

EXPORT CUresult cuMemPoolImportFromShareableHandle(CUmemoryPool *made, void *handle, int type, unsigned long long flags)
{
    struct shared_pool shared;
    TRY(driver_ready());
    if (!made || flags || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR ||
        pread((int)(intptr_t)handle, &shared, sizeof shared, 0) != (ssize_t)sizeof shared || shared.magic != FD_MAGIC)
        return CUDA_ERROR_INVALID_VALUE;
    struct device *device = device_on(shared.card);
    if (!device)
        return CUDA_ERROR_INVALID_DEVICE;
    struct pool *pool = object_new(OBJECT_POOL, sizeof *pool, NULL);
    if (!pool)
        return CUDA_ERROR_OUT_OF_MEMORY;
    pool->device = device;
    pool->imported = true;
    *made = pool;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemPoolExportPointer(void *out, CUdeviceptr address)
{
    struct shared_block shared = {0};
    uint64_t start = address;
    TRY(driver_ready());
    memory_lock();
    const struct allocation *chunk = allocation_at(address);
    bool known = out && chunk && chunk->kind == ALLOCATION_CHUNK && block_range(chunk, &start, &shared.bytes);
    if (known) {
        shared.record = chunk->record;
        shared.generation = sim_state()->records[chunk->record].generation;
        shared.offset = address - chunk->address;
        memset(out, 0, 64);
        memcpy(out, &shared, sizeof shared);
    }
    memory_unlock();
    return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* Of what was opened nothing leaves the card as long as the imported pool is there, freed or not, as seen with an H100. */
static bool keep(struct pool *pool, uint32_t record, uint32_t generation)
{
    struct opened *opened = malloc(sizeof *opened);
    uint32_t kept = opened ? sim_import(record, generation) : 0;
    if (!kept) {
        free(opened);
        return false;
    }
    *opened = (struct opened){kept, pool->opened};
    pool->opened = opened;
    return true;
}

EXPORT CUresult cuMemPoolImportPointer(CUdeviceptr *address, CUmemoryPool pool, const void *data)
{
    struct shared_block shared;
    TRY(driver_ready());
    if (!address || !data || !object_is(pool, OBJECT_POOL) || !pool->imported)
        return CUDA_ERROR_INVALID_VALUE;
    memcpy(&shared, data, sizeof shared);
    uint32_t record = shared.bytes ? sim_import(shared.record, shared.generation) : 0;
    if (!record)
        return CUDA_ERROR_INVALID_VALUE;
    memory_lock();
    struct allocation *made = keep(pool, shared.record, shared.generation)
                                  ? allocation_new(shared.bytes, ALLOCATION_PLAIN, NULL) /* freed as other blocks are */
                                  : NULL;
    if (made) {
        made->device = pool->device;
        made->record = record;
        *address = made->address;
    }
    memory_unlock();
    if (!made)
        sim_release(record);
    return made ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
