/* Other processes' memory opened here, and ours opened by others. It is counted once, by the process that allocated it. */
#include "hooks/place.h"
#include "policy/reserve.h"
#include "system/at_fork.h"

static void mark_exported(CUdeviceptr address)
{
    struct gs_entry entry;
    CUdeviceptr base;
    size_t bytes;
    if (DRIVER(cuMemGetAddressRange_v2)(&base, &bytes, address) == CUDA_SUCCESS)
        address = base;
    if (!gs_table_get(&gs_held, address, &entry) || entry.kind != GS_LINEAR)
        return;
    entry.kind |= GS_EXPORTED;
    gs_accounts_exported(&gs_accounts, entry.card, (int64_t)entry.bytes);
    gs_accounts_unconfirmed(&gs_accounts, entry.card, GS_MAY_BE_UNLISTED, (int64_t)entry.bytes);
    gs_table_put(&gs_held, &entry);
}

int cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address)
{
    int result = DRIVER(cuIpcGetMemHandle)(handle, address);
    if (result == CUDA_SUCCESS)
        mark_exported(address);
    return result;
}

/* ---- memory that is open here, by address ---- */

static struct gs_lock opening GS_PER_PROCESS;

/* The driver returns the same address each time, and each opening needs a closing. The memory is on its maker's card, which need not
 * be the current one: programs with several cards open their peers' buffers like this. Returns that card. */
static struct gs_card *opened(CUdeviceptr address)
{
    struct gs_place place = gs_current_place();
    struct gs_entry entry = {.key = address, .owner = gs_key(place.context), .kind = GS_OPENED};
    int device = 0;
    if (DRIVER(cuPointerGetAttribute)(&device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address) == CUDA_SUCCESS)
        place.card = gs_card_of_device(device);
    if (!place.card || place.card->index >= GPUSLICE_CARDS)
        return NULL;
    GS_GUARD(&opening);
    if (!gs_table_get(&gs_held, address, &entry)) {
        entry.card = place.card->index;
        gs_accounts_imported(&gs_accounts, entry.card, 1);
    }
    entry.bytes++;
    gs_table_put(&gs_held, &entry);
    return place.card;
}

/* On the card on which it was opened, whichever card is current now. */
static void closed(CUdeviceptr address)
{
    struct gs_entry entry;
    GS_GUARD(&opening);
    bool known = gs_table_take(&gs_held, address, &entry);
    if (known && (entry.kind != GS_OPENED || --entry.bytes))
        gs_table_put(&gs_held, &entry);
    else if (known)
        gs_release_entry(&entry);
}

static int open_here(CUdeviceptr address)
{
    struct gs_card *card = opened(address);
    if (!card || !gs_borrowed_too_much(card))
        return CUDA_SUCCESS;
    closed(address);
    DRIVER(cuIpcCloseMemHandle)(address);
    gs_refuse(card);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

#define OPEN(symbol)                                                                                                           \
    int symbol(CUdeviceptr *address, CUipcMemHandle handle, unsigned flags)                                                    \
    {                                                                                                                          \
        int result = DRIVER(symbol)(address, handle, flags);                                                                   \
        return result == CUDA_SUCCESS ? open_here(*address) : result;                                                          \
    }

OPEN(cuIpcOpenMemHandle)
OPEN(cuIpcOpenMemHandle_v2)

int cuIpcCloseMemHandle(CUdeviceptr address)
{
    int result = DRIVER(cuIpcCloseMemHandle)(address);
    if (result == CUDA_SUCCESS)
        closed(address);
    return result;
}

int cuImportExternalMemory(CUexternalMemory *memory, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *description)
{
    struct gs_place place = gs_current_place();
    int result = DRIVER(cuImportExternalMemory)(memory, description);
    if (place.card && result == CUDA_SUCCESS) {
        gs_accounts_imported(&gs_accounts, place.card->index, 1);
        gs_table_put(&gs_held, &(struct gs_entry){.key = gs_key(*memory),
                                                  .bytes = description->size,
                                                  .owner = gs_key(place.context),
                                                  .kind = GS_IMPORT,
                                                  .card = place.card->index});
    }
    return result;
}

int cuDestroyExternalMemory(CUexternalMemory memory)
{
    struct gs_releasing releasing = gs_release_begins(gs_key(memory));
    return gs_released(&releasing, DRIVER(cuDestroyExternalMemory)(memory), NULL);
}
