/* Linear memory, which is allocated and freed immediately. */
#include "hooks/place.h"
#include "policy/pool_accounts.h"
#include "policy/reserve.h"

enum { CONCURRENT_MANAGED_ACCESS = 89 };

/* ---- allocating: reserve, call, then hold or give back ---- */

struct request {
    struct gs_place place; /* nothing is counted without a card */
    uint64_t reserved;
    bool refused;
};

static struct request reserve_here(uint64_t bytes)
{
    struct request request = {0};
    if (!bytes)
        return request;
    request.place = gs_current_place();
    request.reserved = bytes;
    request.refused = request.place.card && !gs_reserve(request.place.card, bytes);
    return request;
}

static int hold(const struct request *request, CUdeviceptr address, uint64_t bytes, uint32_t flags)
{
    if (request->place.card)
        gs_hold(request->place, address, bytes, request->reserved, flags);
    return CUDA_SUCCESS;
}

static int give_back(const struct request *request, int result)
{
    if (request->place.card)
        gs_settle(request->place.card, request->reserved, 0);
    return result;
}

/* A function that allocates: what it takes at most, how much the block has in the end, and of what kind that is. */
#define ALLOCATE(symbol, parameters, call, most, bytes, kind)                                                                  \
    int symbol parameters { RESERVE_AND_CALL(symbol, call, most, bytes, kind) }
#define RESERVE_AND_CALL(symbol, call, most, bytes, kind)                                                                      \
    struct request request = reserve_here(most);                                                                               \
    if (request.refused)                                                                                                       \
        return CUDA_ERROR_OUT_OF_MEMORY;                                                                                       \
    int result = DRIVER(symbol) call;                                                                                          \
    return result == CUDA_SUCCESS ? hold(&request, *address, bytes, kind) : give_back(&request, result);

ALLOCATE(cuMemAlloc_v2, (CUdeviceptr * address, size_t bytes), (address, bytes), gs_round_up(bytes, GS_PAGE_BYTES), bytes, 0)
ALLOCATE(cuMemAlloc, (unsigned *address, unsigned bytes), (address, bytes), gs_round_up(bytes, GS_PAGE_BYTES), bytes, 0)

/* On cards before Pascal, managed memory is ordinary memory of the process. */
static uint32_t managed_kind(const struct gs_place *place)
{
    int moves = 1;
    DRIVER(cuDeviceGetAttribute)(&moves, CONCURRENT_MANAGED_ACCESS, place->device);
    return moves ? GS_MANAGED : 0;
}

/* Managed memory may be on the host and may exceed the card. All of it counts, since any of it may migrate to the card. */
ALLOCATE(cuMemAllocManaged, (CUdeviceptr * address, size_t bytes, unsigned flags), (address, bytes, flags),
         gs_round_up(bytes, GS_PAGE_BYTES), bytes, managed_kind(&request.place))

/* The driver chooses the pitch. The widest pitch of all known cards is reserved, and the actual size is settled. */
#define WIDEST_PITCH_STEP 512u

static uint64_t pitched_bytes(uint64_t width, uint64_t height)
{
    uint64_t row = gs_round_up(width, WIDEST_PITCH_STEP);
    return height && row > UINT64_MAX / height ? UINT64_MAX : gs_round_up(row * height, GS_PAGE_BYTES);
}

/* For a size that overflows, the driver reports what is wrong. If it allocates something nevertheless, that is freed. */
static int of_no_size(int result, const CUdeviceptr *address)
{
    if (result == CUDA_SUCCESS)
        DRIVER(cuMemFree_v2)(*address);
    return result == CUDA_SUCCESS ? CUDA_ERROR_OUT_OF_MEMORY : result;
}

int cuMemAllocPitch_v2(CUdeviceptr *address, size_t *pitch, size_t width, size_t height, unsigned int element)
{
    if (pitched_bytes(width, height) == UINT64_MAX)
        return of_no_size(DRIVER(cuMemAllocPitch_v2)(address, pitch, width, height, element), address);
    RESERVE_AND_CALL(cuMemAllocPitch_v2, (address, pitch, width, height, element), pitched_bytes(width, height),
                     *pitch * height, 0)
}

ALLOCATE(cuMemAllocPitch, (unsigned *address, unsigned *pitch, unsigned width, unsigned height, unsigned element),
         (address, pitch, width, height, element), pitched_bytes(width, height), (uint64_t)*pitch *height, 0)

/* ---- freeing ---- */

#define FREE(symbol, type)                                                                                                     \
    int symbol(type address)                                                                                                   \
    {                                                                                                                          \
        struct gs_releasing releasing = gs_release_begins(address);                                                            \
        return gs_released(&releasing, DRIVER(symbol)(address), NULL);                                                         \
    }
FREE(cuMemFree_v2, CUdeviceptr)
FREE(cuMemFree, unsigned)

static int gave(struct gs_releasing *releasing, int result, CUstream stream, bool own_stream)
{
    bool ordered = releasing->known && !gs_is_capturing(stream, own_stream);
    struct gs_giver on = ordered ? gs_giver_of(stream, own_stream) : (struct gs_giver){0};
    return gs_released(releasing, result, ordered ? &on : NULL);
}

#define FREE_ASYNC(symbol, own_stream)                                                                                         \
    int symbol(CUdeviceptr address, CUstream stream)                                                                           \
    {                                                                                                                          \
        struct gs_releasing releasing = gs_release_begins(address);                                                            \
        return gave(&releasing, DRIVER(symbol)(address, stream), stream, own_stream);                                          \
    }
FREE_ASYNC(cuMemFreeAsync, false)
FREE_ASYNC(cuMemFreeAsync_ptsz, true)
