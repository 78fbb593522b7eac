#include "policy/pool_accounts.h"

#include "accounts/in_flight.h"
#include "policy/driver_overhead.h"
#include "system/at_fork.h"

#define POOLS 512
#define GRAPH_DEVICES 64
enum { CU_MEMPOOL_ATTR_ALLOCATION_TYPE = 9, CU_MEMPOOL_ATTR_LOCATION_ID = 11, CU_MEMPOOL_ATTR_LOCATION_TYPE = 12 };
enum { CU_MEM_ALLOCATION_TYPE_MANAGED = 2 };

struct pool {
    uint64_t handle; /* the owner that its blocks name; 0 for a free entry */
    struct gs_card *card; /* NULL: managed memory without a location, which counts on the card that first requests it */
    uint64_t charged;
    uint64_t promised; /* reserved for growth in progress: growth up to this is paid for */
    uint64_t unasked;  /* growth beyond that, whoever noticed it, since an allocation was last settled */
    uint64_t largest;  /* growth at once: no chunk is larger, and a block that is open elsewhere keeps its whole chunk */
    uint64_t lent;     /* the chunks of blocks that other processes may have opened */
    uint64_t shared;   /* the same, of blocks that were freed here since */
    uint64_t exported; /* what the accounts know of both, in case this process ends */
    uint64_t live;     /* blocks left, once the program has destroyed the pool */
    uint32_t opened;   /* 1: imported, and counts as an import on its card */
    bool elsewhere;    /* on the host, or another process's: not charged to us */
    bool destroyed;
    bool managed; /* in no process's figure */
};

struct graph_device {
    struct gs_card *card;
    uint64_t charged;
};

static struct pool pools[POOLS];
static int pools_high; /* [0, pools_high) were ever in use */
static struct graph_device graph_devices[GRAPH_DEVICES];
static struct gs_lock lock;
static bool graphs_exist;
static uint64_t last_destroyed;
bool gs_pools_exist;

static void forget(void)
{
    lock = (struct gs_lock){0};
    for (int i = 0; i < POOLS; i++)
        pools[i] = (struct pool){0};
    for (int i = 0; i < GRAPH_DEVICES; i++)
        graph_devices[i] = (struct graph_device){0};
    pools_high = 0;
    gs_pools_exist = graphs_exist = false;
}
GS_AT_FORK(forget);

/* Drivers treat these queries, too, as calls that invalidate a capture. */
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

bool gs_pool_of_device(CUmemoryPool *pool, CUdevice device)
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
    if (now != reserved + *charged)
        gs_recharge(card, reserved + *charged, now);
    *charged = now;
}

static void show_exported(struct pool *pool)
{
    uint64_t lent = pool->lent + pool->shared, now = lent < pool->charged ? lent : pool->charged;
    if (now != pool->exported)
        gs_accounts_exported(&gs_accounts, pool->card->index, (int64_t)(now - pool->exported));
    pool->exported = now;
}

static void recharge_pool(struct pool *pool, uint64_t now, uint64_t reserved)
{
    if (pool->managed)
        gs_doubt(pool->card->index, GS_UNLISTED, (int64_t)(now - pool->charged));
    recharge(pool->card, &pool->charged, now, reserved);
    show_exported(pool);
}

/* What a pool releases may live on, if another process opened a block of it. */
static void leave_shared(struct pool *pool, uint64_t now)
{
    uint64_t less = pool->charged > now ? pool->charged - now : 0;
    uint64_t bytes = less < pool->shared ? less : pool->shared;
    if (!bytes)
        return;
    gs_accounts_return_exported(&gs_accounts, pool->card->index, bytes);
    pool->shared -= bytes;
    pool->charged -= bytes;
    pool->exported = gs_less(pool->exported, bytes);
}

/* `reserved`: by this thread, for growth that is complete now. */
static void settle_pool(struct pool *pool, uint64_t reserved)
{
    uint64_t now = 0;
    pool->promised -= reserved;
    if (pool->destroyed || pool->elsewhere || !pool->card)
        return;
    if (!ask(pool->handle, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &now)) {
        pool->charged += reserved; /* nothing is known: what was granted stays charged */
        return;
    }
    leave_shared(pool, now);
    if (gs_less(now, pool->charged) > pool->largest)
        pool->largest = now - pool->charged;
    uint64_t covered = pool->charged + reserved;
    if (now > covered) { /* perhaps by a thread that is growing it at this moment, and has reserved for that */
        now = now - covered > pool->promised ? now - pool->promised : covered;
        pool->unasked += now - covered;
    }
    recharge_pool(pool, now, reserved);
}

static void settle_graph_device(CUdevice device, uint64_t reserved)
{
    struct graph_device *entry = &graph_devices[device];
    uint64_t now = 0;
    if (entry->card && gs_ask_graph_memory(device, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT, &now))
        recharge(entry->card, &entry->charged, now, reserved);
}

/* Finds out where a pool that we did not see being created keeps its memory. Managed memory may move to the card from
 * anywhere. */
static void locate(struct pool *pool, struct gs_card *card)
{
    int type = CU_MEM_LOCATION_TYPE_DEVICE, device = -1, kind = 0;
    pool->card = card;
    if (!ask(pool->handle, CU_MEMPOOL_ATTR_LOCATION_TYPE, &type))
        return;
    bool on_device = type == CU_MEM_LOCATION_TYPE_DEVICE;
    ask(pool->handle, CU_MEMPOOL_ATTR_ALLOCATION_TYPE, &kind);
    pool->managed = kind == CU_MEM_ALLOCATION_TYPE_MANAGED;
    pool->elsewhere = !on_device && !pool->managed;
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

/* ---- one of them ---- */

uint64_t gs_pool_idle_bytes(CUmemoryPool pool)
{
    uint64_t reserved = 0, used = 0;
    uint64_t handle = (uint64_t)(uintptr_t)pool;
    if (!ask(handle, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &reserved) || !ask(handle, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &used))
        return 0;
    return reserved > used ? reserved - used : 0;
}

enum gs_pool_owner gs_pool_owner(CUmemoryPool handle, struct gs_card **card)
{
    gs_lock(&lock);
    struct pool *pool = find_or_locate((uint64_t)(uintptr_t)handle, *card);
    bool ours = pool && !pool->elsewhere;
    if (ours && !pool->card)
        pool->card = *card;
    if (ours)
        *card = pool->card;
    gs_unlock(&lock);
    return ours ? GS_POOL_OURS : pool ? GS_POOL_ELSEWHERE : GS_POOL_UNKNOWN;
}

void gs_pool_promise(CUmemoryPool handle, uint64_t bytes)
{
    gs_lock(&lock);
    struct pool *pool = find((uint64_t)(uintptr_t)handle);
    if (pool)
        pool->promised += bytes;
    gs_unlock(&lock);
}

bool gs_pool_settle(CUmemoryPool handle, struct gs_card *card, uint64_t reserved)
{
    bool outgrew = false;
    gs_lock(&lock);
    struct pool *pool = find((uint64_t)(uintptr_t)handle);
    if (pool) {
        settle_pool(pool, reserved);
        outgrew = pool->unasked != 0;
        pool->unasked = 0;
    } else
        gs_recharge(card, reserved, 0);
    if (reserved)
        gs_flight_ends(&gs_accounts, card->index, GS_TAKING, reserved);
    gs_unlock(&lock);
    return outgrew;
}

void gs_pool_made(CUmemoryPool handle, struct gs_card *card, bool managed)
{
    gs_lock(&lock);
    struct pool *pool = add((uint64_t)(uintptr_t)handle);
    if (pool) {
        pool->card = card;
        pool->managed = managed;
        pool->elsewhere = !card && !managed;
    }
    gs_unlock(&lock);
}

void gs_pool_opened(CUmemoryPool handle, struct gs_card *card)
{
    gs_lock(&lock);
    struct pool *pool = find((uint64_t)(uintptr_t)handle);
    if (pool && pool->elsewhere && !pool->opened) {
        pool->card = card;
        pool->opened = 1;
        gs_accounts_imported(&gs_accounts, card->index, 1);
    }
    gs_unlock(&lock);
}

void gs_pool_block_lent(struct gs_entry *entry)
{
    gs_lock(&lock);
    struct pool *pool = find(entry->owner);
    if (pool && pool->card && !pool->elsewhere) {
        entry->kind |= GS_LENT;
        entry->bytes = pool->largest;
        pool->lent += entry->bytes;
        show_exported(pool);
    }
    gs_unlock(&lock);
}

/* ---- the end of a pool ---- */

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

/* Ends a pool of which nothing is left. */
static void end_pool(struct pool *pool)
{
    if (pool->opened)
        gs_loan_ended(pool->card->index);
    if (!pool->elsewhere && pool->card) {
        leave_shared(pool, 0);
        recharge_pool(pool, 0, 0);
    }
    *pool = (struct pool){0};
}

/* Blocks outlive their pool. Its handle may be reused, so the blocks get another name for it. */
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

bool gs_pool_is_destroyed(uint64_t owner) { return last_destroyed && owner <= last_destroyed; }

void gs_pool_block_freed(const struct gs_entry *entry)
{
    if (!gs_pool_is_destroyed(entry->owner) && !(entry->kind & GS_LENT))
        return; /* its pool is alive, and itself reports what it keeps */
    gs_lock(&lock);
    struct pool *pool = find(entry->owner);
    if (pool && entry->kind & GS_LENT) {
        pool->lent = gs_less(pool->lent, entry->bytes);
        pool->shared += entry->bytes;
    }
    if (pool && pool->destroyed && --pool->live == 0)
        end_pool(pool);
    gs_unlock(&lock);
}

void gs_pool_destroyed(CUmemoryPool handle)
{
    gs_lock(&lock);
    struct pool *pool = find((uint64_t)(uintptr_t)handle);
    if (pool)
        bury(pool);
    gs_unlock(&lock);
}

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
    gs_flight_ends(&gs_accounts, card->index, GS_TAKING, reserved);
}
