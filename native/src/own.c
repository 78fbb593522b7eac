/* The driver's own use: contexts, modules, heaps. Nobody asks for these bytes, so they are measured: by NVML's figure
 * for this process, or, where NVML hides processes, by what the card lost during the call. */
#include "measured.h"

#include <string.h>

#include "own.h"
#include "pools.h"

static struct own owns[GPUSLICE_CARDS];
static struct gs_table pieces; /* context, module or limit → what it was seen to take, its context */
static struct gs_lock lock;

void gs_forget_own(void)
{
    lock = (struct gs_lock){0};
    memset(owns, 0, sizeof owns);
    gs_table_forget(&pieces);
    gs_forget_contexts();
}

/* ---- readings ---- */

static bool open_device(const struct gs_card *card, nvmlDevice_t *device)
{
    static bool ready;
    gs_bind_nvml(NULL);
    if (!__atomic_load_n(&ready, __ATOMIC_ACQUIRE) && DRIVER(nvmlInit_v2)() == NVML_SUCCESS)
        __atomic_store_n(&ready, true, __ATOMIC_RELEASE); /* held for good: the program's own count stays its own */
    return ready && DRIVER(nvmlDeviceGetHandleByUUID)(card->uuid, device) == NVML_SUCCESS;
}

/* Entries of the list's first form are shorter. */
static bool read_list(nvmlDevice_t device, nvmlProcessInfo_t list[GS_LISTED], uint32_t *count)
{
    *count = GS_LISTED;
    if (DRIVER(nvmlDeviceGetComputeRunningProcesses_v3)(device, count, list) == NVML_SUCCESS)
        return true;
    *count = GS_LISTED;
    if (DRIVER(nvmlDeviceGetComputeRunningProcesses_v2)(device, count, list) == NVML_SUCCESS)
        return true;
    *count = 0;
    return false;
}

static void read_processes(nvmlDevice_t device, uint32_t host_pid, struct reading *reading)
{
    nvmlProcessInfo_t list[GS_LISTED];
    uint32_t self = host_pid ? host_pid : gs_pid();
    if (!read_list(device, list, &reading->count))
        return;
    for (uint32_t i = 0; i < reading->count; i++) {
        reading->pids[i] = list[i].pid;
        reading->bytes[i] = list[i].usedGpuMemory;
        if (list[i].pid == self) {
            reading->listed = true;
            reading->mine = list[i].usedGpuMemory;
        }
    }
}

void gs_read_card(const struct own *own, struct reading *reading)
{
    nvmlDevice_t device;
    nvmlMemory_t memory;
    reading->known = reading->listed = false;
    reading->count = 0;
    if (!open_device(own->card, &device) || DRIVER(nvmlDeviceGetMemoryInfo)(device, &memory) != NVML_SUCCESS)
        return;
    reading->known = true;
    reading->device_used = memory.used;
    read_processes(device, own->host_pid, reading);
}

bool gs_reading_lists(const struct reading *reading, uint32_t pid)
{
    for (uint32_t i = 0; i < reading->count; i++)
        if (reading->pids[i] == pid)
            return true;
    return false;
}

/* In a pid namespace NVML may speak of us by a number we do not know: the only one that is new is ours. */
void gs_learn_host_pid(struct own *own, const struct reading *before, struct reading *after)
{
    uint32_t found = 0, count = 0;
    for (uint32_t i = 0; i < after->count; i++)
        if (!gs_reading_lists(before, after->pids[i])) {
            found = after->pids[i];
            count++;
        }
    if (after->listed || own->host_pid || count != 1)
        return;
    own->host_pid = found;
    gs_books_set_host_pid(&gs_books, found);
    gs_read_card(own, after);
}

/* ---- charging ---- */

struct own *gs_own_of(struct gs_card *card)
{
    struct own *own = &owns[card->index];
    own->card = card;
    return own;
}

void gs_charge_own(struct own *own, uint64_t bytes)
{
    gs_settle(own->card, own->charged, bytes);
    own->charged = bytes;
    gs_books_set_own(&gs_books, own->card->index, bytes);
}

/* What the driver says we hold, less what we know of. Unusable while other threads allocate. */
static bool measure_own(struct own *own, const struct reading *reading, uint64_t counted, uint64_t *bytes)
{
    uint64_t now = gs_books_mine(&gs_books, own->card->index);
    if (!reading->listed || now != counted || now < own->charged)
        return false;
    uint64_t asked_for = now - own->charged;
    *bytes = reading->mine > asked_for ? reading->mine - asked_for : 0;
    return true;
}

bool gs_measure(struct gs_card *card)
{
    struct reading reading = {0};
    uint64_t bytes;
    if (card->index >= GPUSLICE_CARDS)
        return false;
    gs_pools_changed();
    gs_lock(&lock);
    struct own *own = gs_own_of(card);
    for (int attempt = 0; attempt < 3; attempt++) {
        uint64_t counted = gs_books_mine(&gs_books, card->index);
        gs_read_card(own, &reading);
        if (measure_own(own, &reading, counted, &bytes)) {
            gs_charge_own(own, bytes);
            break;
        }
        if (!reading.listed)
            break;
    }
    gs_unlock(&lock);
    return reading.listed;
}

/* ---- what the card lost meanwhile ---- */

void gs_look_at_card(struct gs_card *card, struct gs_sight *sight)
{
    gs_lock(&lock);
    sight->held = gs_used(card);
    gs_read_card(gs_own_of(card), &sight->reading);
    gs_unlock(&lock);
}

int64_t gs_grown(const struct gs_sight *before, const struct gs_sight *after)
{
    if (!before->reading.known || !after->reading.known)
        return 0;
    int64_t card = (int64_t)(after->reading.device_used - before->reading.device_used);
    return card - (int64_t)(after->held - before->held); /* without what our own container took */
}

void gs_add_piece(struct gs_card *card, uint64_t key, uint64_t context, int64_t bytes)
{
    struct gs_entry piece = {.key = key, .owner = context, .card = card->index};
    gs_lock(&lock);
    struct own *own = gs_own_of(card);
    gs_table_take(&pieces, key, &piece);
    int64_t least = -(int64_t)piece.bytes;
    bytes = bytes < least ? least : bytes;
    piece.bytes += (uint64_t)bytes;
    piece.owner = context;
    if (piece.bytes)
        gs_table_put(&pieces, &piece);
    gs_charge_own(own, own->charged + (uint64_t)bytes);
    gs_unlock(&lock);
}

static bool gather(struct gs_entry *piece, void *context)
{
    struct gs_entry *sum = context;
    if (piece->owner != sum->owner)
        return false;
    sum->bytes += piece->bytes;
    return true;
}

/* Under the lock. */
static void drop_pieces(struct own *own, uint64_t key, uint64_t context)
{
    struct gs_entry piece = {0}, sum = {.owner = context};
    gs_table_take(&pieces, key, &piece);
    if (context)
        gs_table_sift(&pieces, gather, &sum);
    uint64_t bytes = piece.bytes + sum.bytes;
    gs_charge_own(own, own->charged > bytes ? own->charged - bytes : 0);
}

void gs_drop_piece(struct gs_card *card, uint64_t key)
{
    gs_lock(&lock);
    drop_pieces(gs_own_of(card), key, 0);
    gs_unlock(&lock);
}

void gs_context_made(struct gs_card *card, uint64_t key, uint64_t bytes)
{
    gs_add_piece(card, key, 0, (int64_t)bytes);
    gs_lock(&lock);
    gs_own_of(card)->contexts++;
    gs_unlock(&lock);
}

bool gs_context_ended(struct gs_card *card, uint64_t key, uint64_t context)
{
    gs_lock(&lock);
    struct own *own = gs_own_of(card);
    drop_pieces(own, key, context);
    own->contexts -= own->contexts > 0;
    bool last = own->contexts == 0;
    if (last)
        gs_charge_own(own, 0);
    gs_unlock(&lock);
    return last;
}
