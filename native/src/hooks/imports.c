/* Other processes' memory opened here, and ours opened by others. It is counted once, by the process that allocated it. */
#include "hooks/place.h"
#include "policy/held.h"
#include "policy/opened.h"
#include "policy/process_usage.h"
#include "policy/provisional.h"
#include "policy/unconfirmed.h"

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
    gs_unconfirmed_add(entry.card, GS_MAY_BE_UNLISTED, (int64_t)entry.bytes);
    gs_table_put(&gs_held, &entry);
}

int cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address)
{
    int result = DRIVER(cuIpcGetMemHandle)(handle, address);
    if (result == CUDA_SUCCESS)
        mark_exported(address);
    return result;
}

static int open_here(CUdeviceptr address)
{
    struct gs_card *card = gs_opened_add(gs_current_place(), address);
    if (!card || !gs_borrowed_too_much(card))
        return CUDA_SUCCESS;
    gs_opened_remove(address);
    DRIVER(cuIpcCloseMemHandle)(address);
    gs_refuse(card);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

int cuIpcOpenMemHandle(CUdeviceptr *address, CUipcMemHandle handle, unsigned int flags)
{
    int result = DRIVER(cuIpcOpenMemHandle)(address, handle, flags);
    return result == CUDA_SUCCESS ? open_here(*address) : result;
}

int cuIpcOpenMemHandle_v2(CUdeviceptr *address, CUipcMemHandle handle, unsigned int flags)
{
    int result = DRIVER(cuIpcOpenMemHandle_v2)(address, handle, flags);
    return result == CUDA_SUCCESS ? open_here(*address) : result;
}

int cuIpcCloseMemHandle(CUdeviceptr address)
{
    int result = DRIVER(cuIpcCloseMemHandle)(address);
    if (result == CUDA_SUCCESS)
        gs_opened_remove(address);
    return result;
}

int cuImportExternalMemory(CUexternalMemory *memory, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *description)
{
    struct gs_place place = gs_current_place();
    int result = DRIVER(cuImportExternalMemory)(memory, description);
    if (place.card && result == CUDA_SUCCESS) {
        gs_accounts_imported(&gs_accounts, place.card->index, 1);
        gs_table_put(&gs_held, &(struct gs_entry){.key = (uint64_t)(uintptr_t)*memory,
                                                  .bytes = description->size,
                                                  .owner = (uint64_t)(uintptr_t)place.context,
                                                  .kind = GS_IMPORT,
                                                  .card = place.card->index});
    }
    return result;
}

int cuDestroyExternalMemory(CUexternalMemory memory)
{
    struct gs_releasing releasing = gs_release_begins((uint64_t)(uintptr_t)memory);
    return gs_released(&releasing, DRIVER(cuDestroyExternalMemory)(memory));
}
