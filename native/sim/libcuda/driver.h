/* What the parts of libcuda share within one process. */
#ifndef GPUSLICE_SIM_DRIVER_H
#define GPUSLICE_SIM_DRIVER_H

#include <pthread.h>
#include <stdbool.h>

#include "../state/state.h"
#include "cuda_abi.h"

#define MIB (UINT64_C(1) << 20)
#define TRY(call)                                                                                                              \
    do {                                                                                                                       \
        CUresult try_result = (call);                                                                                          \
        if (try_result != CUDA_SUCCESS)                                                                                        \
            return try_result;                                                                                                 \
    } while (0)

/* Objects behind handles. Their memory is never given back, so a stale handle is recognised, not followed into chaos. */
enum object_kind {
    OBJECT_CONTEXT = 1,
    OBJECT_STREAM,
    OBJECT_EVENT,
    OBJECT_MODULE,
    OBJECT_FUNCTION,
    OBJECT_ARRAY,
    OBJECT_POOL,
    OBJECT_GRAPH,
    OBJECT_GRAPH_EXEC,
    OBJECT_NODE,
    OBJECT_PHYSICAL,
    OBJECT_EXTERNAL,
    OBJECT_GREEN,
    OBJECT_CALLBACK,
    OBJECT_LINK,
    OBJECT_KINDS
};

struct object {
    uint32_t magic;
    enum object_kind kind;
    struct context *owner;          /* it dies with this context */
    uint32_t record;                /* what it holds in the accounts, 0 for nothing */
    struct object *next, *previous; /* among the living of its kind; next among the free */
};

void *object_new(enum object_kind kind, size_t bytes, struct context *owner);
/* With fields that visitors look at set from the start. */
void *object_new_as(enum object_kind kind, size_t bytes, struct context *owner, const void *initial);
bool object_is(const void *handle, enum object_kind kind);
bool object_lives(const void *handle, enum object_kind kind); /* the driver's own question, of one that it kept */
void object_free(void *handle);                               /* releases its record too */
/* Visits the living, newest first; the visitor makes and frees no objects. */
void objects_each(enum object_kind kind, void (*visit)(struct object *object, void *with), void *with);
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
    struct context *memory; /* whose memory and code are what is made in it: of a green one, the primary one */
    unsigned flags, api_version;
    bool primary; /* one a device: the object stays while the context comes and goes */
    bool active;
    uint32_t limit_record; /* what its own record is to it, for heaps grown by cuCtxSetLimit */
    uint64_t id;
    uint64_t limits[LIMITS];
    struct stream *legacy_stream;
    uint64_t marks[SIM_CONNECTIONS]; /* the last work of its streams, by connection */
    unsigned blocking_streams;       /* made, ever: those that wait for the legacy stream, and it for them */
    int cache_config, shared_config;
};

struct stream {
    struct object object;
    struct device *device;
    unsigned flags;
    int priority;
    bool legacy, per_thread;
    uint64_t mark;                              /* the last work on it */
    uint64_t awaited_legacy, awaited_by_legacy; /* the marks at which this stream and the legacy one last met */
    uint64_t id;
    struct graph *capturing;
    struct node *captured_last; /* what the next captured node depends on */
    int capture_mode;
    pthread_t capture_thread;
    bool capture_spoiled; /* by a call that was not to be made meanwhile */
};

struct global {
    char *name;
    struct allocation *allocation;
    struct global *next;
};

struct module {
    struct object object; /* its record is unused: a library may be loaded on several devices */
    bool library;         /* loaded on a device when a kernel of it is first used there */
    uint64_t bytes;
    char *ptx;                   /* the text, where the image is one: it knows its kernels' names */
    uint32_t records[SIM_CARDS]; /* by ordinal */
    struct function *functions;
    struct global *globals;
};

struct function {
    struct object object;
    struct module *module;
    char name[232];
    uint64_t duration_ns;     /* ABSENT to follow the card's */
    bool duration_from_first; /* the first parameter says how long it takes */
    struct function *next;
};

extern unsigned device_count;
extern struct device devices[SIM_CARDS];

CUresult driver_ready(void);                                  /* a locked process waits here until it is unlocked */
CUresult driver_started(void);                                /* as above without waiting */
CUresult device_of(CUdevice ordinal, struct device **device); /* checks that the driver is ready */
/* Waits there as long as the file of that name is in the folder GPUSLICE_SIM_GATES, and says by NAME.reached that it does;
 * without one for a random time up to GPUSLICE_SIM_LINGER_US. For tests of what happens in the midst of a call. */
void gate_pass(const char *name);
/* In every call that may wait for work, for the card or for room in a queue: a library in front of the driver that holds a lock of its
 * own across it keeps its other threads waiting too, or all of them for ever. Ends the process with a message then. */
void may_wait(const char *call);
struct device *device_on(uint32_t card); /* NULL for a card that this process does not see */
/* Calls of a process that is locked wait here; and what a checkpoint had copied to its host memory is given back. */
struct sim_process;
void checkpoint_await(struct sim_process *self);
/* Sets aside addresses for such copies, at cuInit. */
void checkpoint_make_room(void);

/* The content of a file without a name, which another process may be given. */
CUresult share_by_file(const char *name, const void *content, size_t bytes, int *file);
const struct sim_card *card_of(const struct device *device);
CUresult device_fault(const struct device *device);

CUresult context_current(struct context **context); /* ready, current, alive, not failing */
bool context_is(const struct context *context);
struct context *context_new(struct device *device, unsigned flags, unsigned api_version); /* not active yet */
CUresult context_activate(struct context *context, uint64_t bytes);                       /* takes its share of the card */
CUresult primary_retain(struct device *device, CUcontext *context);
/* Memory that does not come at once: a record, 0 when the card has no room for all of it. */
uint32_t charge_slowly(const struct device *device, enum sim_kind kind, uint64_t bytes, uint64_t duration_ns);

CUresult module_measure(struct module *module, const void *image); /* sets bytes and ptx, clears the rest */
CUresult module_read_file(const char *path, char **content);       /* to be freed, also on failure */
CUresult module_unload(struct module *module);
CUresult module_load(struct module *module, struct device *device); /* takes its memory unless it has it there */
void modules_unload(const struct context *context);                 /* what a context that ends had loaded */

/* Streams. NULL, 1 and 2 stand for the current context's own streams. */
CUresult stream_of(CUstream handle, struct stream **stream);
struct stream *stream_new(struct context *context, unsigned flags, int priority);
void stream_work(struct stream *stream, uint64_t duration_ns, uint32_t width); /* of SIM_WHOLE_CARD */
void stream_await(struct stream *stream, uint64_t mark);
uint64_t stream_mark(struct stream *stream); /* behind all that was given to it until now */
uint64_t stream_hold(struct stream *stream); /* what follows waits until the mark is let go; 0 on failure */
void stream_wait(struct stream *stream);
void context_wait(struct context *context);                                          /* for all that its streams were given */
uint32_t grid_width(const struct device *device, uint64_t blocks, uint64_t threads); /* how much of the card it fills */
#define PER_THREAD(stream) ((stream) ? (stream) : CU_STREAM_PER_THREAD)

/* Host functions run on a thread of their own when the work before them is finished. */
CUresult task_add(struct stream *stream, CUhostFn function, void *user_data);

/* What captured streams record (graph.c). */
CUresult capture_kernel(struct stream *stream, uint64_t duration_ns, uint32_t width);
CUresult capture_simple(struct stream *stream, int node_type);
CUresult capture_host(struct stream *stream, CUhostFn function, void *user_data);
CUresult capture_allocate(struct stream *stream, size_t bytes, CUdeviceptr *address);
CUresult capture_free(struct stream *stream, CUdeviceptr address);
uint64_t kernel_duration(const struct device *device, const struct function *function, void **parameters, void **extra);

extern const uint64_t default_limits[LIMITS];
void context_deactivate(struct context *context); /* everything in it goes, the object stays */

/* Device memory known to this process, found by address. */
enum allocation_kind {
    ALLOCATION_PLAIN,
    ALLOCATION_MANAGED,
    ALLOCATION_CHUNK,
    ALLOCATION_RESERVED,
    ALLOCATION_IMPORT,
    ALLOCATION_GRAPH,
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
    bool live;               /* graphs: between an allocation node and its free */
    unsigned imports;        /* times opened here */
    void *detail;            /* chunk, reservation or node */
    struct allocation *next; /* in the list of all */
    struct allocation *previous;
};

void memory_lock(void);
void memory_unlock(void);
/* Under memory_lock. */
struct allocation *allocation_new(uint64_t bytes, enum allocation_kind kind, struct context *context);
struct allocation *allocation_at(uint64_t address);  /* also for addresses inside it */
void allocation_drop(struct allocation *allocation); /* releases its record and addresses */
struct allocation *allocation_first(void);

/* Pools (pool.c). block_free and block_range under memory_lock. */
CUresult block_free(struct allocation *chunk, uint64_t address, uint64_t stream,
                    uint64_t mark);                           /* after the mark, on that stream */
CUresult memory_free(CUdeviceptr address, struct stream *on); /* NULL: at once */
bool block_range(const struct allocation *chunk, uint64_t *start, uint64_t *bytes);
struct pool *pool_of_block(const struct allocation *chunk);
CUresult graph_memory_free(struct allocation *allocation); /* under memory_lock */
void graph_memory_empty(struct device *device);
void pools_empty(struct device *device);  /* the default pool, when its primary context ends */
void pools_settle(struct device *device); /* at synchronisation, what is free above the threshold goes back */

/* Host memory behind device addresses: small allocations keep their content, large ones have none. */
void bytes_move(uint64_t to, uint64_t from, size_t bytes);
void bytes_fill(uint64_t to, const void *pattern, size_t pattern_bytes, size_t count);

void kept_drop_all(struct context *context); /* what the runtime keeps by context (export_table.c) */

void array_pages_drop(const struct context *owner);
void tiles_drop(const void *array); /* what was mapped into a sparse array (tiles.c) */

/* Page-locked host memory (host.c). */
bool host_block_at(const void *address, void **start, size_t *bytes, unsigned *flags);

/* Entry points that others build on. */
CUresult cuMemFree_v2(CUdeviceptr address);
CUresult cuCtxDestroy_v2(CUcontext context);
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice ordinal);
CUresult cuModuleGetFunction(CUfunction *found, CUmodule module, const char *name);
CUresult cuModuleGetFunctionCount(unsigned *count, CUmodule module);
CUresult cuModuleGetGlobal_v2(CUdeviceptr *address, size_t *bytes, CUmodule module, const char *name);
CUresult cuFuncGetName(const char **name, CUfunction function);

#endif
