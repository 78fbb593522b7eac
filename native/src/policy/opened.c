#include "policy/opened.h"

#include "policy/process_usage.h"
#include "policy/unconfirmed.h"
#include "system/at_fork.h"
#include "system/table.h"

enum { CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9 };

static struct gs_table opened; /* address → how often it was opened (`kind`), and the context */
static struct gs_lock lock;

static void forget(void)
{
    lock = (struct gs_lock){0};
    gs_table_forget(&opened);
}
GS_AT_FORK(forget);

struct gs_card *gs_opened_add(struct gs_place place, CUdeviceptr address)
{
    struct gs_entry entry = {.key = address, .owner = (uint64_t)(uintptr_t)place.context, .kind = 0};
    int device = 0;
    if (DRIVER(cuPointerGetAttribute)(&device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address) == CUDA_SUCCESS)
        place.card = gs_card_of_device(device);
    if (!place.card || place.card->index >= GPUSLICE_CARDS)
        return NULL;
    gs_lock(&lock);
    if (!gs_table_get(&opened, address, &entry)) {
        entry.card = place.card->index;
        gs_accounts_imported(&gs_accounts, entry.card, 1);
    }
    entry.kind++;
    gs_table_put(&opened, &entry);
    gs_unlock(&lock);
    return place.card;
}

static void let_go(const struct gs_entry *entry) { gs_loan_ended(entry->card); }

void gs_opened_remove(CUdeviceptr address)
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

void gs_opened_drop_context(CUcontext context)
{
    uint64_t owner = (uint64_t)(uintptr_t)context;
    gs_lock(&lock);
    gs_table_sift(&opened, drop_of_context, &owner);
    gs_unlock(&lock);
}
