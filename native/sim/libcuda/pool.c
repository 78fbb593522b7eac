/* Stream-ordered allocation. A pool takes chunks from the card and deals out blocks of them; a freed block stays with
 * the pool until trimming, or synchronising above the release threshold, gives its chunk back. Streams run in order
 * within a process here, so an allocation or a free takes effect when it is called. */
#include <stdlib.h>
#include <string.h>

#include "driver.h"
#include "pool.h"

static uint64_t chunk_bytes_for(uint64_t bytes)
{
    uint64_t step = sim_state()->pool_chunk_bytes;
    return (bytes + step - 1) / step * step;
}

static struct block *new_block(uint64_t offset, uint64_t bytes, struct block *next)
{
    struct block *block = malloc(sizeof *block);
    if (block)
        *block = (struct block){.offset = offset, .bytes = bytes, .next = next};
    return block;
}

static void drop_chunk(struct pool *pool, struct chunk **link)
{
    struct chunk *chunk = *link;
    *link = chunk->next;
    pool->reserved -= chunk->allocation->pages_bytes;
    allocation_drop(chunk->allocation);
    for (struct block *next, *block = chunk->blocks; block; block = next) {
        next = block->next;
        free(block);
    }
    free(chunk);
}

/* Gives whole free chunks back while at least `keep` bytes stay reserved. */
static void trim(struct pool *pool, uint64_t keep)
{
    for (struct chunk **link = &pool->chunks; *link && pool->reserved > keep;) {
        bool can_go = (*link)->used == 0 && pool->reserved - (*link)->allocation->pages_bytes >= keep;
        if (can_go)
            drop_chunk(pool, link);
        else
            link = &(*link)->next;
    }
}

static struct chunk *chunk_of_bytes(struct pool *pool, uint64_t bytes)
{
    struct chunk *chunk = calloc(1, sizeof *chunk);
    struct block *whole = chunk ? new_block(0, bytes, NULL) : NULL;
    struct allocation *allocation = whole ? allocation_new(bytes, ALLOCATION_CHUNK, NULL) : NULL;
    enum sim_kind kind = pool->type == MANAGED ? SIM_MANAGED : SIM_POOL;
    if (allocation) {
        allocation->record = sim_charge(pool->device->card, kind, bytes, allocation->address);
        allocation->device = pool->device;
        allocation->detail = chunk;
    }
    if (allocation && allocation->record) {
        *chunk = (struct chunk){.pool = pool, .allocation = allocation, .blocks = whole, .next = pool->chunks};
        return chunk;
    }
    if (allocation)
        allocation_drop(allocation);
    free(whole);
    free(chunk);
    return NULL;
}

static struct chunk *grow(struct pool *pool, uint64_t bytes)
{
    if (pool->max_bytes && pool->reserved + sim_round(bytes) > pool->max_bytes)
        return NULL;
    struct chunk *chunk = chunk_of_bytes(pool, chunk_bytes_for(bytes));
    if (!chunk) /* little room left: no more than is needed, and without what lies idle */
        trim(pool, 0);
    if (!chunk)
        chunk = chunk_of_bytes(pool, sim_round(bytes));
    if (!chunk)
        return NULL;
    pool->chunks = chunk;
    pool->reserved += chunk->allocation->pages_bytes;
    if (pool->reserved > pool->reserved_high)
        pool->reserved_high = pool->reserved;
    return chunk;
}

static struct block *fit(struct chunk *chunk, uint64_t bytes)
{
    for (struct block *block = chunk->blocks; block; block = block->next)
        if (!block->taken && block->bytes >= bytes)
            return block;
    return NULL;
}

static struct block *fit_anywhere(struct pool *pool, uint64_t bytes, struct chunk **in)
{
    for (struct chunk *chunk = pool->chunks; chunk; chunk = chunk->next) {
        struct block *block = fit(chunk, bytes);
        *in = chunk;
        if (block)
            return block;
    }
    *in = grow(pool, bytes);
    return *in ? fit(*in, bytes) : NULL;
}

static void take(struct pool *pool, struct chunk *chunk, struct block *block, uint64_t bytes)
{
    if (block->bytes > bytes) {
        struct block *rest = new_block(block->offset + bytes, block->bytes - bytes, block->next);
        if (rest) {
            block->next = rest;
            block->bytes = bytes;
        }
    }
    block->taken = true;
    chunk->used += block->bytes;
    pool->used += block->bytes;
    if (pool->used > pool->used_high)
        pool->used_high = pool->used;
}

CUresult pool_allocate(struct pool *pool, uint64_t bytes, CUdeviceptr *address)
{
    struct chunk *chunk;
    uint64_t rounded = (bytes + BLOCK_STEP - 1) / BLOCK_STEP * BLOCK_STEP;
    if (!bytes)
        return CUDA_ERROR_INVALID_VALUE;
    if (bytes > UINT64_C(1) << 48)
        return CUDA_ERROR_OUT_OF_MEMORY;
    gate_pass("pool");
    memory_lock();
    uint64_t before = pool->reserved;
    struct block *block = fit_anywhere(pool, rounded, &chunk);
    bool grown = pool->reserved > before;
    if (block) {
        take(pool, chunk, block, rounded);
        block->asked = bytes;
        *address = chunk->allocation->address + block->offset;
    }
    memory_unlock();
    if (grown)
        gate_pass("pool-grown");
    return block ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static void join_with_next(struct block *block)
{
    struct block *next = block->next;
    if (!next || next->taken || block->taken)
        return;
    block->bytes += next->bytes;
    block->next = next->next;
    free(next);
}

CUresult block_free(struct allocation *allocation, uint64_t address)
{
    struct chunk *chunk = allocation->detail;
    struct block *before = NULL, *block = chunk->blocks;
    while (block && block->offset != address - allocation->address) {
        before = block;
        block = block->next;
    }
    if (!block || !block->taken)
        return CUDA_ERROR_INVALID_VALUE;
    block->taken = false;
    chunk->used -= block->bytes;
    chunk->pool->used -= block->bytes;
    join_with_next(block);
    if (before)
        join_with_next(before);
    if (chunk->pool->destroyed)
        pool_settle_destroyed(chunk->pool);
    return CUDA_SUCCESS;
}

bool block_range(const struct allocation *allocation, uint64_t *start, uint64_t *bytes)
{
    const struct chunk *chunk = allocation->detail;
    uint64_t offset = *start - allocation->address;
    for (const struct block *block = chunk->blocks; block; block = block->next)
        if (block->taken && offset >= block->offset && offset < block->offset + block->asked) {
            *start = allocation->address + block->offset;
            *bytes = block->asked;
            return true;
        }
    return false;
}

struct pool *pool_of_block(const struct allocation *allocation)
{
    return ((const struct chunk *)allocation->detail)->pool;
}

/* A destroyed pool lives on until its last block is freed. */
void pool_settle_destroyed(struct pool *pool)
{
    trim(pool, 0);
    for (struct opened *next, *each = pool->opened; each; each = next) {
        next = each->next;
        sim_release(each->record);
        free(each);
    }
    pool->opened = NULL;
    if (!pool->chunks)
        object_free(pool);
}

void pool_trim(struct pool *pool, uint64_t keep)
{
    memory_lock();
    trim(pool, keep);
    memory_unlock();
}

static void settle(struct object *object, void *device)
{
    struct pool *pool = (struct pool *)object;
    if (pool->device == device && pool->reserved > pool->release_threshold)
        trim(pool, pool->release_threshold);
}

void pools_settle(struct device *device)
{
    memory_lock();
    objects_each(OBJECT_POOL, settle, device);
    memory_unlock();
}

void pools_empty(struct device *device)
{
    struct pool *pool = device->default_pool;
    memory_lock();
    while (pool && pool->chunks) {
        pool->used -= pool->chunks->used;
        drop_chunk(pool, &pool->chunks);
    }
    memory_unlock();
}
