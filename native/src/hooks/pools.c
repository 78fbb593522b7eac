/* Stream-ordered memory comes from pools. Before an allocation the possible growth of the pool is reserved; afterwards its
 * actual growth is charged. */
#include "hooks/place.h"
#include "policy/driver_overhead.h"
#include "policy/pool_accounts.h"
#include "policy/provisional.h"
#include "policy/reserve.h"
#include "policy/start.h"
#include "policy/throttle.h"
#include "system/at_fork.h"

enum { CU_MEM_ALLOCATION_TYPE_MANAGED = 2, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9 };

/* Held from checking a pool's free room until it is known whether the allocation fits. Without it a second thread could be
 * promised the same room, so that the pool grows without a reservation, or could use memory that is about to be undone. */
static struct gs_lock locks[GPUSLICE_CARDS + 1]; /* the last one is for cards without an entry in the region */

static void forget(void)
{
    for (uint32_t card = 0; card <= GPUSLICE_CARDS; card++)
        locks[card] = (struct gs_lock){0};
}
GS_AT_FORK(forget);

/* ---- stream-ordered allocation ---- */

struct request {
    struct gs_place place;
    CUmemoryPool pool;
    uint64_t bytes, reserved;
    bool counted;
};

static bool capturing(CUstream stream, bool own_stream)
{
    int status = 0;
    int result = own_stream ? DRIVER(cuStreamIsCapturing_ptsz)(stream, &status) : DRIVER(cuStreamIsCapturing)(stream, &status);
    return result == CUDA_SUCCESS && status != 0;
}

/* A pool with enough free room does not grow. Otherwise it grows by whole steps. If a step does not fit under the limit, only
 * the requested bytes are reserved; should the pool grow by more, the allocation is undone. The answer may take seconds, so
 * the lock is not held meanwhile: threads whose pools have room need it. */
static bool reserve_growth(struct request *request)
{
    struct gs_card *card = request->place.card;
    uint64_t growth = gs_round_up(request->bytes, GS_POOL_STEP), least = gs_round_up(request->bytes, GS_PAGE_BYTES);
    for (;;) {
        gs_lock(&locks[card->index]);
        if (request->bytes <= gs_pool_idle_bytes(request->pool))
            return true;
        gs_measure_sometimes(card);
        if (gs_take_room_at_once(card, growth)) {
            request->reserved = growth;
            gs_pool_promise(request->pool, growth);
            return true;
        }
        gs_unlock(&locks[card->index]);
        while (!gs_reserve_quietly(card, growth)) {
            if (growth == least) {
                gs_refuse(card);
                return false;
            }
            growth = least;
        }
        gs_settle(card, growth, 0);
    }
}

static bool begin(struct request *request, CUstream stream, bool own_stream)
{
    request->place = gs_stream_place(stream);
    if (!request->place.card || !request->bytes)
        return true;
    if (capturing(stream, own_stream)) { /* becomes a graph node, counted when the graph gets its memory */
        gs_graph_memory_seen(request->place.device, request->place.card);
        return true;
    }
    if (!request->pool && !gs_pool_of_device(&request->pool, request->place.device))
        return true;
    enum gs_pool_owner owner = gs_pool_owner(request->pool, &request->place.card);
    request->counted = owner == GS_POOL_OURS;
    if (owner == GS_POOL_UNKNOWN) { /* more pools than we can track: nobody would count the memory of this one */
        gs_refuse(request->place.card);
        return false;
    }
    return !request->counted || reserve_growth(request);
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

static int settle(struct request *request, int result, CUdeviceptr *address, CUstream stream)
{
    bool outgrew = gs_pool_settle(request->pool, request->place.card, request->reserved);
    if (result != CUDA_SUCCESS)
        return result;
    if (outgrew && gs_over_limit(request->place.card))
        return undo(request, *address, stream);
    gs_table_put(&gs_held, &(struct gs_entry){.key = *address,
                                              .bytes = request->bytes,
                                              .owner = (uint64_t)(uintptr_t)request->pool,
                                              .kind = GS_STREAM_ORDERED,
                                              .card = request->place.card->index});
    return result;
}

static int finish(struct request *request, int result, CUdeviceptr *address, CUstream stream)
{
    if (!request->counted)
        return result;
    result = settle(request, result, address, stream);
    gs_unlock(&locks[request->place.card->index]);
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
    struct gs_card *card = gs_card_of_location(properties->location.type, properties->location.id);
    gs_pool_made(*pool, card, properties->allocType == CU_MEM_ALLOCATION_TYPE_MANAGED);
    return result;
}

int cuMemPoolImportFromShareableHandle(CUmemoryPool *pool, void *handle, int type, unsigned long long flags)
{
    bool active = gs_enter_cuda();
    int result = DRIVER(cuMemPoolImportFromShareableHandle)(pool, handle, type, flags);
    if (active && result == CUDA_SUCCESS)
        gs_pool_made(*pool, NULL, false);
    return result;
}

/* Blocks of an imported pool that were opened here keep the maker's memory allocated until they are freed and the pool is
 * destroyed here. */
int cuMemPoolImportPointer(CUdeviceptr *address, CUmemoryPool pool, const void *data)
{
    int device = -1;
    bool active = gs_enter_cuda();
    int result = DRIVER(cuMemPoolImportPointer)(address, pool, data);
    if (!active || result != CUDA_SUCCESS)
        return result;
    int located = DRIVER(cuPointerGetAttribute)(&device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, *address);
    struct gs_card *card = located == CUDA_SUCCESS ? gs_card_of_device(device) : gs_current_place().card;
    if (!card)
        return result;
    gs_pool_opened(pool, card);
    gs_table_put(&gs_held, &(struct gs_entry){.key = *address,
                                              .owner = (uint64_t)(uintptr_t)pool,
                                              .kind = GS_STREAM_ORDERED,
                                              .card = card->index});
    return result;
}

int cuMemPoolExportPointer(void *data, CUdeviceptr address)
{
    struct gs_entry entry;
    bool active = gs_enter_cuda();
    int result = DRIVER(cuMemPoolExportPointer)(data, address);
    if (active && result == CUDA_SUCCESS && gs_table_get(&gs_held, address, &entry) && entry.kind == GS_STREAM_ORDERED) {
        gs_pool_block_lent(&entry);
        gs_table_put(&gs_held, &entry);
    }
    return result;
}

int cuMemPoolDestroy(CUmemoryPool pool)
{
    if (!gs_enter_cuda())
        return DRIVER(cuMemPoolDestroy)(pool);
    gs_pools_refresh();
    gs_giving_begins();
    int result = DRIVER(cuMemPoolDestroy)(pool);
    if (result == CUDA_SUCCESS)
        gs_pool_destroyed(pool);
    gs_giving_ends();
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

/* ---- synchronization, at which pools release memory ---- */

#define WAIT(symbol, call)                                                                                             \
    do {                                                                                                               \
        bool active = gs_enter_cuda();                                                                                 \
        int result = DRIVER(symbol) call;                                                                              \
        if (active) {                                                                                                  \
            gs_throttle_awaited();                                                                                     \
            gs_pools_changed();                                                                                        \
        }                                                                                                              \
        return result;                                                                                                 \
    } while (0)

int cuStreamSynchronize(CUstream stream) { WAIT(cuStreamSynchronize, (stream)); }
int cuStreamSynchronize_ptsz(CUstream stream) { WAIT(cuStreamSynchronize_ptsz, (stream)); }
int cuCtxSynchronize(void) { WAIT(cuCtxSynchronize, ()); }
int cuCtxSynchronize_v2(CUcontext context) { WAIT(cuCtxSynchronize_v2, (context)); }
int cuEventSynchronize(CUevent event) { WAIT(cuEventSynchronize, (event)); }
