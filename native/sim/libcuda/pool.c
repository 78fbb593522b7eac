/* Stream-ordered allocation. A pool takes chunks from the card and deals out blocks of them; a freed block stays with
 * the pool until trimming, or synchronising above the release threshold, gives its chunk back. A free takes effect when its
 * stream gets there: until then the chunk cannot go, and the block is for that stream alone, or for another by the three
 * policies of a pool (CUDA C++ Programming Guide, "Stream Ordered Memory Allocator", "Memory Reuse Policies"; CUDA Driver
 * API, CUmemPool_attribute; all are enabled unless the program disables them):
 *
 *   FOLLOW_EVENTS  before more memory is taken from the card, a block whose free precedes the allocation by events or by the
 *                  legacy stream
 *   OPPORTUNISTIC  a block whose free has happened already; without it, that counts from the next synchronisation on
 *   INTERNAL       when the card has no more memory, any free block: the allocating stream is made to wait for its free
 */
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

static bool is_alike(const struct block *one, const struct block *other)
{
    return !one->taken && !other->taken && one->freed_on == other->freed_on;
}

/* The later of two ends of one stream, whose work is in one queue. */
static uint64_t later(uint64_t one, uint64_t other) { return one > other ? one : other; }

/* Blocks whose stream has got to their free are everybody's. */
static void ripen(struct pool *pool)
{
    for (struct chunk *chunk = pool->chunks; chunk; chunk = chunk->next) {
        for (struct block *block = chunk->blocks; block; block = block->next)
            if (!block->taken && block->freed_on && sim_engine_reached(block->mark))
                block->freed_on = block->mark = 0;
        for (struct block *next, *block = chunk->blocks; block; block = next) {
            next = block->next;
            if (!next || !is_alike(block, next))
                continue;
            block->mark = later(block->mark, next->mark);
            block->bytes += next->bytes;
            block->next = next->next;
            free(next);
            next = block; /* and the one behind it */
        }
    }
}

static bool is_outstanding(const struct chunk *chunk)
{
    bool pending = chunk->used != 0;
    for (const struct block *block = chunk->blocks; block && !pending; block = block->next)
        pending = block->freed_on && !sim_engine_reached(block->mark);
    return pending;
}

/* Gives whole free chunks back while at least `keep` bytes stay reserved. Frees to come "count as outstanding"
 * (cuMemPoolTrimTo). */
static void trim(struct pool *pool, uint64_t keep)
{
    for (struct chunk **link = &pool->chunks; *link && pool->reserved > keep;) {
        bool can_go = pool->reserved - (*link)->allocation->pages_bytes >= keep && !is_outstanding(*link);
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

enum reuse { AT_ONCE, AFTER_A_WAIT };

/* A block for this stream; after a wait, one that another stream is about to free. */
static struct block *fit(struct pool *pool, uint64_t bytes, const struct stream *stream, enum reuse reuse, struct chunk **in)
{
    for (*in = pool->chunks; *in; *in = (*in)->next)
        for (struct block *block = (*in)->blocks; block; block = block->next)
            if (!block->taken && block->bytes >= bytes &&
                (reuse == AFTER_A_WAIT || !block->freed_on || block->freed_on == stream->id ||
                 (pool->reuse[FOLLOW_EVENTS] && sim_engine_follows(stream->mark, block->mark))))
                return block;
    return NULL;
}

static struct block *fit_anywhere(struct pool *pool, uint64_t bytes, const struct stream *stream, struct chunk **in)
{
    if (pool->reuse[OPPORTUNISTIC])
        ripen(pool);
    struct block *block = fit(pool, bytes, stream, AT_ONCE, in);
    if (!block && grow(pool, bytes))
        block = fit(pool, bytes, stream, AT_ONCE, in);
    if (!block && pool->reuse[INTERNAL])
        block = fit(pool, bytes, stream, AFTER_A_WAIT, in);
    return block;
}

static void take(struct pool *pool, struct chunk *chunk, struct block *block, uint64_t bytes)
{
    if (block->bytes > bytes) {
        struct block *rest = new_block(block->offset + bytes, block->bytes - bytes, block->next);
        if (rest) {
            rest->freed_on = block->freed_on;
            rest->mark = block->mark;
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

CUresult pool_allocate(struct pool *pool, uint64_t bytes, struct stream *stream, CUdeviceptr *address)
{
    struct chunk *chunk;
    uint64_t rounded = (bytes + BLOCK_STEP - 1) / BLOCK_STEP * BLOCK_STEP, awaited = 0;
    if (!bytes)
        return CUDA_ERROR_INVALID_VALUE;
    if (bytes > UINT64_C(1) << 48)
        return CUDA_ERROR_OUT_OF_MEMORY;
    may_wait("cuMemAllocAsync"); /* for the card to give memory, or for room in the stream's queue */
    gate_pass("pool");
    stream_mark(stream); /* it may follow the legacy stream */
    memory_lock();
    uint64_t before = pool->reserved;
    struct block *block = fit_anywhere(pool, rounded, stream, &chunk);
    bool grown = pool->reserved > before;
    if (block) {
        take(pool, chunk, block, rounded);
        awaited = block->freed_on != stream->id ? block->mark : 0;
        block->freed_on = block->mark = 0;
        block->asked = bytes;
        *address = chunk->allocation->address + block->offset;
    }
    memory_unlock();
    stream_await(stream, awaited);
    if (grown)
        gate_pass("pool-grown");
    return block ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult block_free(struct allocation *allocation, uint64_t address, uint64_t stream, uint64_t mark)
{
    struct chunk *chunk = allocation->detail;
    struct block *block = chunk->blocks;
    while (block && block->offset != address - allocation->address)
        block = block->next;
    if (!block || !block->taken)
        return CUDA_ERROR_INVALID_VALUE;
    block->taken = false;
    block->freed_on = mark ? stream : 0;
    block->mark = mark;
    chunk->used -= block->bytes;
    chunk->pool->used -= block->bytes;
    if (chunk->pool->destroyed)
        pool_settle_destroyed(chunk->pool);
    else if (chunk->pool->reuse[OPPORTUNISTIC])
        ripen(chunk->pool);
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

struct pool *pool_of_block(const struct allocation *allocation) { return ((const struct chunk *)allocation->detail)->pool; }

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
    if (pool->device != device)
        return;
    ripen(pool);
    if (!pool->destroyed && pool->reserved > pool->release_threshold)
        trim(pool, pool->release_threshold);
}

/* Under memory_lock. Whose last free was still to come when it was destroyed. */
static void find_destroyed(struct object *object, void *found)
{
    struct pool *pool = (struct pool *)object;
    bool outstanding = !pool->destroyed;
    for (const struct chunk *chunk = pool->chunks; chunk && !outstanding; chunk = chunk->next)
        outstanding = is_outstanding(chunk);
    if (!outstanding)
        *(struct pool **)found = pool;
}

void pools_settle(struct device *device)
{
    memory_lock();
    struct pool *destroyed;
    objects_each(OBJECT_POOL, settle, device);
    do {
        destroyed = NULL;
        objects_each(OBJECT_POOL, find_destroyed, &destroyed);
        if (destroyed)
            pool_settle_destroyed(destroyed);
    } while (destroyed);
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
