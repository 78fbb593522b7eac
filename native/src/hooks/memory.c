/* Linear memory: allocated and freed at once. */
#include "hooks/place.h"
#include "policy/held.h"
#include "policy/reserve.h"
#include "policy/start.h"

/* ---- allocating: reserve, call, then hold or give back ---- */

struct request {
    struct gs_place place; /* without a card nothing is counted */
    uint64_t reserved;
    bool refused;
};

static struct request reserve_here(uint64_t bytes)
{
    struct request request = {0};
    if (!gs_enter_cuda() || !bytes)
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

/* It may live on the host and exceed the card. It counts in full: any of it can move here unasked. */
int cuMemAllocManaged(CUdeviceptr *address, size_t bytes, unsigned int flags)
{
    struct request request = reserve_here(gs_round_up(bytes, GS_PAGE_BYTES));
    if (request.refused)
        return CUDA_ERROR_OUT_OF_MEMORY;
    int result = DRIVER(cuMemAllocManaged)(address, bytes, flags);
    return result == CUDA_SUCCESS ? hold(&request, *address, bytes, GS_MANAGED) : give_back(&request, result);
}

/* The driver chooses the pitch: what no known card exceeds is reserved, what it took is settled. */
#define WIDEST_PITCH_STEP 512u

static uint64_t pitched_bytes(uint64_t width, uint64_t height)
{
    uint64_t row = gs_round_up(width, WIDEST_PITCH_STEP);
    return height && row > UINT64_MAX / height ? UINT64_MAX : gs_round_up(row * height, GS_PAGE_BYTES);
}

int cuMemAllocPitch_v2(CUdeviceptr *address, size_t *pitch, size_t width, size_t height, unsigned int element)
{
    struct request request = reserve_here(pitched_bytes(width, height));
    if (request.refused)
        return CUDA_ERROR_OUT_OF_MEMORY;
    int result = DRIVER(cuMemAllocPitch_v2)(address, pitch, width, height, element);
    return result == CUDA_SUCCESS ? hold(&request, *address, *pitch * height, 0) : give_back(&request, result);
}

int cuMemAllocPitch(unsigned int *address, unsigned int *pitch, unsigned int width, unsigned int height,
                    unsigned int element)
{
    struct request request = reserve_here(pitched_bytes(width, height));
    if (request.refused)
        return CUDA_ERROR_OUT_OF_MEMORY;
    int result = DRIVER(cuMemAllocPitch)(address, pitch, width, height, element);
    return result == CUDA_SUCCESS ? hold(&request, *address, (uint64_t)*pitch * height, 0) : give_back(&request, result);
}

/* ---- freeing ---- */

/* Our note goes first: once the driver has freed it, another thread may be given the same address. */
static bool take_note(CUdeviceptr address, struct gs_entry *entry)
{
    return gs_enter_cuda() && gs_table_take(&gs_held, address, entry);
}

static int settle_free(int result, bool noted, struct gs_entry *entry)
{
    if (noted && result == CUDA_SUCCESS)
        gs_release_entry(entry);
    else if (noted)
        gs_table_put(&gs_held, entry);
    return result;
}

int cuMemFree_v2(CUdeviceptr address)
{
    struct gs_entry entry;
    bool noted = take_note(address, &entry);
    return settle_free(DRIVER(cuMemFree_v2)(address), noted, &entry);
}

int cuMemFree(unsigned int address)
{
    struct gs_entry entry;
    bool noted = take_note(address, &entry);
    return settle_free(DRIVER(cuMemFree)(address), noted, &entry);
}

int cuMemFreeAsync(CUdeviceptr address, CUstream stream)
{
    struct gs_entry entry;
    bool noted = take_note(address, &entry);
    return settle_free(DRIVER(cuMemFreeAsync)(address, stream), noted, &entry);
}

int cuMemFreeAsync_ptsz(CUdeviceptr address, CUstream stream)
{
    struct gs_entry entry;
    bool noted = take_note(address, &entry);
    return settle_free(DRIVER(cuMemFreeAsync_ptsz)(address, stream), noted, &entry);
}
