/* The driver's own use: contexts, modules, heaps. Nobody asks for these bytes, so they are measured: reserved by the
 * last measurement before the call, corrected by a new one after it, and undone if they do not fit. */
#include "own.h"

#include <string.h>

#include "pools.h"

#define LISTED 256
#define LARGEST_CONTEXT_BYTES (UINT64_C(4) << 30) /* more between two readings was a neighbour */
#define UNKNOWN_CONTEXT_BYTES (UINT64_C(256) << 20)
#define DEVICES 64

struct own {
    struct gs_card *card;
    uint64_t charged;
    uint32_t contexts;
    uint32_t host_pid; /* as NVML names this process; 0 unknown */
};

static struct gs_lock birth_lock; /* one context at a time comes to life: else two would measure each other */
static struct own owns[GPUSLICE_CARDS];
static CUcontext primary_contexts[DEVICES];
static struct gs_lock lock;

void gs_forget_own(void)
{
    lock = birth_lock = (struct gs_lock){0};
    memset(owns, 0, sizeof owns);
    memset(primary_contexts, 0, sizeof primary_contexts);
}

/* ---- readings ---- */

struct reading {
    bool known;
    uint64_t device_used; /* by everybody */
    bool listed;          /* this process is in NVML's list */
    uint64_t mine;
    uint32_t count;
    uint32_t pids[LISTED];
    uint64_t bytes[LISTED];
};

static bool open_device(const struct gs_card *card, nvmlDevice_t *device)
{
    static bool ready;
    gs_bind_nvml(NULL);
    if (!__atomic_load_n(&ready, __ATOMIC_ACQUIRE) && DRIVER(nvmlInit_v2)() == NVML_SUCCESS)
        __atomic_store_n(&ready, true, __ATOMIC_RELEASE); /* held for good: the program's own count stays its own */
    return ready && DRIVER(nvmlDeviceGetHandleByUUID)(card->uuid, device) == NVML_SUCCESS;
}

/* Entries of the list's first form are shorter. */
static bool read_list(nvmlDevice_t device, nvmlProcessInfo_t list[LISTED], uint32_t *count)
{
    *count = LISTED;
    if (DRIVER(nvmlDeviceGetComputeRunningProcesses_v3)(device, count, list) == NVML_SUCCESS)
        return true;
    *count = LISTED;
    if (DRIVER(nvmlDeviceGetComputeRunningProcesses_v2)(device, count, list) == NVML_SUCCESS)
        return true;
    *count = 0;
    return false;
}

static void read_processes(nvmlDevice_t device, uint32_t host_pid, struct reading *reading)
{
    nvmlProcessInfo_t list[LISTED];
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

static void read_card(const struct own *own, struct reading *reading)
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

static bool lists(const struct reading *reading, uint32_t pid)
{
    for (uint32_t i = 0; i < reading->count; i++)
        if (reading->pids[i] == pid)
            return true;
    return false;
}

/* In a pid namespace NVML may speak of us by a number we do not know: the only one that is new is ours. */
static void learn_host_pid(struct own *own, const struct reading *before, struct reading *after)
{
    uint32_t found = 0, count = 0;
    for (uint32_t i = 0; i < after->count; i++)
        if (!lists(before, after->pids[i])) {
            found = after->pids[i];
            count++;
        }
    if (after->listed || own->host_pid || count != 1)
        return;
    own->host_pid = found;
    gs_books_set_host_pid(&gs_books, found);
    read_card(own, after);
}

/* ---- charging ---- */

static struct own *own_of(struct gs_card *card)
{
    struct own *own = &owns[card->index];
    own->card = card;
    return own;
}

static void charge(struct own *own, uint64_t bytes)
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

void gs_measure(struct gs_card *card)
{
    struct reading reading;
    uint64_t bytes;
    if (card->index >= GPUSLICE_CARDS)
        return;
    gs_pools_changed();
    gs_lock(&lock);
    struct own *own = own_of(card);
    for (int attempt = 0; attempt < 3; attempt++) {
        uint64_t counted = gs_books_mine(&gs_books, card->index);
        read_card(own, &reading);
        if (measure_own(own, &reading, counted, &bytes)) {
            charge(own, bytes);
            break;
        }
        if (!reading.listed)
            break;
    }
    gs_unlock(&lock);
}

/* ---- contexts ---- */

struct birth {
    struct gs_card *card;
    struct reading before;
    uint64_t reserved, counted, held; /* counted: of this process; held: of the container */
    bool refused;
};

/* What a context took when one was last made in this container; 0 unknown. */
static uint64_t learned(const struct gs_card *card)
{
    struct gpuslice_region *region = gs_books_at(&gs_books).region;
    uint64_t bytes = region && card->index < GPUSLICE_CARDS ? atomic_load(&region->cards[card->index].context_bytes) : 0;
    return bytes <= LARGEST_CONTEXT_BYTES ? bytes : 0;
}

static void learn(const struct gs_card *card, uint64_t bytes)
{
    struct gpuslice_region *region = gs_books_at(&gs_books).region;
    if (bytes && region)
        atomic_store(&region->cards[card->index].context_bytes, bytes);
}

static void begin(struct birth *birth, CUdevice device)
{
    birth->card = gs_card_of_device(device);
    birth->refused = false;
    if (!birth->card)
        return;
    birth->reserved = learned(birth->card);
    birth->refused = birth->card->index >= GPUSLICE_CARDS || !gs_reserve(birth->card, birth->reserved);
    if (birth->refused)
        return;
    gs_lock(&lock);
    birth->counted = gs_books_mine(&gs_books, birth->card->index);
    birth->held = gs_used(birth->card);
    read_card(own_of(birth->card), &birth->before);
    gs_unlock(&lock);
}

static uint64_t by_difference(const struct birth *birth, const struct reading *after)
{
    uint64_t before = birth->before.device_used, now = gs_used(birth->card);
    before += now > birth->held ? now - birth->held : 0; /* what our own container took meanwhile */
    uint64_t grown = after->device_used > before ? after->device_used - before : 0;
    bool plausible = birth->before.known && after->known && grown > 0 && grown <= LARGEST_CONTEXT_BYTES;
    uint64_t expected = birth->reserved ? birth->reserved : UNKNOWN_CONTEXT_BYTES;
    /* A neighbour that grew meanwhile only adds: once known, a context does not get larger. */
    return plausible && (!birth->reserved || grown < birth->reserved) ? grown : expected;
}

/* Several processes came into NVML's list at once, and we do not know which of them is this one. All of them have just
 * made a context; the one that holds least has nothing else. */
static uint64_t least_of_the_new(const struct reading *before, const struct reading *after)
{
    uint64_t least = 0;
    for (uint32_t i = 0; i < after->count; i++)
        if (!lists(before, after->pids[i]) && after->bytes[i] <= LARGEST_CONTEXT_BYTES && (!least || after->bytes[i] < least))
            least = after->bytes[i];
    return least;
}

static uint64_t context_bytes(const struct birth *birth, struct own *own)
{
    struct reading after;
    uint64_t bytes;
    read_card(own, &after);
    learn_host_pid(own, &birth->before, &after);
    /* In the books stand own->charged and the reservation, both of them for what is being measured. */
    if (after.listed && gs_books_mine(&gs_books, own->card->index) == birth->counted) {
        uint64_t asked_for = birth->counted - birth->reserved - own->charged;
        bytes = after.mine > asked_for + own->charged ? after.mine - asked_for - own->charged : 0;
        return bytes;
    }
    bytes = after.listed || own->charged ? 0 : least_of_the_new(&birth->before, &after);
    return bytes ? bytes : by_difference(birth, &after);
}

/* True if what was made fits under the limit. */
static bool finish(struct birth *birth, bool made)
{
    if (!birth->card)
        return true;
    if (!made) {
        gs_settle(birth->card, birth->reserved, 0);
        return true;
    }
    gs_lock(&lock);
    struct own *own = own_of(birth->card);
    uint64_t bytes = context_bytes(birth, own);
    gs_settle(birth->card, birth->reserved, 0);
    charge(own, own->charged + bytes);
    own->contexts++;
    learn(birth->card, bytes);
    gs_unlock(&lock);
    gs_contexts_changed();
    return !gs_over_limit(birth->card);
}

/* A context and all that was in it is gone. */
static void ended(struct gs_card *card, CUcontext context)
{
    if (!card || card->index >= GPUSLICE_CARDS)
        return;
    gs_contexts_changed();
    if (context)
        gs_drop_context(context);
    gs_pools_changed();
    gs_lock(&lock);
    struct own *own = own_of(card);
    uint64_t share = own->contexts ? own->charged / own->contexts : own->charged;
    own->contexts -= own->contexts > 0;
    charge(own, own->contexts ? own->charged - share : 0);
    gs_unlock(&lock);
    if (own->contexts)
        gs_measure(card);
}

static int refuse(struct birth *birth)
{
    gs_refuse(birth->card);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

#define CREATE(symbol, call, undo)                                                                                     \
    do {                                                                                                               \
        struct birth birth = {0};                                                                                      \
        if (!gs_enter_cuda())                                                                                          \
            return DRIVER(symbol) call;                                                                                \
        gs_lock(&birth_lock);                                                                                          \
        begin(&birth, device);                                                                                         \
        int result = birth.refused ? CUDA_ERROR_OUT_OF_MEMORY : DRIVER(symbol) call;                                   \
        if (!birth.refused && !finish(&birth, result == CUDA_SUCCESS)) {                                               \
            undo;                                                                                                      \
            ended(birth.card, NULL);                                                                                   \
            result = refuse(&birth);                                                                                   \
        }                                                                                                              \
        gs_unlock(&birth_lock);                                                                                        \
        return result;                                                                                                 \
    } while (0)

int cuCtxCreate(CUcontext *context, unsigned int flags, CUdevice device)
{
    CREATE(cuCtxCreate, (context, flags, device), DRIVER(cuCtxDestroy_v2)(*context));
}

int cuCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice device)
{
    CREATE(cuCtxCreate_v2, (context, flags, device), DRIVER(cuCtxDestroy_v2)(*context));
}

int cuCtxCreate_v3(CUcontext *context, void *affinity, int count, unsigned int flags, CUdevice device)
{
    CREATE(cuCtxCreate_v3, (context, affinity, count, flags, device), DRIVER(cuCtxDestroy_v2)(*context));
}

int cuCtxCreate_v4(CUcontext *context, void *parameters, unsigned int flags, CUdevice device)
{
    CREATE(cuCtxCreate_v4, (context, parameters, flags, device), DRIVER(cuCtxDestroy_v2)(*context));
}

int cuGreenCtxCreate(CUgreenCtx *context, void *resources, CUdevice device, unsigned int flags)
{
    CREATE(cuGreenCtxCreate, (context, resources, device, flags), DRIVER(cuGreenCtxDestroy)(*context));
}

static struct gs_card *card_of_context(CUcontext context)
{
    CUcontext popped;
    struct gs_card *card = NULL;
    if (context && DRIVER(cuCtxPushCurrent_v2)(context) == CUDA_SUCCESS) {
        card = gs_current_place().card;
        DRIVER(cuCtxPopCurrent_v2)(&popped);
    }
    return card;
}

#define DESTROY(symbol)                                                                                                \
    do {                                                                                                               \
        if (!gs_enter_cuda())                                                                                          \
            return DRIVER(symbol)(context);                                                                            \
        struct gs_card *card = card_of_context(context);                                                               \
        int result = DRIVER(symbol)(context);                                                                          \
        if (result == CUDA_SUCCESS)                                                                                    \
            ended(card, context);                                                                                      \
        return result;                                                                                                 \
    } while (0)

int cuCtxDestroy(CUcontext context) { DESTROY(cuCtxDestroy); }
int cuCtxDestroy_v2(CUcontext context) { DESTROY(cuCtxDestroy_v2); }

/* Destroys with the last reference, which only the driver counts: afterwards it can tell whether the context lives. */
int cuCtxDetach(CUcontext context)
{
    if (!gs_enter_cuda())
        return DRIVER(cuCtxDetach)(context);
    struct gs_card *card = card_of_context(context);
    int result = DRIVER(cuCtxDetach)(context);
    if (result == CUDA_SUCCESS && !card_of_context(context))
        ended(card, context);
    return result;
}

int cuGreenCtxDestroy(CUgreenCtx context)
{
    int result = (gs_enter_cuda(), DRIVER(cuGreenCtxDestroy)(context));
    for (uint32_t i = 0; result == CUDA_SUCCESS && i < GPUSLICE_CARDS; i++)
        if (owns[i].card)
            gs_measure(owns[i].card);
    return result;
}

/* ---- primary contexts: made by whoever asks first ---- */

static bool is_active(CUdevice device)
{
    unsigned int flags;
    int active = 0;
    return DRIVER(cuDevicePrimaryCtxGetState)(device, &flags, &active) == CUDA_SUCCESS && active;
}

static void remember_primary(CUdevice device, CUcontext context)
{
    if (device >= 0 && device < DEVICES)
        __atomic_store_n(&primary_contexts[device], context, __ATOMIC_RELEASE);
}

static int retain_first(CUcontext *context, CUdevice device)
{
    struct birth birth = {0};
    begin(&birth, device);
    if (birth.refused)
        return CUDA_ERROR_OUT_OF_MEMORY;
    int result = DRIVER(cuDevicePrimaryCtxRetain)(context, device);
    if (result == CUDA_SUCCESS)
        remember_primary(device, *context);
    if (finish(&birth, result == CUDA_SUCCESS))
        return result;
    if (gs_driver_has(GS_cuDevicePrimaryCtxRelease_v2))
        DRIVER(cuDevicePrimaryCtxRelease_v2)(device);
    else
        DRIVER(cuDevicePrimaryCtxRelease)(device);
    ended(birth.card, *context);
    return refuse(&birth);
}

int cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    if (!gs_enter_cuda() || is_active(device))
        return DRIVER(cuDevicePrimaryCtxRetain)(context, device);
    gs_lock(&birth_lock);
    int result = is_active(device) ? DRIVER(cuDevicePrimaryCtxRetain)(context, device) : retain_first(context, device);
    gs_unlock(&birth_lock);
    return result;
}

static void primary_ended(CUdevice device)
{
    if (device >= 0 && device < DEVICES && !is_active(device)) {
        CUcontext context = __atomic_exchange_n(&primary_contexts[device], NULL, __ATOMIC_ACQ_REL);
        if (context)
            ended(gs_card_of_device(device), context);
    }
}

#define END_PRIMARY(symbol)                                                                                            \
    do {                                                                                                               \
        bool active = gs_enter_cuda();                                                                                 \
        int result = DRIVER(symbol)(device);                                                                           \
        if (active && result == CUDA_SUCCESS)                                                                          \
            primary_ended(device);                                                                                     \
        return result;                                                                                                 \
    } while (0)

int cuDevicePrimaryCtxRelease(CUdevice device) { END_PRIMARY(cuDevicePrimaryCtxRelease); }
int cuDevicePrimaryCtxRelease_v2(CUdevice device) { END_PRIMARY(cuDevicePrimaryCtxRelease_v2); }
int cuDevicePrimaryCtxReset(CUdevice device) { END_PRIMARY(cuDevicePrimaryCtxReset); }
int cuDevicePrimaryCtxReset_v2(CUdevice device) { END_PRIMARY(cuDevicePrimaryCtxReset_v2); }

/* ---- modules and heaps: known only once they are there ---- */

#define LOAD(symbol, call, undo)                                                                                       \
    do {                                                                                                               \
        bool active = gs_enter_cuda();                                                                                 \
        struct gs_card *card = active ? gs_current_place().card : NULL;                                                \
        int result = DRIVER(symbol) call;                                                                              \
        if (!card || result != CUDA_SUCCESS)                                                                           \
            return result;                                                                                             \
        gs_measure(card);                                                                                              \
        if (!gs_over_limit(card))                                                                                      \
            return result;                                                                                             \
        undo;                                                                                                          \
        gs_measure(card);                                                                                              \
        gs_refuse(card);                                                                                               \
        return CUDA_ERROR_OUT_OF_MEMORY;                                                                               \
    } while (0)

int cuModuleLoad(CUmodule *module, const char *path)
{
    LOAD(cuModuleLoad, (module, path), DRIVER(cuModuleUnload)(*module));
}

int cuModuleLoadData(CUmodule *module, const void *image)
{
    LOAD(cuModuleLoadData, (module, image), DRIVER(cuModuleUnload)(*module));
}

int cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int count, int *options, void **values)
{
    LOAD(cuModuleLoadDataEx, (module, image, count, options, values), DRIVER(cuModuleUnload)(*module));
}

int cuModuleLoadFatBinary(CUmodule *module, const void *image)
{
    LOAD(cuModuleLoadFatBinary, (module, image), DRIVER(cuModuleUnload)(*module));
}

int cuLibraryLoadData(CUlibrary *library, const void *code, void *jit, void **jit_values, unsigned int jit_count,
                      void *options, void **values, unsigned int count)
{
    LOAD(cuLibraryLoadData, (library, code, jit, jit_values, jit_count, options, values, count),
         DRIVER(cuLibraryUnload)(*library));
}

int cuLibraryLoadFromFile(CUlibrary *library, const char *path, void *jit, void **jit_values, unsigned int jit_count,
                          void *options, void **values, unsigned int count)
{
    LOAD(cuLibraryLoadFromFile, (library, path, jit, jit_values, jit_count, options, values, count),
         DRIVER(cuLibraryUnload)(*library));
}

int cuCtxSetLimit(int limit, size_t value)
{
    /* What a heap grew by cannot be taken back here; the next allocation pays for it. */
    LOAD(cuCtxSetLimit, (limit, value), (void)0);
}

#define UNLOAD(symbol, handle)                                                                                         \
    do {                                                                                                               \
        bool active = gs_enter_cuda();                                                                                 \
        struct gs_card *card = active ? gs_current_place().card : NULL;                                                \
        int result = DRIVER(symbol)(handle);                                                                           \
        if (card && result == CUDA_SUCCESS)                                                                            \
            gs_measure(card);                                                                                          \
        return result;                                                                                                 \
    } while (0)

int cuModuleUnload(CUmodule module) { UNLOAD(cuModuleUnload, module); }
int cuLibraryUnload(CUlibrary library) { UNLOAD(cuLibraryUnload, library); }
