/* Linear memory, which is allocated and freed immediately. */
#include "hooks/place.h"
#include "policy/held.h"
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

int cuMemAlloc_v2(CUdeviceptr *address, size_t bytes)
{
    struct request request = reserve_here(gs_round_up(bytes, GS_PAGE_BYTES));
    if (request.refused)
        return CUDA_ERROR_OUT_OF_MEMORY;
    int result = DRIVER(cuMemAlloc_v2)(address, bytes);
    return result == CUDA_SUCCESS ? hold(&request, *address, bytes, 0) : give_back(&request, result);
}

int cuMemAlloc(unsigned int *address, unsigned int bytes)
{
    struct request request = reserve_here(gs_round_up(bytes, GS_PAGE_BYTES));
    if (request.refused)
        return CUDA_ERROR_OUT_OF_MEMORY;
    int result = DRIVER(cuMemAlloc)(address, bytes);
    return result == CUDA_SUCCESS ? hold(&request, *address, bytes, 0) : give_back(&request, result);
}

/* On cards before Pascal, managed memory is ordinary memory of the process. */
static uint32_t managed_kind(const struct gs_place *place)
{
    int moves = 1;
    DRIVER(cuDeviceGetAttribute)(&moves, CONCURRENT_MANAGED_ACCESS, place->device);
    return moves ? GS_MANAGED : 0;
}

/* Managed memory may be on the host and may exceed the card. All of it counts, since any of it may migrate to the card. */
int cuMemAllocManaged(CUdeviceptr *address, size_t bytes, unsigned int flags)
{
    struct request request = reserve_here(gs_round_up(bytes, GS_PAGE_BYTES));
    if (request.refused)
        return CUDA_ERROR_OUT_OF_MEMORY;
    int result = DRIVER(cuMemAllocManaged)(address, bytes, flags);
    return result == CUDA_SUCCESS ? hold(&request, *address, bytes, managed_kind(&request.place)) : give_back(&request, result);
}

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
    struct request request = reserve_here(pitched_bytes(width, height));
    if (request.refused)
        return CUDA_ERROR_OUT_OF_MEMORY;
    int result = DRIVER(cuMemAllocPitch_v2)(address, pitch, width, height, element);
    return result == CUDA_SUCCESS ? hold(&request, *address, *pitch * height, 0) : give_back(&request, result);
}

int cuMemAllocPitch(unsigned int *address, unsigned int *pitch, unsigned int width, unsigned int height, unsigned int element)
{
    struct request request = reserve_here(pitched_bytes(width, height));
    if (request.refused)
        return CUDA_ERROR_OUT_OF_MEMORY;
    int result = DRIVER(cuMemAllocPitch)(address, pitch, width, height, element);
    return result == CUDA_SUCCESS ? hold(&request, *address, (uint64_t)*pitch * height, 0) : give_back(&request, result);
}

/* ---- freeing ---- */

int cuMemFree_v2(CUdeviceptr address)
{
    struct gs_releasing releasing = gs_release_begins(address);
    return gs_released(&releasing, DRIVER(cuMemFree_v2)(address));
}

int cuMemFree(unsigned int address)
{
    struct gs_releasing releasing = gs_release_begins(address);
    return gs_released(&releasing, DRIVER(cuMemFree)(address));
}

static int gave(struct gs_releasing *releasing, int result, CUstream stream, bool own_stream)
{
    bool ordered = releasing->known && !gs_is_capturing(stream, own_stream);
    struct gs_giver on = ordered ? gs_giver_of(stream, own_stream) : (struct gs_giver){0};
    return gs_released_on(releasing, result, ordered ? &on : NULL);
}

int cuMemFreeAsync(CUdeviceptr address, CUstream stream)
{
    struct gs_releasing releasing = gs_release_begins(address);
    return gave(&releasing, DRIVER(cuMemFreeAsync)(address, stream), stream, false);
}

int cuMemFreeAsync_ptsz(CUdeviceptr address, CUstream stream)
{
    struct gs_releasing releasing = gs_release_begins(address);
    return gave(&releasing, DRIVER(cuMemFreeAsync_ptsz)(address, stream), stream, true);
}
