#include "hooks/pools.h"

#include "policy/driver_overhead.h"

#define POOLS 512
#define GRAPH_DEVICES 64
#define POOL_STEP (UINT64_C(32) << 20) /* pools grow in these */
enum { CU_MEMPOOL_ATTR_ALLOCATION_TYPE = 9, CU_MEMPOOL_ATTR_LOCATION_ID = 11, CU_MEMPOOL_ATTR_LOCATION_TYPE = 12 };
enum { CU_MEM_ALLOCATION_TYPE_MANAGED = 2, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9 };

struct pool {
    uint64_t handle; /* what its blocks name as their owner; 0 for a free place */
    struct gs_card *card; /* NULL: managed memory of no place, which counts where it is first asked for */
    uint64_t charged;
    uint64_t promised; /* reserved for growth that is under way: what it grows by till then is paid for */
    uint64_t shared;   /* of blocks that other processes may have opened, since they were freed here */
    uint64_t live;     /* blocks, once the program has destroyed the pool */
    uint32_t opened;   /* an imported one: counts as an import on its card */
    bool elsewhere;    /* on the host, or another process's: not ours to charge */
    bool destroyed;
};

struct graph_device {
    struct gs_card *card;
    uint64_t charged;
};

static struct pool pools[POOLS];
static int pools_high; /* [0, pools_high) were ever taken */
static struct graph_device graph_devices[GRAPH_DEVICES];
static struct gs_lock lock;
static struct gs_lock growth_lock; /* one pool grows at a time: a second thread may find room in what the first one got */
static bool graphs_exist;
static uint64_t last_destroyed;
bool gs_pools_exist;

/* Drivers count these questions among the calls that spoil a recording. */
static bool ask(uint64_t pool, int attribute, void *value)
{
    int mode = gs_relax_capture();
    int result = DRIVER(cuMemPoolGetAttribute)((CUmemoryPool)(uintptr_t)pool, attribute, value);
    gs_restore_capture(mode);
    return result == CUDA_SUCCESS;
}

bool gs_ask_graph_memory(CUdevice device, int attribute, uint64_t *value)
{
    int mode = gs_relax_capture();
    int result = DRIVER(cuDeviceGetGraphMemAttribute)(device, attribute, value);
    gs_restore_capture(mode);
    return result == CUDA_SUCCESS;
}

static bool find_default_pool(CUmemoryPool *pool, CUdevice device)
{
    int mode = gs_relax_capture();
    int result = DRIVER(cuDeviceGetMemPool)(pool, device);
    gs_restore_capture(mode);
    return result == CUDA_SUCCESS;
}

/* ---- under the lock ---- */

static struct pool *find(uint64_t handle)
{
    for (int i = 0; i < pools_high; i++)
        if (pools[i].handle == handle)
            return &pools[i];
    return handle == 0 && pools_high < POOLS ? &pools[pools_high++] : NULL;
}

static void recharge(struct gs_card *card, uint64_t *charged, uint64_t now, uint64_t reserved)
{
    gs_settle(card, reserved + *charged, now);
    *charged = now;
}

/* What a pool gives back may live on where another process opened a block of it. */
static void leave_shared(struct pool *pool, uint64_t now)
{
    uint64_t less = pool->charged > now ? pool->charged - now : 0;
    uint64_t bytes = less < pool->shared ? less : pool->shared;
    if (!bytes)
        return;
    gs_accounts_exported(&gs_accounts, pool->card->index, bytes);
    gs_accounts_return_exported(&gs_accounts, pool->card->index, bytes);
    pool->shared -= bytes;
    pool->charged -= bytes;
}

/* `reserved`: by this thread, for growth that is over now. */
static void settle_pool(struct pool *pool, uint64_t reserved)
{
    uint64_t now = 0;
    pool->promised -= reserved;
    if (pool->destroyed || pool->elsewhere || !pool->card)
        return;
    if (!ask(pool->handle, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &now)) {
        pool->charged += reserved; /* nothing known: what was granted stays */
        return;
    }
    leave_shared(pool, now);
    uint64_t covered = pool->charged + reserved;
    if (now > covered) /* by a thread that grows it at this moment, perhaps, and has reserved for that */
        now = now - covered > pool->promised ? now - pool->promised : covered;
    recharge(pool->card, &pool->charged, now, reserved);
}

static void settle_graph_device(CUdevice device, uint64_t reserved)
{
    struct graph_device *entry = &graph_devices[device];
    uint64_t now = 0;
    if (entry->card && gs_ask_graph_memory(device, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT, &now))
        recharge(entry->card, &entry->charged, now, reserved);
}

/* Where a pool we did not see being made keeps its memory. Managed memory may come to the card from anywhere. */
static void locate(struct pool *pool, struct gs_card *card)
{
    int type = CU_MEM_LOCATION_TYPE_DEVICE, device = -1, kind = 0;
    pool->card = card;
    if (!ask(pool->handle, CU_MEMPOOL_ATTR_LOCATION_TYPE, &type))
        return;
    bool on_device = type == CU_MEM_LOCATION_TYPE_DEVICE;
    ask(pool->handle, CU_MEMPOOL_ATTR_ALLOCATION_TYPE, &kind);
    pool->elsewhere = !on_device && kind != CU_MEM_ALLOCATION_TYPE_MANAGED;
    if (on_device && ask(pool->handle, CU_MEMPOOL_ATTR_LOCATION_ID, &device)) {
        struct gs_card *located = gs_card_of_device(device);
        pool->card = located ? located : card;
    }
}

static struct pool *add(uint64_t handle)
{
    struct pool *pool = find(0);
    if (!pool)
        return NULL;
    *pool = (struct pool){.handle = handle};
    __atomic_store_n(&gs_pools_exist, true, __ATOMIC_RELAXED);
    return pool;
}

static struct pool *find_or_locate(uint64_t handle, struct gs_card *card)
{
    struct pool *pool = find(handle);
    if (!pool && (pool = add(handle)))
        locate(pool, card);
    return pool;
}

/* ---- all of them ---- */

void gs_pools_refresh(void)
{
    gs_lock(&lock);
    for (int i = 0; i < pools_high; i++)
        if (pools[i].handle)
            settle_pool(&pools[i], 0);
    for (CUdevice device = 0; graphs_exist && device < GRAPH_DEVICES; device++)
        settle_graph_device(device, 0);
    gs_unlock(&lock);
}

bool gs_pools_trim(void)
{
    if (!__atomic_load_n(&gs_pools_exist, __ATOMIC_RELAXED))
        return false;
    int mode = gs_relax_capture();
    gs_lock(&lock);
    for (int i = 0; i < pools_high; i++)
        if (pools[i].handle && !pools[i].destroyed && !pools[i].elsewhere)
            DRIVER(cuMemPoolTrimTo)((CUmemoryPool)(uintptr_t)pools[i].handle, 0);
    for (CUdevice device = 0; device < GRAPH_DEVICES; device++)
        if (graph_devices[device].card)
            DRIVER(cuDeviceGraphMemTrim)(device);
    gs_unlock(&lock);
    gs_restore_capture(mode);
    gs_pools_refresh();
    return true;
}

void gs_pools_forget(void)
{
    lock = growth_lock = (struct gs_lock){0};
    for (int i = 0; i < POOLS; i++)
        pools[i] = (struct pool){0};
    for (int i = 0; i < GRAPH_DEVICES; i++)
        graph_devices[i] = (struct graph_device){0};
    pools_high = 0;
    gs_pools_exist = graphs_exist = false;
}

/* ---- stream-ordered allocation ---- */

struct request {
    struct gs_place place;
    CUmemoryPool pool;
    uint64_t bytes, reserved;
    bool counted, grows;
};

static bool capturing(CUstream stream, bool own_stream)
{
    int status = 0;
    int result = own_stream ? DRIVER(cuStreamIsCapturing_ptsz)(stream, &status) : DRIVER(cuStreamIsCapturing)(stream, &status);
    return result == CUDA_SUCCESS && status != 0;
}

static uint64_t idle_bytes(CUmemoryPool pool)
{
    uint64_t reserved = 0, used = 0;
    uint64_t handle = (uint64_t)(uintptr_t)pool;
    if (!ask(handle, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &reserved) || !ask(handle, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &used))
        return 0;
    return reserved > used ? reserved - used : 0;
}

static void promise(const struct request *request)
{
    gs_lock(&lock);
    struct pool *pool = find((uint64_t)(uintptr_t)request->pool);
    if (pool)
        pool->promised += request->reserved;
    gs_unlock(&lock);
}

/* A pool with room need not grow. One without grows by whole steps; where there is no room for a step, by what is asked:
 * should it take more all the same, that is undone. */
static bool reserve_growth(struct request *request)
{
    struct gs_card *card = request->place.card;
    if (request->bytes <= idle_bytes(request->pool))
        return true;
    gs_lock(&growth_lock);
    request->grows = true;
    if (request->bytes <= idle_bytes(request->pool)) /* by now */
        return true;
    uint64_t step = gs_round_up(request->bytes, POOL_STEP), least = gs_round_up(request->bytes, GS_PAGE_BYTES);
    gs_measure_sometimes(card);
    request->reserved = gs_reserve_quietly(card, step)                     ? step
                        : least < step && gs_reserve_quietly(card, least) ? least
                                                                          : 0;
    if (request->reserved) {
        promise(request);
        return true;
    }
    gs_refuse(card);
    gs_unlock(&growth_lock);
    return false;
}

static bool begin(struct request *request, CUstream stream, bool own_stream)
{
    request->place = gs_stream_place(stream);
    if (!request->place.card || !request->bytes)
        return true;
    if (capturing(stream, own_stream)) { /* becomes a node of a graph: counted when that gets its memory */
        gs_graph_memory_seen(request->place.device, request->place.card);
        return true;
    }
    if (!request->pool && !find_default_pool(&request->pool, request->place.device))
        return true;
    gs_lock(&lock);
    struct pool *pool = find_or_locate((uint64_t)(uintptr_t)request->pool, request->place.card);
    bool unknown = !pool, ours = pool && !pool->elsewhere;
    if (ours && !pool->card)
        pool->card = request->place.card;
    if (ours)
        request->place.card = pool->card;
    gs_unlock(&lock);
    request->counted = ours;
    if (unknown) { /* more than we can follow: what they give would be nobody's */
        gs_refuse(request->place.card);
        return false;
    }
    return !ours || reserve_growth(request);
}

static void settle_request(struct request *request)
{
    gs_lock(&lock);
    struct pool *pool = find((uint64_t)(uintptr_t)request->pool);
    if (pool)
        settle_pool(pool, request->reserved);
    else
        gs_settle(request->place.card, request->reserved, 0);
    gs_unlock(&lock);
    if (request->grows)
        gs_unlock(&growth_lock);
}

/* The pool grew by more than was reserved, and that was too much. */
static bool grew_too_far(const struct request *request, uint64_t before)
{
    return gs_over_limit(request->place.card) && gs_accounts_mine(&gs_accounts, request->place.card->index) > before;
}

static int undo(struct request *request, CUdeviceptr address, CUstream stream)
{
    int mode = gs_relax_capture();
    DRIVER(cuMemFreeAsync)(address, stream);
    DRIVER(cuStreamSynchronize)(stream);
    DRIVER(cuMemPoolTrimTo)(request->pool, 0);
    gs_restore_capture(mode);
    gs_pools_refresh();
    gs_refuse(request->place.card);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

static int finish(struct request *request, int result, CUdeviceptr *address, CUstream stream)
{
    if (!request->counted)
        return result;
    uint64_t before = gs_accounts_mine(&gs_accounts, request->place.card->index);
    settle_request(request);
    if (result != CUDA_SUCCESS)
        return result;
    if (grew_too_far(request, before))
        return undo(request, *address, stream);
    gs_table_put(&gs_held, &(struct gs_entry){.key = *address,
                                              .bytes = request->bytes,
                                              .owner = (uint64_t)(uintptr_t)request->pool,
                                              .kind = GS_STREAM_ORDERED,
                                              .card = request->place.card->index});
    return result;
}

#define ALLOCATE_ASYNC(symbol, given_pool, own_stream, call)                                                           \
    do {                                                                                                               \
        struct request request = {.bytes = bytes, .pool = (given_pool)};                                              \
        if (!gs_enter_cuda())                                                                                          \
            return DRIVER(symbol) call;                                                                                \
        if (!begin(&request, stream, own_stream))                                                                      \
            return CUDA_ERROR_OUT_OF_MEMORY;                                                                           \
        return finish(&request, DRIVER(symbol) call, address, stream);                                                 \
    } while (0)

int cuMemAllocAsync(CUdeviceptr *address, size_t bytes, CUstream stream)
{
    ALLOCATE_ASYNC(cuMemAllocAsync, NULL, false, (address, bytes, stream));
}

int cuMemAllocAsync_ptsz(CUdeviceptr *address, size_t bytes, CUstream stream)
{
    ALLOCATE_ASYNC(cuMemAllocAsync_ptsz, NULL, true, (address, bytes, stream));
}

int cuMemAllocFromPoolAsync(CUdeviceptr *address, size_t bytes, CUmemoryPool pool, CUstream stream)
{
    ALLOCATE_ASYNC(cuMemAllocFromPoolAsync, pool, false, (address, bytes, pool, stream));
}

int cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *address, size_t bytes, CUmemoryPool pool, CUstream stream)
{
    ALLOCATE_ASYNC(cuMemAllocFromPoolAsync_ptsz, pool, true, (address, bytes, pool, stream));
}

/* ---- pools ---- */

int cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *properties)
{
    bool active = gs_enter_cuda();
    int result = DRIVER(cuMemPoolCreate)(pool, properties);
    if (!active || result != CUDA_SUCCESS)
        return result;
    const CUmemLocation *location = &properties->location;
    struct gs_card *card = location->type == CU_MEM_LOCATION_TYPE_DEVICE ? gs_card_of_device(location->id)
                           : location->type == CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN
                               ? gs_card_of_device(location->id & 0xff)
                               : NULL;
    gs_lock(&lock);
    struct pool *added = add((uint64_t)(uintptr_t)*pool);
    if (added) {
        added->card = card;
        added->elsewhere = !card && properties->allocType != CU_MEM_ALLOCATION_TYPE_MANAGED;
    }
    gs_unlock(&lock);
    return result;
}

int cuMemPoolImportFromShareableHandle(CUmemoryPool *pool, void *handle, int type, unsigned long long flags)
{
    bool active = gs_enter_cuda();
    int result = DRIVER(cuMemPoolImportFromShareableHandle)(pool, handle, type, flags);
    if (!active || result != CUDA_SUCCESS)
        return result;
    gs_lock(&lock);
    struct pool *added = add((uint64_t)(uintptr_t)*pool);
    if (added)
        added->elsewhere = true;
    gs_unlock(&lock);
    return result;
}

/* The blocks that were opened here of an imported pool stay its maker's until the pool is closed here, whoever freed them. */
int cuMemPoolImportPointer(CUdeviceptr *address, CUmemoryPool pool, const void *data)
{
    int device = -1;
    bool active = gs_enter_cuda();
    int result = DRIVER(cuMemPoolImportPointer)(address, pool, data);
    if (!active || result != CUDA_SUCCESS)
        return result;
    int told = DRIVER(cuPointerGetAttribute)(&device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, *address);
    struct gs_card *card = told == CUDA_SUCCESS ? gs_card_of_device(device) : gs_current_place().card;
    gs_lock(&lock);
    struct pool *found = find((uint64_t)(uintptr_t)pool);
    if (found && found->elsewhere && card && !found->opened) {
        found->card = card;
        found->opened = 1;
        gs_accounts_imported(&gs_accounts, card->index, 1);
    }
    gs_unlock(&lock);
    return result;
}

int cuMemPoolExportPointer(void *data, CUdeviceptr address)
{
    struct gs_entry entry;
    bool active = gs_enter_cuda();
    int result = DRIVER(cuMemPoolExportPointer)(data, address);
    if (active && result == CUDA_SUCCESS && gs_table_get(&gs_held, address, &entry) && entry.kind == GS_STREAM_ORDERED) {
        entry.kind |= GS_LENT;
        gs_table_put(&gs_held, &entry);
    }
    return result;
}

struct census {
    uint64_t pool, renamed, live;
};

static bool count_and_rename(struct gs_entry *entry, void *context)
{
    struct census *census = context;
    if ((entry->kind & 0xff) == GS_STREAM_ORDERED && entry->owner == census->pool) {
        entry->owner = census->renamed;
        census->live++;
    }
    return false;
}

/* With nothing of it left. */
static void end_pool(struct pool *pool)
{
    if (pool->opened)
        gs_accounts_imported(&gs_accounts, pool->card->index, -1);
    if (!pool->elsewhere && pool->card) {
        leave_shared(pool, 0);
        gs_settle(pool->card, pool->charged, 0);
    }
    *pool = (struct pool){0};
}

/* Blocks outlive their pool. The handle may be given out again, so they get another name for it. */
static void bury(struct pool *pool)
{
    struct census census = {pool->handle, ++last_destroyed, 0};
    gs_table_sift(&gs_held, count_and_rename, &census);
    if (census.live == 0) {
        end_pool(pool);
        return;
    }
    pool->handle = census.renamed;
    pool->live = census.live;
    pool->destroyed = true;
}

void gs_pool_block_freed(const struct gs_entry *entry)
{
    bool of_destroyed = last_destroyed && entry->owner <= last_destroyed;
    if (!of_destroyed && !(entry->kind & GS_LENT))
        return; /* of a living pool, which tells itself what it keeps */
    gs_lock(&lock);
    struct pool *pool = find(entry->owner);
    if (pool && entry->kind & GS_LENT)
        pool->shared += gs_round_up(entry->bytes, GS_PAGE_BYTES);
    if (pool && pool->destroyed && --pool->live == 0)
        end_pool(pool);
    gs_unlock(&lock);
}

int cuMemPoolDestroy(CUmemoryPool pool)
{
    bool active = gs_enter_cuda();
    if (active)
        gs_pools_refresh();
    int result = DRIVER(cuMemPoolDestroy)(pool);
    if (!active || result != CUDA_SUCCESS)
        return result;
    gs_lock(&lock);
    struct pool *known = find((uint64_t)(uintptr_t)pool);
    if (known)
        bury(known);
    gs_unlock(&lock);
    return result;
}

int cuMemPoolTrimTo(CUmemoryPool pool, size_t keep)
{
    bool active = gs_enter_cuda();
    int result = DRIVER(cuMemPoolTrimTo)(pool, keep);
    if (active)
        gs_pools_changed();
    return result;
}

int cuMemPoolSetAttribute(CUmemoryPool pool, int attribute, void *value)
{
    bool active = gs_enter_cuda();
    int result = DRIVER(cuMemPoolSetAttribute)(pool, attribute, value);
    if (active)
        gs_pools_changed();
    return result;
}

/* ---- points at which pools give back ---- */

#define WAIT(symbol, call)                                                                                             \
    do {                                                                                                               \
        bool active = gs_enter_cuda();                                                                                 \
        int result = DRIVER(symbol) call;                                                                              \
        if (active)                                                                                                    \
            gs_pools_changed();                                                                                        \
        return result;                                                                                                 \
    } while (0)

int cuStreamSynchronize(CUstream stream) { WAIT(cuStreamSynchronize, (stream)); }
int cuStreamSynchronize_ptsz(CUstream stream) { WAIT(cuStreamSynchronize_ptsz, (stream)); }
int cuCtxSynchronize(void) { WAIT(cuCtxSynchronize, ()); }
int cuCtxSynchronize_v2(CUcontext context) { WAIT(cuCtxSynchronize_v2, (context)); }
int cuEventSynchronize(CUevent event) { WAIT(cuEventSynchronize, (event)); }

/* ---- graphs' memory ---- */

void gs_graph_memory_seen(CUdevice device, struct gs_card *card)
{
    if (device < 0 || device >= GRAPH_DEVICES)
        return;
    gs_lock(&lock);
    graph_devices[device].card = card;
    graphs_exist = true;
    __atomic_store_n(&gs_pools_exist, true, __ATOMIC_RELAXED);
    gs_unlock(&lock);
}

bool gs_graph_memory_exists(void) { return __atomic_load_n(&graphs_exist, __ATOMIC_RELAXED); }

void gs_graph_settle(CUdevice device, struct gs_card *card, uint64_t reserved)
{
    gs_graph_memory_seen(device, card);
    gs_lock(&lock);
    if (device >= 0 && device < GRAPH_DEVICES)
        settle_graph_device(device, reserved);
    gs_unlock(&lock);
}
