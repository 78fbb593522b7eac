/* What the container is shown: a card of the size of its share, which nobody else uses. */
#include "hooks/place.h"
#include "policy/descriptors.h"
#include "policy/pool_accounts.h"
#include "policy/process_usage.h"
#include "policy/reserve.h"
#include "system/os.h"

#define SWEEP_EVERY_NS UINT64_C(100000000)
enum { NVML_ERROR_NOT_FOUND = 6, NVML_ERROR_INSUFFICIENT_SIZE = 7 };

/* Also a program that only queries must see that the memory of a dead process is free again. */
static void sweep_sometimes(uint64_t now)
{
    static _Atomic uint64_t swept_ns;
    uint64_t last = atomic_load_explicit(&swept_ns, memory_order_relaxed);
    if (now - last >= SWEEP_EVERY_NS && atomic_compare_exchange_strong(&swept_ns, &last, now)) {
        gs_accounts_sweep(&gs_accounts);
        gs_descriptors_settle();
    }
}

struct share {
    uint64_t total, used, free;
};

/* The total is at most the card's, and the free memory at most what is free on the card. */
static struct share share_of(struct gs_card *card, uint64_t card_total, uint64_t card_free)
{
    uint64_t shown_bytes = card->shown_bytes;
    struct share share = {.total = shown_bytes < card_total ? shown_bytes : card_total};
    share.used = gs_used_by_figures(card);
    share.free = share.used < share.total ? share.total - share.used : 0;
    bool is_lent = card->limit_bytes < card->request_bytes; /* then others have what is free for us */
    share.free = share.free < card_free || is_lent ? share.free : card_free;
    return share;
}

static uint32_t narrow(uint64_t bytes) { return bytes < UINT32_MAX ? (uint32_t)bytes : UINT32_MAX; }

static struct gs_card *limited(struct gs_card *card)
{
    gs_cards_look(gs_coarse_ns());
    gs_cards_look_now();
    return card && card->limit_bytes != GS_NO_LIMIT ? card : NULL;
}

/* A program may ask for one of the two alone. */
int cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes)
{
    int result = DRIVER(cuMemGetInfo_v2)(free_bytes, total_bytes);
    struct gs_card *card = result == CUDA_SUCCESS ? gs_current_place().card : NULL;
    if (!card)
        return result;
    gs_pools_changed();
    uint64_t now = gs_measure_sometimes(card); /* and looks whether the limits have changed */
    if (card->limit_bytes == GS_NO_LIMIT)
        return result;
    if (gs_unlikely(gs_used(card) > card->limit_bytes))
        gs_pools_trim(); /* what was lent is called back */
    sweep_sometimes(now);
    struct share share = share_of(card, total_bytes ? *total_bytes : UINT64_MAX, free_bytes ? *free_bytes : UINT64_MAX);
    if (free_bytes)
        *free_bytes = share.free;
    if (total_bytes)
        *total_bytes = share.total;
    return result;
}

/* Before CUDA 3.2 sizes had 32 bits. */
int cuMemGetInfo(unsigned int *free_bytes, unsigned int *total_bytes)
{
    int result = DRIVER(cuMemGetInfo)(free_bytes, total_bytes);
    struct gs_card *card = result == CUDA_SUCCESS ? limited(gs_current_place().card) : NULL;
    struct share share = card ? share_of(card, UINT64_MAX, UINT64_MAX) : (struct share){0};
    if (card && free_bytes)
        *free_bytes = narrow(share.free);
    if (card && total_bytes)
        *total_bytes = narrow(share.total);
    return result;
}

#define TOTAL(symbol, type, shown)                                                                                             \
    int symbol(type *bytes, CUdevice device)                                                                                   \
    {                                                                                                                          \
        int result = DRIVER(symbol)(bytes, device);                                                                            \
        struct gs_card *card = result == CUDA_SUCCESS ? limited(gs_card_of_device(device)) : NULL;                             \
        if (card && bytes && *bytes > shown(card->shown_bytes))                                                                \
            *bytes = shown(card->shown_bytes);                                                                                 \
        return result;                                                                                                         \
    }
TOTAL(cuDeviceTotalMem_v2, size_t, )
TOTAL(cuDeviceTotalMem, unsigned int, narrow)

/* ---- NVML ---- */

static struct gs_card *card_of_handle(nvmlDevice_t device)
{
    char uuid[GPUSLICE_UUID_BYTES];
    return DRIVER(nvmlDeviceGetUUID)(device, uuid, sizeof uuid) == NVML_SUCCESS ? gs_card_of_uuid(uuid) : NULL;
}

/* What the driver has reserved, which the second version has, is not part of a share. */
#define MEMORY_INFO(symbol, type, ...)                                                                                         \
    int symbol(nvmlDevice_t device, type *memory)                                                                              \
    {                                                                                                                          \
        int result = DRIVER(symbol)(device, memory);                                                                           \
        struct gs_card *card = result == NVML_SUCCESS ? limited(card_of_handle(device)) : NULL;                                \
        if (card) {                                                                                                            \
            gs_accounts_sweep(&gs_accounts);                                                                                   \
            struct share share = share_of(card, memory->total, UINT64_MAX);                                                    \
            *memory = (type){__VA_ARGS__};                                                                                     \
        }                                                                                                                      \
        return result;                                                                                                         \
    }
#define SHOWN .total = share.total, .free = share.free, .used = share.used
MEMORY_INFO(nvmlDeviceGetMemoryInfo, nvmlMemory_t, SHOWN)
MEMORY_INFO(nvmlDeviceGetMemoryInfo_v2, nvmlMemory_v2_t, .version = memory->version, SHOWN)

/* Other containers' processes are hidden, and our own have other pids here than those that NVML reports, so each list is empty, as
 * in any container. The driver is asked with room for nobody: it validates the arguments and writes no entry. */
static unsigned int *make_empty(unsigned int *count)
{
    if (count)
        *count = 0;
    return count;
}

static int as_empty(int result, unsigned int *count, int none)
{
    if (result == NVML_ERROR_INSUFFICIENT_SIZE || result == NVML_SUCCESS) {
        make_empty(count);
        return none;
    }
    return result;
}

#define LIST(symbol)                                                                                                           \
    int symbol(nvmlDevice_t device, unsigned int *count, void *list)                                                           \
    {                                                                                                                          \
        return as_empty(DRIVER(symbol)(device, make_empty(count), list), count, NVML_SUCCESS);                                 \
    }

#define LISTS(symbol) LIST(symbol) LIST(symbol##_v2) LIST(symbol##_v3)
LISTS(nvmlDeviceGetComputeRunningProcesses)
LISTS(nvmlDeviceGetGraphicsRunningProcesses)
LISTS(nvmlDeviceGetMPSComputeRunningProcesses)
LIST(nvmlDeviceGetEncoderSessions)
LIST(nvmlDeviceGetFBCSessions)

int nvmlDeviceGetAccountingPids(nvmlDevice_t device, unsigned int *count, unsigned int *pids)
{
    return as_empty(DRIVER(nvmlDeviceGetAccountingPids)(device, make_empty(count), pids), count, NVML_SUCCESS);
}

/* Of a process by its number, which may be a neighbour's. Asked for a number that no process has. */
int nvmlDeviceGetAccountingStats(nvmlDevice_t device, unsigned int pid, void *stats)
{
    (void)pid;
    return DRIVER(nvmlDeviceGetAccountingStats)(device, 0, stats);
}

int nvmlDeviceGetAccountingStats_v2(nvmlDevice_t device, void *stats)
{
    unsigned int *pid = stats, asked = pid ? *pid : 0;
    if (pid)
        *pid = 0;
    int result = DRIVER(nvmlDeviceGetAccountingStats_v2)(device, stats);
    if (pid)
        *pid = asked;
    return result;
}

int nvmlDeviceGetProcessUtilization(nvmlDevice_t device, void *samples, unsigned int *count, unsigned long long since)
{
    int result = DRIVER(nvmlDeviceGetProcessUtilization)(device, samples, make_empty(count), since);
    return as_empty(result, count, NVML_ERROR_NOT_FOUND);
}

/* Both structures start with their version. The count is the second word here, and the third in the function that follows. */
int nvmlDeviceGetProcessesUtilizationInfo(nvmlDevice_t device, void *info)
{
    unsigned int *count = make_empty(info ? (unsigned int *)info + 1 : NULL);
    return as_empty(DRIVER(nvmlDeviceGetProcessesUtilizationInfo)(device, info), count, NVML_ERROR_NOT_FOUND);
}

int nvmlDeviceGetRunningProcessDetailList(nvmlDevice_t device, void *list)
{
    unsigned int *count = make_empty(list ? (unsigned int *)list + 2 : NULL);
    return as_empty(DRIVER(nvmlDeviceGetRunningProcessDetailList)(device, list), count, NVML_SUCCESS);
}
