#include "policy/cards.h"

#include <string.h>

#include "accounts/in_flight.h"
#include "accounts/slots.h"
#include "system/at_fork.h"
#include "system/text.h"

#define LOOK_EVERY_NS UINT64_C(100000000)

struct gs_accounts gs_accounts;
struct gs_table gs_held GS_TABLE_PER_PROCESS;

static struct gs_card cards[GPUSLICE_CARDS];
/* A card that the limits do not name belongs to others. */
static struct gs_card foreign_card = {.index = GPUSLICE_CARDS};
static uint32_t card_count;
static struct gs_card *device_cards[GS_DEVICES];

/* `generation` changes with the file, and is odd while the file is replaced. */
static const _Atomic uint64_t no_generation;
static struct {
    char path[GS_PATH_ROOM]; /* "" before the start */
    struct gs_limits limits;
    _Atomic uint64_t looked_ns, seen;
    const _Atomic uint64_t *generation;
} followed = {.generation = &no_generation};
static struct gs_lock following GS_PER_PROCESS;

static void forget(void) { gs_accounts_forget(&gs_accounts); }
GS_AT_FORK(forget);

void gs_cards_make(const struct gs_limits *limits)
{
    for (card_count = 0; card_count < limits->count; card_count++) {
        const struct gs_limit *limit = &limits->cards[card_count];
        struct gs_card *card = &cards[card_count];
        *card = (struct gs_card){.index = gs_accounts_card(&gs_accounts, limit->uuid),
                                 .limit_bytes = limit->memory_bytes,
                                 .request_bytes = limit->request_bytes,
                                 .shown_bytes = limit->shown_bytes,
                                 .share = {limit->compute_percent, limit->cap_percent, limit->interactive}};
        memcpy(card->uuid, limit->uuid, sizeof card->uuid);
        gs_accounts_show_limit(&gs_accounts, card->index, limit->memory_bytes, limit->compute_percent);
    }
}

void gs_cards_follow(const char *prefix)
{
    atomic_store(&followed.looked_ns, gs_coarse_ns());
    gs_text_join(followed.path, sizeof followed.path, prefix, "/etc/gpuslice/generation", "");
    const void *generation = gs_map_to_read(followed.path, sizeof *followed.generation);
    if (generation) {
        atomic_store(&followed.seen, UINT64_MAX); /* it may have changed since the limits were read */
        followed.generation = generation;
    }
    gs_text_join(followed.path, sizeof followed.path, prefix, "/etc/gpuslice/limits", "");
}

static void read_again(void)
{
    if (!*followed.path || gs_limits_read(followed.path, &followed.limits) != GS_LIMITS_READ)
        return; /* what was allowed last stays allowed */
    for (uint32_t i = 0; i < followed.limits.count; i++) {
        const struct gs_limit *limit = &followed.limits.cards[i];
        struct gs_card *card = gs_card_of_uuid(limit->uuid);
        if (card == &foreign_card)
            continue;
        card->request_bytes = limit->request_bytes;
        card->shown_bytes = limit->shown_bytes;
        if (card->limit_bytes == limit->memory_bytes)
            continue;
        card->limit_bytes = limit->memory_bytes;
        gs_accounts_show_limit(&gs_accounts, card->index, limit->memory_bytes, limit->compute_percent);
    }
}

/* The agent replaces the file, so that each reading is of one piece. */
void gs_cards_look(uint64_t now)
{
    uint64_t last = atomic_load_explicit(&followed.looked_ns, memory_order_relaxed);
    if (now - last < LOOK_EVERY_NS || !atomic_compare_exchange_strong(&followed.looked_ns, &last, now))
        return;
    GS_GUARD(&following);
    read_again();
}

void gs_cards_look_now(void)
{
    uint64_t now = atomic_load(followed.generation);
    if (gs_likely(now == atomic_load_explicit(&followed.seen, memory_order_acquire) && !(now & 1)))
        return;
    GS_GUARD(&following);
    read_again();
    atomic_store(&followed.seen, now);
}

/* The 16 bytes that a uuid spells, whatever its prefix. */
static bool uuid_bytes(const char *text, unsigned char bytes[16])
{
    int digits = 0;
    memset(bytes, 0, 16);
    for (text += 4; *text; text++) {
        int value = *text >= '0' && *text <= '9'   ? *text - '0'
                    : *text >= 'a' && *text <= 'f' ? *text - 'a' + 10
                    : *text >= 'A' && *text <= 'F' ? *text - 'A' + 10
                                                   : -1;
        if (value < 0 && *text != '-')
            return false;
        if (value >= 0 && digits == 32)
            return false;
        if (value >= 0) {
            bytes[digits / 2] = (unsigned char)(bytes[digits / 2] << 4 | value);
            digits++;
        }
    }
    return digits == 32;
}

static struct gs_card *card_of_bytes(const CUuuid *uuid)
{
    unsigned char bytes[16];
    for (uint32_t i = 0; i < card_count; i++)
        if (uuid_bytes(cards[i].uuid, bytes) && memcmp(bytes, uuid, sizeof bytes) == 0)
            return &cards[i];
    return NULL;
}

struct gs_card *gs_card_of_uuid(const char *uuid)
{
    for (uint32_t i = 0; i < card_count; i++)
        if (strcmp(cards[i].uuid, uuid) == 0)
            return &cards[i];
    return &foreign_card;
}

uint32_t gs_card_count(void) { return card_count; }
struct gs_card *gs_card_at(uint32_t position) { return &cards[position]; }

/* Drivers before 9.2 do not report a uuid; NVML finds it by the PCI bus id. */
static struct gs_card *card_by_bus(CUdevice device)
{
    char text[96];
    nvmlDevice_t handle;
    if (DRIVER(cuDeviceGetPCIBusId)(text, sizeof text, device) != CUDA_SUCCESS)
        return NULL;
    if (!gs_driver_open_nvml() || DRIVER(nvmlInit_v2)() != NVML_SUCCESS ||
        DRIVER(nvmlDeviceGetHandleByPciBusId_v2)(text, &handle) != NVML_SUCCESS ||
        DRIVER(nvmlDeviceGetUUID)(handle, text, sizeof text) != NVML_SUCCESS)
        return NULL;
    return gs_card_of_uuid(text);
}

static struct gs_card *find_device(CUdevice device)
{
    CUuuid uuid;
    struct gs_card *card = NULL;
    bool known = false;
    if (DRIVER(cuDeviceGetUuid_v2)(&uuid, device) == CUDA_SUCCESS) { /* of the MIG instance, if it is one */
        known = true;
        card = card_of_bytes(&uuid);
    }
    if (!card && DRIVER(cuDeviceGetUuid)(&uuid, device) == CUDA_SUCCESS) {
        known = true;
        card = card_of_bytes(&uuid);
    }
    if (card)
        return card;
    return known ? &foreign_card : card_by_bus(device);
}

struct gs_card *gs_card_of_device(CUdevice device)
{
    if (device < 0 || device >= GS_DEVICES)
        return NULL;
    struct gs_card *card = __atomic_load_n(&device_cards[device], __ATOMIC_ACQUIRE);
    if (!card && (card = find_device(device)))
        __atomic_store_n(&device_cards[device], card, __ATOMIC_RELEASE);
    return card;
}

/* On GH200 and GB200 a card's memory is a NUMA node of the machine, too. */
static struct gs_card *card_of_node(int node)
{
    enum { NUMA_CONFIG = 130, NUMA_ID = 131 };
    int is_node, own;
    for (CUdevice device = 0; device < GS_DEVICES; device++) {
        if (DRIVER(cuDeviceGetAttribute)(&is_node, NUMA_CONFIG, device) != CUDA_SUCCESS)
            return NULL; /* there is no further device, or the driver knows no such platform */
        if (is_node == 1 && DRIVER(cuDeviceGetAttribute)(&own, NUMA_ID, device) == CUDA_SUCCESS && own == node)
            return gs_card_of_device(device);
    }
    return NULL;
}

struct gs_card *gs_card_of_location(int type, int id)
{
    return type == CU_MEM_LOCATION_TYPE_DEVICE                   ? gs_card_of_device(id)
           : type == CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN ? gs_card_of_device(id & 0xff)
           : type == CU_MEM_LOCATION_TYPE_HOST_NUMA              ? card_of_node(id)
                                                                 : NULL;
}

/* ---- what they hold ---- */

void gs_recharge(struct gs_card *card, uint64_t before, uint64_t now)
{
    gs_accounts_changed(&gs_accounts, card->index);
    if (now > before)
        gs_accounts_add(&gs_accounts, card->index, now - before);
    else
        gs_accounts_return(&gs_accounts, card->index, before - now);
}

uint64_t gs_used(const struct gs_card *card) { return gs_accounts_used(&gs_accounts, card->index); }
