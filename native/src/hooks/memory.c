/* Linear memory: allocated and freed at once. */
#include "policy/core.h"
#include "policy/driver_overhead.h"
#include "hooks/pools.h"

static struct gs_table pages;

/* ---- what an allocation takes ---- */

/* The driver hands out pages of 2 MiB. A large block has its own; small ones share a page, which the address tells:
 * the page is charged with the first block on it and given back with the last. */
static bool has_own_pages(CUdeviceptr address, uint64_t bytes)
{
    return address % GS_PAGE_BYTES == 0 && bytes > GS_PAGE_BYTES / 2;
}

static uint64_t count_pages(CUdeviceptr address, uint64_t bytes, int by)
{
    uint64_t charged = 0;
    for (uint64_t page = address / GS_PAGE_BYTES; page <= (address + bytes - 1) / GS_PAGE_BYTES; page++) {
        uint64_t before = gs_table_count(&pages, page + 1, by);
        charged += before == (by > 0 ? 0u : 1u) ? GS_PAGE_BYTES : 0;
    }
    return charged;
}

void gs_forget_pages(void) { gs_table_forget(&pages); }

static void hold(struct gs_place place, CUdeviceptr address, uint64_t bytes, uint64_t reserved, uint32_t managed)
{
    bool own = has_own_pages(address, bytes);
    uint64_t charge = gs_round_up(bytes, GS_PAGE_BYTES);
    struct gs_entry entry = {.key = address,
                             .bytes = own ? charge : bytes,
                             .owner = (uint64_t)(uintptr_t)place.context,
                             .kind = (own ? GS_LINEAR : GS_SMALL) | managed,
                             .card = place.card->index};
    if (!gs_table_put(&gs_held, &entry))
        return; /* stays charged: it cannot be recognised when it is freed */
    if (managed)
        gs_doubt(entry.card, GS_PERHAPS_MISSING, (int64_t)entry.bytes);
    gs_settle(place.card, reserved, own ? charge : count_pages(address, bytes, 1));
}

uint64_t gs_release_entry(struct gs_entry *entry)
{
    uint64_t bytes = 0;
    if (entry->kind & (GS_MANAGED | GS_EXPORTED))
        gs_doubt(entry->card, GS_PERHAPS_MISSING, -(int64_t)entry->bytes);
    switch (entry->kind & 0xff) {
    case GS_LINEAR:
    case GS_ARRAY:
    case GS_EXTERNAL:
        bytes = entry->bytes;
        break;
    case GS_SMALL:
        bytes = count_pages(entry->key, entry->bytes, -1);
        break;
    case GS_STREAM_ORDERED:
        gs_pool_block_freed(entry);
        break;
    case GS_IMPORT:
        gs_doubt(entry->card, GS_PERHAPS_MORE, -(int64_t)entry->bytes);
        gs_accounts_imported(&gs_accounts, entry->card, -1);
        break;
    }
    if (entry->kind & GS_EXPORTED)
        gs_accounts_return_exported(&gs_accounts, entry->card, bytes);
    else
        gs_accounts_return(&gs_accounts, entry->card, bytes);
    return bytes;
}

/* ---- allocating ---- */

int cuMemAlloc_v2(CUdeviceptr *address, size_t bytes)
{
    struct gs_place place = {0};
    if (gs_enter_cuda())
        place = gs_current_place();
    if (!place.card || !bytes)
        return DRIVER(cuMemAlloc_v2)(address, bytes);
    uint64_t reserved = gs_round_up(bytes, GS_PAGE_BYTES);
    if (!gs_reserve(place.card, reserved))
        return CUDA_ERROR_OUT_OF_MEMORY;
    int result = DRIVER(cuMemAlloc_v2)(address, bytes);
    if (result == CUDA_SUCCESS)
        hold(place, *address, bytes, reserved, 0);
    else
        gs_settle(place.card, reserved, 0);
    return result;
}

int cuMemAlloc(unsigned int *address, unsigned int bytes)
{
    struct gs_place place = {0};
    if (gs_enter_cuda())
        place = gs_current_place();
    if (!place.card || !bytes)
        return DRIVER(cuMemAlloc)(address, bytes);
    uint64_t reserved = gs_round_up(bytes, GS_PAGE_BYTES);
    if (!gs_reserve(place.card, reserved))
        return CUDA_ERROR_OUT_OF_MEMORY;
    int result = DRIVER(cuMemAlloc)(address, bytes);
    if (result == CUDA_SUCCESS)
        hold(place, *address, bytes, reserved, 0);
    else
        gs_settle(place.card, reserved, 0);
    return result;
}

int cuMemAllocManaged(CUdeviceptr *address, size_t bytes, unsigned int flags)
{
    struct gs_place place = {0};
    if (gs_enter_cuda())
        place = gs_current_place();
    if (!place.card || !bytes)
        return DRIVER(cuMemAllocManaged)(address, bytes, flags);
    /* Managed memory may live on the host and exceed the card. It counts in full: any of it can move here unasked. */
    uint64_t reserved = gs_round_up(bytes, GS_PAGE_BYTES);
    if (!gs_reserve(place.card, reserved))
        return CUDA_ERROR_OUT_OF_MEMORY;
    int result = DRIVER(cuMemAllocManaged)(address, bytes, flags);
    if (result == CUDA_SUCCESS)
        hold(place, *address, bytes, reserved, GS_MANAGED);
    else
        gs_settle(place.card, reserved, 0);
    return result;
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
    struct gs_place place = {0};
    if (gs_enter_cuda())
        place = gs_current_place();
    if (!place.card || !width || !height)
        return DRIVER(cuMemAllocPitch_v2)(address, pitch, width, height, element);
    uint64_t reserved = pitched_bytes(width, height);
    if (!gs_reserve(place.card, reserved))
        return CUDA_ERROR_OUT_OF_MEMORY;
    int result = DRIVER(cuMemAllocPitch_v2)(address, pitch, width, height, element);
    if (result == CUDA_SUCCESS)
        hold(place, *address, *pitch * height, reserved, 0);
    else
        gs_settle(place.card, reserved, 0);
    return result;
}

int cuMemAllocPitch(unsigned int *address, unsigned int *pitch, unsigned int width, unsigned int height,
                    unsigned int element)
{
    struct gs_place place = {0};
    if (gs_enter_cuda())
        place = gs_current_place();
    if (!place.card || !width || !height)
        return DRIVER(cuMemAllocPitch)(address, pitch, width, height, element);
    uint64_t reserved = pitched_bytes(width, height);
    if (!gs_reserve(place.card, reserved))
        return CUDA_ERROR_OUT_OF_MEMORY;
    int result = DRIVER(cuMemAllocPitch)(address, pitch, width, height, element);
    if (result == CUDA_SUCCESS)
        hold(place, *address, (uint64_t)*pitch * height, reserved, 0);
    else
        gs_settle(place.card, reserved, 0);
    return result;
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

/* ---- a context that goes takes its memory along ---- */

struct gone {
    uint64_t context;
};

static bool drop_with_context(struct gs_entry *entry, void *context)
{
    const struct gone *gone = context;
    if (entry->owner != gone->context)
        return false;
    gs_release_entry(entry);
    return true;
}

void gs_drop_context(CUcontext context)
{
    struct gone gone = {(uint64_t)(uintptr_t)context};
    gs_table_sift(&gs_held, drop_with_context, &gone);
}
