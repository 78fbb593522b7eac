#include "policy/pool_accounts.h"

#include "accounts/in_flight.h"
#include "system/at_fork.h"

#define POOLS 512
#define BLOCK_BYTES 512u /* the driver rounds blocks up to it */

struct pool {
    struct gs_card *card; /* NULL: managed memory without a location, which counts on the card that first requests it */
    uint64_t charged;
    uint64_t promised; /* reserved for growth in progress: growth up to this is paid for */
    uint64_t unpaid; /* growth beyond that, whoever noticed it, until it is decided whether it stays: nobody may count on it */
    uint64_t used;   /* by blocks, and by calls that ask for one */
    uint64_t threshold; /* what it keeps when the program synchronizes */
    struct gs_giver givers[GS_GIVERS];
    uint64_t largest;  /* growth at once: no chunk is larger, and a block that is open elsewhere keeps its whole chunk */
    uint64_t lent;     /* the chunks of blocks that other processes may have opened */
    uint64_t shared;   /* the same, of blocks that were freed here since */
    uint64_t exported; /* what the accounts know of both, in case this process ends */
    uint64_t live;     /* blocks left, once the program has destroyed the pool */
    uint32_t opened;   /* 1: imported, and counts as an import on its card */
    uint32_t users;    /* threads that are in a call for it: the program's own call that destroys it waits for them */
    bool elsewhere;    /* on the host, or another process's: not charged to us */
    bool destroyed;
    bool managed; /* in no process's figure */
};

struct graph_device {
    struct gs_card *card;
    uint64_t charged;
};

static struct pool pools[POOLS];
/* Beside them, so that a process with many pools finds one, and those to ask again, at a snapshot. */
static uint64_t handles[POOLS] GS_PER_PROCESS; /* the owners that blocks name; 0 for a free entry */
static bool may_shrink[POOLS] GS_PER_PROCESS;
static int pools_high GS_PER_PROCESS; /* [0, pools_high) were ever in use */
static struct graph_device graph_devices[GS_DEVICES] GS_PER_PROCESS;
static struct gs_lock lock GS_PER_PROCESS;
static bool graphs_exist GS_PER_PROCESS;
static uint64_t last_destroyed;
bool gs_pools_exist GS_PER_PROCESS;

/* Drivers treat these queries, too, as calls that invalidate a capture. */
static bool ask(uint64_t pool, int attribute, void *value)
{
    GS_RELAX_CAPTURE;
    return DRIVER(cuMemPoolGetAttribute)((CUmemoryPool)(uintptr_t)pool, attribute, value) == CUDA_SUCCESS;
}

bool gs_ask_graph_memory(CUdevice device, int attribute, uint64_t *value)
{
    GS_RELAX_CAPTURE;
    return DRIVER(cuDeviceGetGraphMemAttribute)(device, attribute, value) == CUDA_SUCCESS;
}

bool gs_pool_of_device(CUmemoryPool *pool, CUdevice device)
{
    GS_RELAX_CAPTURE;
    return DRIVER(cuDeviceGetMemPool)(pool, device) == CUDA_SUCCESS;
}

/* ---- under the lock ---- */

static struct pool *find(uint64_t handle)
{
    for (int i = 0; i < pools_high; i++)
        if (handles[i] == handle)
            return &pools[i];
    return handle == 0 && pools_high < POOLS ? &pools[pools_high++] : NULL;
}

/* Holds the lock until the block is left. NULL for a pool that is not known. */
#define GUARD_POOL(handle)                                                                                                     \
    GS_GUARD(&lock);                                                                                                           \
    struct pool *pool = find((uint64_t)(uintptr_t)(handle))

static uint64_t *handle_of(const struct pool *pool) { return &handles[pool - pools]; }

/* At a synchronization a pool gives back what it holds above its threshold and no block uses. */
static void note_idle(const struct pool *pool)
{
    uint64_t kept = pool->used > pool->threshold ? pool->used : pool->threshold;
    may_shrink[pool - pools] = pool->charged > kept || pool->lent + pool->shared || (pool->destroyed && !pool->live);
}

static uint64_t in_blocks(uint64_t bytes) { return gs_round_up(bytes, BLOCK_BYTES); }

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
        gs_accounts_unconfirmed(&gs_accounts, pool->card->index, GS_UNLISTED, (int64_t)(now - pool->charged));
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
    if (!ask(*handle_of(pool), CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &now)) {
        pool->charged += reserved; /* nothing is known: what was granted stays charged */
        return;
    }
    leave_shared(pool, now);
    if (gs_less(now, pool->charged) > pool->largest)
        pool->largest = now - pool->charged;
    uint64_t covered = pool->charged + reserved;
    if (now > covered) { /* perhaps by a thread that is growing it at this moment, and has reserved for that */
        now = now - covered > pool->promised ? now - pool->promised : covered;
        pool->unpaid += now - covered;
    }
    pool->unpaid = gs_less(pool->unpaid, gs_less(pool->charged, now));
    recharge_pool(pool, now, reserved);
    note_idle(pool);
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
    if (!ask(*handle_of(pool), CU_MEMPOOL_ATTR_LOCATION_TYPE, &type))
        return;
    bool on_device = type == CU_MEM_LOCATION_TYPE_DEVICE;
    ask(*handle_of(pool), CU_MEMPOOL_ATTR_ALLOCATION_TYPE, &kind);
    pool->managed = kind == CU_MEM_ALLOCATION_TYPE_MANAGED;
    pool->elsewhere = !on_device && !pool->managed;
    if (on_device && ask(*handle_of(pool), CU_MEMPOOL_ATTR_LOCATION_ID, &device)) {
        struct gs_card *located = gs_card_of_device(device);
        pool->card = located ? located : card;
    }
}

static struct pool *add(uint64_t handle)
{
    struct pool *pool = find(0);
    if (!pool)
        return NULL;
    *pool = (struct pool){0};
    *handle_of(pool) = handle;
    ask(handle, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &pool->threshold);
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

/* ---- streams that give blocks back ---- */

bool gs_pool_giver(CUmemoryPool handle, uint64_t bytes, struct gs_giver *found)
{
    GUARD_POOL(handle);
    struct gs_giver *newest = pool ? gs_givers_newest(pool->givers, bytes, pool->users) : NULL;
    if (newest) {
        newest->bytes -= bytes;
        *found = *newest;
        pool->users++;
    }
    return newest != NULL;
}

/* Under the lock, which it lets go until no thread uses the pool's streams or itself. */
static void await_users(const struct pool *pool)
{
    while (pool->users) {
        gs_unlock(&lock);
        gs_yield();
        gs_lock(&lock);
    }
}

void gs_pool_used(CUmemoryPool handle)
{
    GUARD_POOL(handle);
    if (pool)
        pool->users--;
}

void gs_pools_stream_ends(CUstream stream)
{
    if (!__atomic_load_n(&gs_pools_exist, __ATOMIC_RELAXED))
        return;
    GS_GUARD(&lock);
    for (int i = 0; i < pools_high * GS_GIVERS; i++) {
        struct gs_giver *giver = &pools[i / GS_GIVERS].givers[i % GS_GIVERS];
        if (!giver->bytes || (stream && (giver->own || giver->event || giver->stream != stream)))
            continue;
        await_users(&pools[i / GS_GIVERS]);
        if (stream)
            gs_giver_mark(giver);
        else
            gs_giver_forget(giver);
    }
}

/* ---- all of them ---- */

static void end_if_over(struct pool *pool);

static void refresh(bool all)
{
    GS_GUARD(&lock);
    for (int i = 0; i < pools_high; i++)
        if (handles[i] && (all || may_shrink[i]))
            pools[i].destroyed ? end_if_over(&pools[i]) : settle_pool(&pools[i], 0);
    for (CUdevice device = 0; graphs_exist && device < GS_DEVICES; device++)
        settle_graph_device(device, 0);
}

void gs_pools_refresh(void) { refresh(false); }

bool gs_pools_trim(void)
{
    if (!__atomic_load_n(&gs_pools_exist, __ATOMIC_RELAXED))
        return false;
    GS_RELAX_CAPTURE;
    for (int i = 0; i < pools_high; i++) {
        gs_lock(&lock);
        CUmemoryPool pool = pools[i].destroyed || pools[i].elsewhere ? NULL : (CUmemoryPool)(uintptr_t)handles[i];
        pools[i].users += pool != NULL;
        gs_unlock(&lock);
        if (!pool)
            continue;
        DRIVER(cuMemPoolTrimTo)(pool, 0);
        gs_pool_used(pool);
    }
    for (CUdevice device = 0; device < GS_DEVICES; device++)
        if (graph_devices[device].card)
            DRIVER(cuDeviceGraphMemTrim)(device);
    refresh(true);
    return true;
}

/* ---- one of them ---- */

enum gs_pool_owner gs_pool_owner(CUmemoryPool handle, struct gs_card **card)
{
    GS_GUARD(&lock);
    struct pool *pool = find_or_locate(gs_key(handle), *card);
    bool ours = pool && !pool->elsewhere;
    if (ours && !pool->card)
        pool->card = *card;
    if (ours)
        *card = pool->card;
    return ours ? GS_POOL_OURS : pool ? GS_POOL_ELSEWHERE : GS_POOL_UNKNOWN;
}

enum gs_pool_room gs_pool_take(CUmemoryPool handle, uint64_t bytes, const struct gs_giver *on)
{
    enum gs_pool_room room = GS_POOL_FULL;
    uint64_t asked = in_blocks(bytes), used = 0;
    GUARD_POOL(handle);
    if (pool && pool->lent + pool->shared) /* of these it is not known here which are used */
        ask(gs_key(handle), CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &used);
    if (pool && asked <= gs_less(gs_less(pool->charged, pool->unpaid), used > pool->used ? used : pool->used)) {
        room = GS_POOL_IDLE;
        for (struct gs_giver *each = pool->givers; each < pool->givers + GS_GIVERS; each++)
            if (each->bytes >= asked && gs_giver_is_same(each, on)) { /* in order anyway */
                each->bytes -= asked;
                room = GS_POOL_IDLE;
                break;
            } else if (each->bytes)
                room = GS_POOL_PENDING;
    }
    if (pool)
        pool->used += asked;
    return room;
}

void gs_pool_promise(CUmemoryPool handle, uint64_t bytes)
{
    GUARD_POOL(handle);
    if (pool)
        pool->promised += bytes;
}

uint64_t gs_pool_settle(CUmemoryPool handle, struct gs_card *card, uint64_t reserved)
{
    uint64_t unpaid = 0;
    GUARD_POOL(handle);
    if (pool) {
        settle_pool(pool, reserved);
        unpaid = pool->unpaid;
    } else
        gs_recharge(card, reserved, 0);
    if (reserved)
        gs_flight_ends(&gs_accounts, card->index, GS_TAKING, reserved);
    return unpaid;
}

void gs_pool_decided(CUmemoryPool handle, bool stays)
{
    GUARD_POOL(handle);
    if (pool && stays)
        pool->unpaid = 0;
    else if (pool)
        settle_pool(pool, 0);
}

void gs_pool_not_taken(CUmemoryPool handle, uint64_t bytes)
{
    GUARD_POOL(handle);
    if (pool)
        pool->used = gs_less(pool->used, in_blocks(bytes));
}

void gs_pool_made(CUmemoryPool handle, struct gs_card *card, bool managed)
{
    GS_GUARD(&lock);
    struct pool *pool = add(gs_key(handle));
    if (pool) {
        pool->card = card;
        pool->managed = managed;
        pool->elsewhere = !card && !managed;
    }
}

void gs_pool_opened(CUmemoryPool handle, struct gs_card *card)
{
    GUARD_POOL(handle);
    if (pool && pool->elsewhere && !pool->opened) {
        pool->card = card;
        pool->opened = 1;
        gs_accounts_imported(&gs_accounts, card->index, 1);
    }
}

void gs_pool_block_lent(struct gs_entry *entry)
{
    GS_GUARD(&lock);
    struct pool *pool = find(entry->owner);
    if (pool && pool->card && !pool->elsewhere) {
        entry->kind |= GS_LENT;
        pool->used = gs_less(pool->used, in_blocks(entry->bytes));
        entry->bytes = pool->largest;
        pool->lent += entry->bytes;
        show_exported(pool);
    }
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
        gs_accounts_imported(&gs_accounts, pool->card->index, -1);
    if (!pool->elsewhere && pool->card) {
        leave_shared(pool, 0);
        recharge_pool(pool, 0, 0);
    }
    for (int i = 0; i < GS_GIVERS; i++)
        gs_giver_forget(&pool->givers[i]);
    *pool = (struct pool){0};
    *handle_of(pool) = 0;
    may_shrink[pool - pools] = false;
}

/* A destroyed pool: its blocks are freed one by one, and events show when streams have got to their frees. */
static void end_if_over(struct pool *pool)
{
    for (struct gs_giver *each = pool->givers; each < pool->givers + GS_GIVERS; each++)
        if (each->bytes && !each->event)
            gs_giver_mark(each);
    if (pool->live == 0 && gs_givers_have_given(pool->givers))
        end_pool(pool);
    else
        note_idle(pool);
}

/* Blocks outlive their pool, and so do frees that their streams have not got to. Its handle may be reused, so the blocks get
 * another name for it. */
static void bury(struct pool *pool)
{
    struct census census = {*handle_of(pool), ++last_destroyed, 0};
    gs_table_sift(&gs_held, count_and_rename, &census);
    *handle_of(pool) = census.renamed;
    pool->live = census.live;
    pool->destroyed = true;
    end_if_over(pool);
}

bool gs_pool_is_destroyed(uint64_t owner) { return last_destroyed && owner <= last_destroyed; }

void gs_pool_block_freed(const struct gs_entry *entry, const struct gs_giver *on)
{
    GS_GUARD(&lock);
    struct pool *pool = find(entry->owner);
    if (pool && entry->kind & GS_LENT) {
        pool->lent = gs_less(pool->lent, entry->bytes);
        pool->shared += entry->bytes;
    } else if (pool) {
        pool->used = gs_less(pool->used, in_blocks(entry->bytes));
    }
    if (pool && on && !pool->elsewhere && !(entry->kind & GS_LENT))
        gs_givers_add(pool->givers, on, in_blocks(entry->bytes), pool->users);
    if (pool && pool->destroyed) {
        pool->live--;
        end_if_over(pool);
    } else if (pool)
        note_idle(pool);
}

void gs_pool_ends(CUmemoryPool handle)
{
    GUARD_POOL(handle);
    if (pool) {
        settle_pool(pool, 0);
        pool->destroyed = true;      /* for those that look for pools to trim; the driver may decline */
        pool->live = UINT64_MAX / 2; /* until they are counted */
        await_users(pool);
    }
}

void gs_pool_destroyed(CUmemoryPool handle, bool destroyed)
{
    GUARD_POOL(handle);
    if (pool && destroyed)
        bury(pool);
    else if (pool) {
        pool->destroyed = false;
        pool->live = 0;
    }
}

void gs_pool_threshold(CUmemoryPool handle, uint64_t bytes)
{
    GUARD_POOL(handle);
    if (!pool)
        return;
    pool->threshold = bytes;
    settle_pool(pool, 0);
}

/* ---- graphs' memory ---- */

void gs_graph_memory_seen(CUdevice device, struct gs_card *card)
{
    if (device < 0 || device >= GS_DEVICES)
        return;
    GS_GUARD(&lock);
    graph_devices[device].card = card;
    graphs_exist = true;
    __atomic_store_n(&gs_pools_exist, true, __ATOMIC_RELAXED);
}

bool gs_graph_memory_exists(void) { return __atomic_load_n(&graphs_exist, __ATOMIC_RELAXED); }

void gs_graph_settle(CUdevice device, struct gs_card *card, uint64_t reserved)
{
    gs_graph_memory_seen(device, card);
    gs_lock(&lock);
    if (device >= 0 && device < GS_DEVICES)
        settle_graph_device(device, reserved);
    gs_unlock(&lock);
    gs_flight_ends(&gs_accounts, card->index, GS_TAKING, reserved);
}
