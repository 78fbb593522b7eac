/* A pool of stream-ordered memory. */
#ifndef GPUSLICE_SIM_POOL_H
#define GPUSLICE_SIM_POOL_H

#include "driver.h"

#define BLOCK_STEP UINT64_C(512)

struct block {
    uint64_t offset, bytes, asked;
    bool taken;
    uint64_t freed_on, mark; /* the stream that frees it, and the work before that; 0: it is free for everybody */
    struct block *next;      /* by offset, without gaps */
};

struct chunk {
    struct pool *pool;
    struct allocation *allocation;
    struct block *blocks;
    uint64_t used;
    struct chunk *next;
};

/* What an imported pool keeps of what was opened of it, until it is destroyed here. */
struct opened {
    uint32_t record;
    struct opened *next;
};

enum { PINNED = 1, MANAGED = 2 };                    /* allocation types */
enum { FOLLOW_EVENTS = 1, OPPORTUNISTIC, INTERNAL }; /* CU_MEMPOOL_ATTR_REUSE_…: see pool.c */

struct pool {
    struct object object;
    struct device *device; /* that gives the memory: for managed memory of no place, the one that made the pool */
    CUmemLocation location;
    int type;
    struct chunk *chunks;
    uint64_t reserved, reserved_high, used, used_high, release_threshold, max_bytes;
    int reuse[4];
    int handle_types;
    bool destroyed, is_default, imported;
    struct opened *opened;
};

CUresult pool_allocate(struct pool *pool, uint64_t bytes, struct stream *stream, CUdeviceptr *address);
void pool_trim(struct pool *pool, uint64_t keep);
void pool_settle_destroyed(struct pool *pool); /* under memory_lock */

#endif
