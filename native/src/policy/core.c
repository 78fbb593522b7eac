#define _GNU_SOURCE
#include "policy/core.h"

#include <string.h>

#include "system/elf.h"
#include "hooks/kernels.h"
#include "policy/driver_overhead.h"
#include "hooks/pools.h"
#include "policy/throttle.h"

#define PATH_ROOM GS_PATH_ROOM
#define DEVICES 128
#define OWN_FOLDER "/usr/lib/gpuslice/"

struct gs_accounts gs_accounts;
struct gs_table gs_held;
bool gs_active, gs_cuda_ready, gs_nvml_ready;

static struct gs_limits limits;
static struct gs_card cards[GPUSLICE_CARDS];
/* A card that the limits do not name is somebody else's. */
static struct gs_card foreign_card = {.index = GPUSLICE_CARDS};
static uint32_t card_count;
static struct gs_lock start_lock;
static bool started;
static struct gs_card *device_cards[DEVICES];
static uint32_t contexts_epoch = 1;

/* ---- starting ---- */

/* Files are found beside the library: <prefix>/usr/lib/gpuslice/… → <prefix>/etc/gpuslice/limits. In a container the
 * prefix is empty. No environment variable has a say. */
static bool own_prefix(char prefix[PATH_ROOM])
{
    if (!gs_elf_own_path(prefix, PATH_ROOM))
        return false;
    char *folder = NULL;
    for (char *at = strstr(prefix, OWN_FOLDER); at; at = strstr(at + 1, OWN_FOLDER))
        folder = at;
    if (folder)
        *folder = 0;
    return folder != NULL;
}

static bool join(char path[PATH_ROOM], const char *prefix, const char *rest)
{
    size_t length = strlen(prefix), more = strlen(rest);
    if (length + more >= PATH_ROOM)
        return false;
    memcpy(path, prefix, length);
    memcpy(path + length, rest, more + 1);
    return true;
}

static enum gs_limits_state read_limits_at(const char *prefix)
{
    char path[PATH_ROOM];
    return join(path, prefix, "/etc/gpuslice/limits") ? gs_limits_read(path, &limits) : GS_LIMITS_CORRUPT;
}

static void open_accounts_at(const char *prefix)
{
    char path[PATH_ROOM];
    if (join(path, prefix, "/var/lib/gpuslice/region"))
        gs_accounts_open(&gs_accounts, path);
}

static void make_cards(void)
{
    for (card_count = 0; card_count < limits.count; card_count++) {
        const struct gs_limit *limit = &limits.cards[card_count];
        struct gs_card *card = &cards[card_count];
        *card = (struct gs_card){.index = gs_accounts_card(&gs_accounts, limit->uuid),
                                 .limit_bytes = limit->memory_bytes,
                                 .share = {limit->share_percent, limit->cap_percent, limit->interactive}};
        memcpy(card->uuid, limit->uuid, sizeof card->uuid);
        gs_accounts_show_limit(&gs_accounts, card->index, limit->memory_bytes, limit->share_percent);
    }
}

/* In glibc pthread_atfork() is linked into whoever calls it and leads to a function of libc's that musl lacks: a library
 * that named it could not be loaded there, and musl ends a program whose preloaded library lacks a symbol. */
static void at_fork_in_child(void (*child)(void))
{
    int (*glibc)(void *, void *, void (*)(void), void *) =
        (int (*)(void *, void *, void (*)(void), void *))gs_elf_function("__register_atfork");
    int (*other)(void *, void *, void (*)(void)) =
        (int (*)(void *, void *, void (*)(void)))gs_elf_function("pthread_atfork");
    if (glibc)
        glibc(NULL, NULL, child, NULL); /* of no library that could be unloaded */
    else if (other)
        other(NULL, NULL, child);
}

/* A limits file that cannot be read leaves no card at all: every allocation is refused. So does a region that cannot
 * be mapped, because then nobody knows what the other processes hold. */
static bool activate(void)
{
    char prefix[PATH_ROOM] = "";
    enum gs_limits_state state = read_limits_at("");
    if (state == GS_LIMITS_ABSENT) {
        if (!own_prefix(prefix) || !*prefix)
            return false;
        state = read_limits_at(prefix);
    }
    if (state == GS_LIMITS_ABSENT)
        return false;
    open_accounts_at(prefix);
    make_cards();
    gs_throttle_start(cards, card_count, prefix);
    at_fork_in_child(gs_forget_everything);
    return true;
}

static bool start_locked(void)
{
    if (!started) {
        if (activate())
            __atomic_store_n(&gs_active, true, __ATOMIC_RELEASE);
        __atomic_store_n(&started, true, __ATOMIC_RELEASE);
    }
    return gs_active;
}

bool gs_start(void)
{
    if (__atomic_load_n(&started, __ATOMIC_ACQUIRE))
        return __atomic_load_n(&gs_active, __ATOMIC_ACQUIRE);
    gs_lock(&start_lock);
    bool active = start_locked();
    gs_unlock(&start_lock);
    return active;
}

bool gs_start_cuda(void)
{
    bool active = gs_start();
    gs_bind_cuda(NULL);
    __atomic_store_n(&gs_cuda_ready, active, __ATOMIC_RELEASE);
    return active;
}

bool gs_start_nvml(void)
{
    bool active = gs_start();
    gs_bind_nvml(NULL);
    __atomic_store_n(&gs_nvml_ready, active, __ATOMIC_RELEASE);
    return active;
}

void gs_forget_everything(void)
{
    start_lock = (struct gs_lock){0};
    gs_accounts_forget(&gs_accounts);
    gs_table_forget(&gs_held);
    gs_forget_pages();
    gs_forget_physical();
    gs_forget_holders();
    gs_forget_graphs();
    gs_forget_imports();
    gs_forget_own();
    gs_forget_kernels();
    gs_pools_forget();
    gs_throttle_forget();
    gs_contexts_changed();
}

/* ---- cards ---- */

/* The 16 bytes a uuid spells, whatever stands before them. */
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

struct gs_card *gs_card_numbered(uint32_t index)
{
    for (uint32_t i = 0; i < card_count; i++)
        if (cards[i].index == index)
            return &cards[i];
    return &foreign_card;
}

uint32_t gs_card_count(void) { return card_count; }
struct gs_card *gs_card_at(uint32_t position) { return &cards[position]; }

/* Drivers before 9.2 tell no uuid: NVML does, by the bus. */
static struct gs_card *card_by_bus(CUdevice device)
{
    char text[96];
    nvmlDevice_t handle;
    if (DRIVER(cuDeviceGetPCIBusId)(text, sizeof text, device) != CUDA_SUCCESS)
        return NULL;
    gs_bind_nvml(NULL);
    if (DRIVER(nvmlInit_v2)() != NVML_SUCCESS ||
        DRIVER(nvmlDeviceGetHandleByPciBusId_v2)(text, &handle) != NVML_SUCCESS ||
        DRIVER(nvmlDeviceGetUUID)(handle, text, sizeof text) != NVML_SUCCESS)
        return NULL;
    return gs_card_of_uuid(text);
}

static struct gs_card *find_device(CUdevice device)
{
    CUuuid uuid;
    struct gs_card *card = NULL;
    bool told = false;
    if (DRIVER(cuDeviceGetUuid_v2)(&uuid, device) == CUDA_SUCCESS) { /* of the MIG instance, if it is one */
        told = true;
        card = card_of_bytes(&uuid);
    }
    if (!card && DRIVER(cuDeviceGetUuid)(&uuid, device) == CUDA_SUCCESS) {
        told = true;
        card = card_of_bytes(&uuid);
    }
    if (card)
        return card;
    return told ? &foreign_card : card_by_bus(device);
}

struct gs_card *gs_card_of_device(CUdevice device)
{
    if (device < 0 || device >= DEVICES)
        return NULL;
    struct gs_card *card = __atomic_load_n(&device_cards[device], __ATOMIC_ACQUIRE);
    if (!card && (card = find_device(device)))
        __atomic_store_n(&device_cards[device], card, __ATOMIC_RELEASE);
    return card;
}

/* ---- where a thread stands ---- */

static _Thread_local struct {
    uint32_t epoch;
    struct gs_place place;
} seen __attribute__((tls_model("initial-exec")));

void gs_contexts_changed(void) { __atomic_add_fetch(&contexts_epoch, 1, __ATOMIC_RELEASE); }

struct gs_place gs_current_place(void)
{
    struct gs_place place = {0};
    uint32_t epoch = __atomic_load_n(&contexts_epoch, __ATOMIC_ACQUIRE);
    if (DRIVER(cuCtxGetCurrent)(&place.context) != CUDA_SUCCESS || !place.context)
        return place;
    if (seen.epoch == epoch && seen.place.context == place.context)
        return seen.place;
    if (DRIVER(cuCtxGetDevice)(&place.device) == CUDA_SUCCESS)
        place.card = gs_card_of_device(place.device);
    if (place.card && !gs_has_context(place.card))
        gs_context_noticed(place.card, place.device, place.context);
    if (place.card) {
        seen.place = place;
        seen.epoch = epoch;
    }
    return place;
}

struct gs_place gs_stream_place(CUstream stream)
{
    CUcontext context, popped;
    struct gs_place here = gs_current_place();
    /* 0, 1 and 2 are the default streams of the current context. */
    if ((uintptr_t)stream <= 2 || DRIVER(cuStreamGetCtx)(stream, &context) != CUDA_SUCCESS || context == here.context)
        return here;
    if (DRIVER(cuCtxPushCurrent_v2)(context) != CUDA_SUCCESS)
        return here;
    here = gs_current_place();
    DRIVER(cuCtxPopCurrent_v2)(&popped);
    return here;
}

/* ---- reserve and settle ---- */

uint64_t gs_round_up(uint64_t bytes, uint64_t step)
{
    uint64_t rest = bytes % step;
    if (!rest)
        return bytes;
    return bytes > UINT64_MAX - step ? UINT64_MAX : bytes - rest + step;
}

bool gs_reserve_quietly(struct gs_card *card, uint64_t bytes)
{
    if (gs_accounts_reserve(&gs_accounts, card->index, bytes, card->limit_bytes))
        return true;
    /* As the driver does before it gives up: take back what pools keep and nobody uses. */
    bool settled = gs_physical_settle_descriptors(), trimmed = gs_pools_trim();
    return (settled || trimmed) && gs_accounts_reserve(&gs_accounts, card->index, bytes, card->limit_bytes);
}

void gs_refuse(struct gs_card *card) { gs_accounts_count_refusal(&gs_accounts, card->index); }

bool gs_reserve(struct gs_card *card, uint64_t bytes)
{
    gs_measure_sometimes(card);
    bool reserved = gs_reserve_quietly(card, bytes);
    if (!reserved)
        gs_refuse(card);
    return reserved;
}

void gs_settle(struct gs_card *card, uint64_t reserved, uint64_t taken)
{
    if (taken > reserved)
        gs_accounts_add(&gs_accounts, card->index, taken - reserved);
    else
        gs_accounts_return(&gs_accounts, card->index, reserved - taken);
}

uint64_t gs_used(const struct gs_card *card) { return gs_accounts_used(&gs_accounts, card->index); }

bool gs_over_limit(const struct gs_card *card) { return gs_used(card) > card->limit_bytes; }
