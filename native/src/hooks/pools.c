/* Stream-ordered memory comes from pools. Before an allocation the possible growth of the pool is reserved; afterwards its
 * actual growth is charged. */
#include "hooks/place.h"
#include "policy/pool_accounts.h"
#include "policy/process_usage.h"
#include "policy/reserve.h"
#include "policy/throttle.h"

/* ---- stream-ordered allocation ---- */

struct request {
    struct gs_place place;
    CUmemoryPool given, pool;
    CUstream stream;
    bool own_stream;
    uint64_t bytes, reserved;
};

static int ask_driver(const struct request *request, CUdeviceptr *address, CUstream stream)
{
    if (request->given)
        return request->own_stream ? DRIVER(cuMemAllocFromPoolAsync_ptsz)(address, request->bytes, request->given, stream)
                                   : DRIVER(cuMemAllocFromPoolAsync)(address, request->bytes, request->given, stream);
    return request->own_stream ? DRIVER(cuMemAllocAsync_ptsz)(address, request->bytes, stream)
                               : DRIVER(cuMemAllocAsync)(address, request->bytes, stream);
}

/* Whether the driver's answer holds. Growth that was not reserved and passes the limit is undone: nobody has used the block, and
 * so it is free at once, whatever its stream has to do first. */
static bool attempt(struct request *request, CUdeviceptr *address, CUstream stream, int *result)
{
    *result = ask_driver(request, address, stream);
    uint64_t unpaid = gs_pool_settle(request->pool, request->place.card, request->reserved);
    bool undone = unpaid && *result == CUDA_SUCCESS && gs_over_limit(request->place.card);
    if (undone) {
        GS_RELAX_CAPTURE;
        DRIVER(cuMemFree_v2)(*address);
        DRIVER(cuMemPoolTrimTo)(request->pool, 0);
    }
    if (unpaid)
        gs_pool_decided(request->pool, !undone);
    return !undone;
}

/* The stream waits for that one: on the card, or, with a driver that cannot, here. */
static bool follow(const struct request *request, const struct gs_giver *giver)
{
    CUevent event = giver->event;
    GS_RELAX_CAPTURE;
    int waits = CUDA_ERROR_NOT_FOUND;
    CUstream stream = request->stream ? request->stream : (CUstream)(uintptr_t)(request->own_stream ? 2 : 1);
    if (event || (DRIVER(cuEventCreate)(&event, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS &&
                  DRIVER(cuEventRecord)(event, giver->stream) == CUDA_SUCCESS))
        waits = DRIVER(cuStreamWaitEvent)(stream, event, 0);
    if (event && event != giver->event)
        DRIVER(cuEventDestroy_v2)(event);
    if (waits != CUDA_SUCCESS && !giver->event)
        waits = DRIVER(cuStreamSynchronize)(giver->stream);
    return waits == CUDA_SUCCESS;
}

/* A card without room takes a block that another stream is still to free, and lets this stream wait for that (CUDA Driver API,
 * CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES). A driver that sees room on the card would rather have more of it: so it is
 * asked for a block on the other stream, which needs no more. Behind an event it gives such a block on this one. */
static bool take_from_another(struct request *request, CUdeviceptr *address, int *result)
{
    struct gs_giver giver;
    bool taken = false;
    while (!taken && gs_pool_giver(request->pool, request->bytes, &giver)) {
        bool reachable = !giver.context || giver.context == request->place.context;
        if (giver.event)
            taken = follow(request, &giver) && attempt(request, address, request->stream, result);
        else if (reachable && attempt(request, address, giver.stream, result))
            taken = *result != CUDA_SUCCESS || follow(request, &giver);
        gs_pool_used(request->pool);
    }
    return taken;
}

static bool reserve(struct request *request, bool (*way)(struct gs_card *, uint64_t))
{
    uint64_t growth = gs_round_up(request->bytes, GS_POOL_STEP), least = gs_round_up(request->bytes, GS_PAGE_BYTES);
    request->reserved = way(request->place.card, growth) ? growth : way(request->place.card, least) ? least : 0;
    gs_pool_promise(request->pool, request->reserved);
    return request->reserved != 0;
}

/* A pool with enough free room does not grow, else it grows by whole steps; if a step does not fit under the limit, only the
 * requested bytes are reserved. Without room for these either, what a card does that is full: it waits for another stream's
 * block, and takes back what pools keep. No lock is held here: what is promised to one thread is counted as used at once. */
static bool allocate(struct request *request, CUdeviceptr *address, int *result)
{
    struct gs_card *card = request->place.card;
    struct gs_giver on = gs_giver_of(request->stream, request->own_stream);
    enum gs_pool_room room = gs_pool_take(request->pool, request->bytes, &on);
    if (room != GS_POOL_IDLE)
        gs_measure_sometimes(card);
    if ((room == GS_POOL_IDLE || reserve(request, gs_take_room_at_once)) && attempt(request, address, request->stream, result))
        return true;
    request->reserved = 0;
    if (room == GS_POOL_PENDING &&
        (take_from_another(request, address, result) || attempt(request, address, request->stream, result)))
        return true;
    return reserve(request, gs_reserve_quietly) && attempt(request, address, request->stream, result);
}

static int allocate_counted(struct request *request, CUdeviceptr *address)
{
    int result;
    if (!allocate(request, address, &result)) {
        gs_refuse(request->place.card);
        result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (result == CUDA_SUCCESS)
        gs_table_put(&gs_held, &(struct gs_entry){.key = *address,
                                                  .bytes = request->bytes,
                                                  .owner = gs_key(request->pool),
                                                  .kind = GS_STREAM_ORDERED,
                                                  .card = request->place.card->index});
    else
        gs_pool_not_taken(request->pool, request->bytes);
    return result;
}

static int allocate_async(CUdeviceptr *address, size_t bytes, CUmemoryPool given, CUstream stream, bool own_stream)
{
    struct request request = {.given = given, .pool = given, .stream = stream, .own_stream = own_stream, .bytes = bytes};
    if (!bytes || !(request.place = gs_stream_place(stream)).card)
        return ask_driver(&request, address, stream);
    if (gs_is_capturing(stream, own_stream)) { /* becomes a graph node, counted when the graph gets its memory */
        gs_graph_memory_seen(request.place.device, request.place.card);
        return ask_driver(&request, address, stream);
    }
    if (!request.pool && !gs_pool_of_device(&request.pool, request.place.device))
        return ask_driver(&request, address, stream);
    switch (gs_pool_owner(request.pool, &request.place.card)) {
    case GS_POOL_OURS: return allocate_counted(&request, address);
    case GS_POOL_UNKNOWN: /* more pools than we can track: nobody would count the memory of this one */
        gs_refuse(request.place.card);
        return CUDA_ERROR_OUT_OF_MEMORY;
    default: return ask_driver(&request, address, stream);
    }
}

#define ALLOCATE(symbol, own_stream)                                                                                           \
    int symbol(CUdeviceptr *address, size_t bytes, CUstream stream)                                                            \
    {                                                                                                                          \
        return allocate_async(address, bytes, NULL, stream, own_stream);                                                       \
    }
#define ALLOCATE_FROM(symbol, own_stream)                                                                                      \
    int symbol(CUdeviceptr *address, size_t bytes, CUmemoryPool pool, CUstream stream)                                         \
    {                                                                                                                          \
        return pool ? allocate_async(address, bytes, pool, stream, own_stream) : DRIVER(symbol)(address, bytes, pool, stream); \
    }

ALLOCATE(cuMemAllocAsync, false)
ALLOCATE(cuMemAllocAsync_ptsz, true)
ALLOCATE_FROM(cuMemAllocFromPoolAsync, false)
ALLOCATE_FROM(cuMemAllocFromPoolAsync_ptsz, true)

/* ---- pools ---- */

int cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *properties)
{
    int result = DRIVER(cuMemPoolCreate)(pool, properties);
    if (result != CUDA_SUCCESS)
        return result;
    struct gs_card *card = gs_card_of_location(properties->location.type, properties->location.id);
    gs_pool_made(*pool, card, properties->allocType == CU_MEM_ALLOCATION_TYPE_MANAGED);
    return result;
}

int cuMemPoolImportFromShareableHandle(CUmemoryPool *pool, void *handle, int type, unsigned long long flags)
{
    int result = DRIVER(cuMemPoolImportFromShareableHandle)(pool, handle, type, flags);
    if (result == CUDA_SUCCESS)
        gs_pool_made(*pool, NULL, false);
    return result;
}

/* Blocks of an imported pool that were opened here keep the maker's memory allocated until they are freed and the pool is
 * destroyed here. */
int cuMemPoolImportPointer(CUdeviceptr *address, CUmemoryPool pool, const void *data)
{
    int device = -1;
    int result = DRIVER(cuMemPoolImportPointer)(address, pool, data);
    if (result != CUDA_SUCCESS)
        return result;
    int located = DRIVER(cuPointerGetAttribute)(&device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, *address);
    struct gs_card *card = located == CUDA_SUCCESS ? gs_card_of_device(device) : gs_current_place().card;
    if (!card)
        return result;
    gs_pool_opened(pool, card);
    gs_table_put(&gs_held,
                 &(struct gs_entry){.key = *address, .owner = gs_key(pool), .kind = GS_STREAM_ORDERED, .card = card->index});
    return result;
}

int cuMemPoolExportPointer(void *data, CUdeviceptr address)
{
    struct gs_entry entry;
    int result = DRIVER(cuMemPoolExportPointer)(data, address);
    if (result == CUDA_SUCCESS && gs_table_get(&gs_held, address, &entry) && entry.kind == GS_STREAM_ORDERED) {
        gs_pool_block_lent(&entry);
        gs_table_put(&gs_held, &entry);
    }
    return result;
}

int cuMemPoolDestroy(CUmemoryPool pool)
{
    gs_pool_ends(pool);
    gs_releasing_begins();
    int result = DRIVER(cuMemPoolDestroy)(pool);
    gs_pool_destroyed(pool, result == CUDA_SUCCESS);
    gs_releasing_ends();
    return result;
}

int cuMemPoolTrimTo(CUmemoryPool pool, size_t keep)
{
    int result = DRIVER(cuMemPoolTrimTo)(pool, keep);
    gs_pool_decided(pool, false);
    return result;
}

int cuMemPoolSetAttribute(CUmemoryPool pool, int attribute, void *value)
{
    int result = DRIVER(cuMemPoolSetAttribute)(pool, attribute, value);
    if (result == CUDA_SUCCESS && attribute == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD)
        gs_pool_threshold(pool, *(const uint64_t *)value);
    return result;
}

/* ---- synchronization, at which pools release memory ---- */

#define WAIT(symbol, parameters, call)                                                                                         \
    int symbol parameters                                                                                                      \
    {                                                                                                                          \
        int result = DRIVER(symbol) call;                                                                                      \
        gs_throttle_awaited();                                                                                                 \
        gs_pools_changed();                                                                                                    \
        return result;                                                                                                         \
    }

WAIT(cuStreamSynchronize, (CUstream stream), (stream))
WAIT(cuStreamSynchronize_ptsz, (CUstream stream), (stream))
WAIT(cuCtxSynchronize, (void), ())
WAIT(cuCtxSynchronize_v2, (CUcontext context), (context))
WAIT(cuEventSynchronize, (CUevent event), (event))
