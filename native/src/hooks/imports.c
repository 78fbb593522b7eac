/* Other processes' memory opened here, and ours opened by others: counted once, where it was made. */
#include "policy/core.h"
#include "policy/driver_overhead.h"

enum { CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9 };

static struct gs_table opened; /* address → its length, how often it was opened (`kind`), the context */
static struct gs_lock lock;

static uint64_t bytes_at(CUdeviceptr address)
{
    CUdeviceptr base;
    size_t bytes = 0;
    return DRIVER(cuMemGetAddressRange_v2)(&base, &bytes, address) == CUDA_SUCCESS ? bytes : 0;
}

void gs_forget_imports(void)
{
    lock = (struct gs_lock){0};
    gs_table_forget(&opened);
}

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
    gs_accounts_exported(&gs_accounts, entry.card, entry.bytes);
    gs_doubt(entry.card, GS_PERHAPS_MISSING, (int64_t)entry.bytes);
    gs_table_put(&gs_held, &entry);
}

int cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address)
{
    bool active = gs_enter_cuda();
    int result = DRIVER(cuIpcGetMemHandle)(handle, address);
    if (active && result == CUDA_SUCCESS)
        mark_exported(address);
    return result;
}

/* The driver gives the same address each time; each opening wants a closing. The memory is its maker's card's, which need
 * not be the current one's: programs of several cards open their peers' buffers like this. */
static void note_opened(struct gs_place place, CUdeviceptr address)
{
    struct gs_entry entry = {.key = address, .owner = (uint64_t)(uintptr_t)place.context, .kind = 0};
    int device = 0;
    if (DRIVER(cuPointerGetAttribute)(&device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address) == CUDA_SUCCESS)
        place.card = gs_card_of_device(device);
    if (!place.card || place.card->index >= GPUSLICE_CARDS)
        return;
    gs_lock(&lock);
    if (!gs_table_get(&opened, address, &entry)) {
        entry.card = place.card->index;
        entry.bytes = bytes_at(address);
        gs_doubt(entry.card, GS_PERHAPS_MORE, (int64_t)entry.bytes);
        gs_accounts_imported(&gs_accounts, entry.card, 1);
    }
    entry.kind++;
    gs_table_put(&opened, &entry);
    gs_unlock(&lock);
}

static void let_go(const struct gs_entry *entry)
{
    gs_doubt(entry->card, GS_PERHAPS_MORE, -(int64_t)entry->bytes);
    gs_accounts_imported(&gs_accounts, entry->card, -1);
}

/* Whatever is current now: it was opened on the card that was current then. */
static void note_closed(CUdeviceptr address)
{
    struct gs_entry entry;
    gs_lock(&lock);
    bool known = gs_table_take(&opened, address, &entry);
    if (known && --entry.kind)
        gs_table_put(&opened, &entry);
    else if (known)
        let_go(&entry);
    gs_unlock(&lock);
}

static bool drop_of_context(struct gs_entry *entry, void *context)
{
    if (entry->owner != *(const uint64_t *)context)
        return false;
    let_go(entry);
    return true;
}

void gs_imports_drop_context(CUcontext context)
{
    uint64_t owner = (uint64_t)(uintptr_t)context;
    gs_lock(&lock);
    gs_table_sift(&opened, drop_of_context, &owner);
    gs_unlock(&lock);
}

int cuIpcOpenMemHandle(CUdeviceptr *address, CUipcMemHandle handle, unsigned int flags)
{
    bool active = gs_enter_cuda();
    int result = DRIVER(cuIpcOpenMemHandle)(address, handle, flags);
    if (active && result == CUDA_SUCCESS)
        note_opened(gs_current_place(), *address);
    return result;
}

int cuIpcOpenMemHandle_v2(CUdeviceptr *address, CUipcMemHandle handle, unsigned int flags)
{
    bool active = gs_enter_cuda();
    int result = DRIVER(cuIpcOpenMemHandle_v2)(address, handle, flags);
    if (active && result == CUDA_SUCCESS)
        note_opened(gs_current_place(), *address);
    return result;
}

int cuIpcCloseMemHandle(CUdeviceptr address)
{
    bool active = gs_enter_cuda();
    int result = DRIVER(cuIpcCloseMemHandle)(address);
    if (active && result == CUDA_SUCCESS)
        note_closed(address);
    return result;
}

int cuImportExternalMemory(CUexternalMemory *memory, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *description)
{
    struct gs_place place = {0};
    if (gs_enter_cuda())
        place = gs_current_place();
    int result = DRIVER(cuImportExternalMemory)(memory, description);
    if (place.card && result == CUDA_SUCCESS) {
        gs_accounts_imported(&gs_accounts, place.card->index, 1);
        gs_doubt(place.card->index, GS_PERHAPS_MORE, (int64_t)description->size);
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
    struct gs_entry entry;
    bool known = gs_enter_cuda() && gs_table_take(&gs_held, (uint64_t)(uintptr_t)memory, &entry);
    int result = DRIVER(cuDestroyExternalMemory)(memory);
    if (known && result == CUDA_SUCCESS)
        gs_release_entry(&entry);
    else if (known)
        gs_table_put(&gs_held, &entry);
    return result;
}
