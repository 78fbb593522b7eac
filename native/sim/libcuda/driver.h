/* What the parts of libcuda share within one process. */
#ifndef GPUSLICE_SIM_DRIVER_H
#define GPUSLICE_SIM_DRIVER_H

#include <pthread.h>
#include <stdbool.h>

#include "../state/state.h"
#include "cuda_abi.h"

#define MIB (UINT64_C(1) << 20)
#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        CUresult try_result = (call);                                                                                  \
        if (try_result != CUDA_SUCCESS)                                                                                \
            return try_result;                                                                                         \
    } while (0)

/* Objects behind handles. Their memory is never given back, so a stale handle is recognised, not followed into chaos. */
enum object_kind {
    OBJECT_CONTEXT = 1, OBJECT_STREAM, OBJECT_EVENT, OBJECT_MODULE, OBJECT_FUNCTION, OBJECT_ARRAY, OBJECT_POOL,
    OBJECT_GRAPH, OBJECT_GRAPH_EXEC, OBJECT_NODE, OBJECT_PHYSICAL, OBJECT_EXTERNAL, OBJECT_GREEN, OBJECT_KINDS
};

struct object {
    uint32_t magic;
    enum object_kind kind;
    struct context *owner;        /* it dies with this context */
    uint32_t record;              /* what it holds in the books, 0 for nothing */
    struct object *next, *previous; /* among the living of its kind; next among the free */
};

void *object_new(enum object_kind kind, size_t bytes, struct context *owner);
bool object_is(const void *handle, enum object_kind kind);
void object_free(void *handle); /* releases its record too */
struct object *objects_first(enum object_kind kind); /* the newest of the living */
void objects_free_owned(enum object_kind kind, struct context *owner);

struct device {
    uint32_t card; /* index in the shared state */
    int ordinal;
    struct context *primary;
    unsigned primary_references, primary_flags;
    struct pool *default_pool, *current_pool;
    uint64_t graph_used_high, graph_reserved_high;
};

#define LIMITS 10
struct context {
    struct object object;
    struct device *device;
    unsigned flags, api_version;
    bool primary, green;
    uint32_t limit_record; /* what its own record is to it, for heaps grown by cuCtxSetLimit */
    uint64_t id;
    uint64_t limits[LIMITS];
    int cache_config, shared_config;
};

extern unsigned device_count;
extern struct device devices[SIM_CARDS];

CUresult driver_ready(void);
CUresult device_of(CUdevice ordinal, struct device **device); /* checks that the driver is ready */
const struct sim_card *card_of(const struct device *device);
CUresult device_fault(const struct device *device);

CUresult context_current(struct context **context); /* ready, current, alive, not failing */
bool context_is(const struct context *context);
CUresult context_create(struct device *device, unsigned flags, unsigned api_version, struct context **made);
void context_release_owned(struct context *context); /* everything that dies with it */

/* Device memory known to this process, found by address. */
enum allocation_kind {
    ALLOCATION_PLAIN, ALLOCATION_MANAGED, ALLOCATION_CHUNK, ALLOCATION_RESERVED, ALLOCATION_IMPORT, ALLOCATION_GRAPH,
    ALLOCATION_GLOBAL
};

struct allocation {
    uint64_t address, bytes, pages_bytes;
    enum allocation_kind kind;
    struct context *context;
    struct device *device;
    uint32_t record;
    uint64_t id;
    bool touched;
    unsigned imports; /* times opened here */
    void *detail;     /* chunk, reservation or node */
    struct allocation *next; /* in the list of all */
    struct allocation *previous;
};

void memory_lock(void);
void memory_unlock(void);
/* Under memory_lock. */
struct allocation *allocation_new(uint64_t bytes, enum allocation_kind kind, struct context *context);
struct allocation *allocation_at(uint64_t address); /* also for addresses inside it */
void allocation_drop(struct allocation *allocation); /* releases its record and addresses */
struct allocation *allocation_first(void);

/* Pools (pool.c). block_free and block_range under memory_lock. */
CUresult block_free(struct allocation *chunk, uint64_t address);
bool block_range(const struct allocation *chunk, uint64_t *start, uint64_t *bytes);
struct pool *pool_of_block(const struct allocation *chunk);
void pools_empty(struct device *device); /* the default pool, when its primary context ends */
void pools_settle(struct device *device); /* at synchronisation, what is free above the threshold goes back */

/* Host memory behind device addresses: small allocations keep their content, large ones have none. */
void bytes_move(uint64_t to, uint64_t from, size_t bytes);
void bytes_fill(uint64_t to, const void *pattern, size_t pattern_bytes, size_t count);

#endif
