/* Contexts. Before the call, the size of the last measured context is reserved; after it, the new context is measured, and
 * destroyed again if it does not fit. */
#include "hooks/launches.h"
#include "hooks/place.h"
#include "policy/pool_accounts.h"
#include "policy/process_usage.h"
#include "policy/reserve.h"
#include "policy/throttle.h"
#include "system/at_fork.h"

#define LARGEST_CONTEXT_BYTES (UINT64_C(4) << 30) /* more than this between two readings is a neighbour's */
#define PROCESSOR_BYTES (UINT64_C(4) << 20)       /* of a context per multiprocessor, rounded up: measured from T4 to H100 */
#define FEW_PROCESSORS 64
enum { MULTIPROCESSOR_COUNT = 16 };

/* Contexts are created one at a time on a card: otherwise each of two would be measured with the other. */
static struct gs_lock creation_locks[GPUSLICE_CARDS + 1] GS_PER_PROCESS;
static CUcontext primary_contexts[GS_DEVICES] GS_PER_PROCESS;
static struct gs_table greens GS_TABLE_PER_PROCESS; /* the CUcontext of a green context → its device plus one */
/* A tool that is notified of a new context during its creation may call us. That call must not take the lock again. */
static _Thread_local bool is_creating __attribute__((tls_model("initial-exec")));

static struct gs_lock *begin_creation(CUdevice device)
{
    const struct gs_card *card = gs_card_of_device(device);
    struct gs_lock *lock = &creation_locks[card ? card->index : GPUSLICE_CARDS];
    gs_lock(lock);
    gs_locks--; /* a creation lock (system/os.h) */
    is_creating = true;
    return lock;
}

static void end_creation(struct gs_lock *lock)
{
    is_creating = false;
    gs_locks++;
    gs_unlock(lock);
}

static void forget(void) { is_creating = false; }
GS_AT_FORK(forget);

struct creation {
    struct gs_card *card;
    CUdevice device;
    struct gs_snapshot before;
    struct gs_processes listed; /* before */
    uint64_t reserved, counted; /* counted: all that this process held, with the reservation */
    bool refused;
    bool exact; /* NVML's figure and the account agree */
    bool green; /* a part of a context, of unknown size */
};

/* The size of the last context created in this container; 0 if unknown. */
static uint64_t learned(const struct gs_card *card)
{
    struct gpuslice_card *entry = gs_region_card(card);
    uint64_t bytes = entry ? atomic_load(&entry->context_bytes) : 0;
    return bytes <= LARGEST_CONTEXT_BYTES ? bytes : 0;
}

/* The size to assume for a context that cannot be measured. */
static uint64_t expected(const struct gs_card *card, CUdevice device)
{
    int processors = FEW_PROCESSORS;
    uint64_t known = learned(card);
    if (!known && DRIVER(cuDeviceGetAttribute)(&processors, MULTIPROCESSOR_COUNT, device) != CUDA_SUCCESS)
        processors = FEW_PROCESSORS;
    return known ? known : (uint64_t)processors * PROCESSOR_BYTES;
}

static void begin(struct creation *creation, CUdevice device, bool green)
{
    creation->card = gs_card_of_device(device);
    creation->device = device;
    creation->refused = false;
    creation->green = green;
    if (!creation->card)
        return;
    creation->reserved = green ? 0 : learned(creation->card);
    creation->refused = creation->card->index >= GPUSLICE_CARDS || !gs_reserve(creation->card, creation->reserved);
    if (creation->refused)
        return;
    creation->counted = gs_accounts_mine(&gs_accounts, creation->card->index);
    gs_snapshot(creation->card, &creation->before, &creation->listed);
}

static uint64_t by_difference(const struct creation *creation, const struct gs_snapshot *after)
{
    int64_t grown = gs_grown(&creation->before, after);
    if (creation->green)
        return grown > 0 ? (uint64_t)grown : 0;
    bool plausible = grown > 0 && (uint64_t)grown <= LARGEST_CONTEXT_BYTES;
    /* A neighbour that grew meanwhile only adds to the difference, so a known size is never replaced by a larger one. */
    bool believed = plausible && (!creation->reserved || (uint64_t)grown < creation->reserved);
    return believed ? (uint64_t)grown : expected(creation->card, creation->device);
}

/* For when several processes have appeared in NVML's list at once and we do not know which of them is this one. All of them
 * have just created a context, and the one that holds the least has nothing but its context. */
static uint64_t least_of_the_new(const struct gs_processes *before, const struct gs_processes *after)
{
    uint64_t least = 0;
    for (uint32_t i = 0; i < after->count; i++)
        if (!gs_lists(before, after->pids[i]) && after->bytes[i] && after->bytes[i] <= LARGEST_CONTEXT_BYTES &&
            (!least || after->bytes[i] < least))
            least = after->bytes[i];
    return least;
}

static uint64_t context_bytes(struct creation *creation)
{
    struct gs_card *card = creation->card;
    struct gs_processes listed;
    struct gs_snapshot after;
    gs_snapshot(card, &after, &listed);
    if (!gs_nvml_pid_known() && !gs_has_context(card) && creation->before.known)
        after.mine = gs_learn_nvml_pid(&creation->listed, &listed);
    if (!gs_nvml_pid_known())
        gs_watch_kernels();
    if (creation->before.mine && after.mine > creation->before.mine)
        return after.mine - creation->before.mine;
    /* The account includes what is charged for the driver's own use and the reservation, and both are for what is measured here. */
    if (after.mine && gs_accounts_mine(&gs_accounts, card->index) == creation->counted) {
        uint64_t other = creation->counted - creation->reserved;
        creation->exact = after.mine >= other;
        return after.mine > other ? after.mine - other : 0;
    }
    uint64_t bytes = after.mine || gs_own_bytes(card) ? 0 : least_of_the_new(&creation->listed, &listed);
    return bytes ? bytes : by_difference(creation, &after);
}

/* True if the new context fits under the limit. `key` is the handle by which it will be destroyed. */
static bool finish(struct creation *creation, bool made, const void *key)
{
    if (!creation->card)
        return true;
    if (!made) {
        gs_settle(creation->card, creation->reserved, 0);
        return true;
    }
    uint64_t bytes = context_bytes(creation);
    gs_settle(creation->card, creation->reserved, 0);
    gs_context_made(creation->card, gs_key(key), bytes);
    if (!creation->exact)
        gs_measure(creation->card); /* excludes what other threads allocated meanwhile */
    gs_throttle_meet(creation->card);
    if (!creation->green && bytes && gs_region_card(creation->card))
        atomic_store(&gs_region_card(creation->card)->context_bytes, bytes);
    gs_contexts_changed();
    return !gs_over_limit(creation->card);
}

/* A context is gone, and with it, if `context` is given, everything that was allocated in it. True if this process has other
 * contexts on the card. */
static bool is_ended(struct gs_card *card, CUcontext context, const void *key)
{
    if (!card || card->index >= GPUSLICE_CARDS)
        return false;
    gs_contexts_changed();
    if (context)
        gs_drop_context(context);
    gs_pools_changed();
    return !gs_context_ended(card, gs_key(key), gs_key(context));
}

static void ended(struct gs_card *card, CUcontext context, const void *key)
{
    if (is_ended(card, context, key))
        gs_measure(card);
}

static int refuse(struct creation *creation)
{
    gs_refuse(creation->card);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

/* A function that creates a context, by its parameters and as it is called. */
#define CREATE(symbol, parameters, call, green, undo)                                                                          \
    int symbol parameters                                                                                                      \
    {                                                                                                                          \
        struct creation creation = {0};                                                                                        \
        if (is_creating)                                                                                                       \
            return DRIVER(symbol) call;                                                                                        \
        struct gs_lock *creations = begin_creation(device);                                                                    \
        begin(&creation, device, green);                                                                                       \
        int result = creation.refused ? CUDA_ERROR_OUT_OF_MEMORY : DRIVER(symbol) call;                                        \
        if (!creation.refused && !finish(&creation, result == CUDA_SUCCESS, context ? *context : NULL)) {                      \
            DRIVER(undo)(*context);                                                                                            \
            ended(creation.card, NULL, *context);                                                                              \
            result = refuse(&creation);                                                                                        \
        }                                                                                                                      \
        end_creation(creations);                                                                                               \
        return result;                                                                                                         \
    }
#define CREATE_CONTEXT(symbol, parameters, call) CREATE(symbol, parameters, call, false, cuCtxDestroy_v2)

CREATE_CONTEXT(cuCtxCreate, (CUcontext * context, unsigned flags, CUdevice device), (context, flags, device))
CREATE_CONTEXT(cuCtxCreate_v2, (CUcontext * context, unsigned flags, CUdevice device), (context, flags, device))
CREATE_CONTEXT(cuCtxCreate_v3, (CUcontext * context, void *affinity, int count, unsigned flags, CUdevice device),
               (context, affinity, count, flags, device))
CREATE_CONTEXT(cuCtxCreate_v4, (CUcontext * context, void *parameters, unsigned flags, CUdevice device),
               (context, parameters, flags, device))
CREATE(cuGreenCtxCreate, (CUgreenCtx * context, void *resources, CUdevice device, unsigned flags),
       (context, resources, device, flags), true, cuGreenCtxDestroy)
/* Of headers beside cuda.h */
CREATE_CONTEXT(cuGLCtxCreate, (CUcontext * context, unsigned flags, CUdevice device), (context, flags, device))
CREATE_CONTEXT(cuGLCtxCreate_v2, (CUcontext * context, unsigned flags, CUdevice device), (context, flags, device))
CREATE_CONTEXT(cuVDPAUCtxCreate, (CUcontext * context, unsigned flags, CUdevice device, uint32_t display, void *ask_display),
               (context, flags, device, display, ask_display))
CREATE_CONTEXT(cuVDPAUCtxCreate_v2, (CUcontext * context, unsigned flags, CUdevice device, uint32_t display, void *ask_display),
               (context, flags, device, display, ask_display))

/* A green context is a subset of the card's multiprocessors on top of the primary context. Memory that is allocated while it
 * is current belongs to the primary context and is freed with that. */
int cuCtxFromGreenCtx(CUcontext *context, CUgreenCtx green)
{
    CUdevice device;
    CUcontext popped;
    int result = DRIVER(cuCtxFromGreenCtx)(context, green);
    if (result != CUDA_SUCCESS || DRIVER(cuCtxPushCurrent_v2)(*context) != CUDA_SUCCESS)
        return result;
    if (DRIVER(cuCtxGetDevice)(&device) == CUDA_SUCCESS)
        gs_table_put(&greens, &(struct gs_entry){.key = gs_key(*context), .owner = (uint64_t)device + 1});
    DRIVER(cuCtxPopCurrent_v2)(&popped);
    return result;
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

/* A reference less: cuCtxDetach destroys the context with the last. Only the driver counts them, so it is asked afterwards whether the
 * context still exists. */
#define DESTROY(symbol, is_gone)                                                                                               \
    int symbol(CUcontext context)                                                                                              \
    {                                                                                                                          \
        struct gs_card *card = card_of_context(context);                                                                       \
        gs_pools_stream_ends(NULL);                                                                                            \
        gs_releasing_begins();                                                                                                 \
        gs_throttle_context_ends(context);                                                                                     \
        int result = DRIVER(symbol)(context);                                                                                  \
        bool gone = result == CUDA_SUCCESS && (is_gone);                                                                       \
        gs_throttle_context_ended(context, gone);                                                                              \
        bool others = gone && is_ended(card, context, context);                                                                \
        gs_releasing_ends();                                                                                                   \
        if (others)                                                                                                            \
            gs_measure(card);                                                                                                  \
        return result;                                                                                                         \
    }

DESTROY(cuCtxDestroy, true)
DESTROY(cuCtxDestroy_v2, true)
DESTROY(cuCtxDetach, !card_of_context(context))

int cuGreenCtxDestroy(CUgreenCtx green)
{
    CUcontext context = NULL;
    struct gs_card *card = NULL;
    if (DRIVER(cuCtxFromGreenCtx)(&context, green) == CUDA_SUCCESS)
        card = card_of_context(context);
    if (context)
        gs_throttle_context_ends(context);
    int result = DRIVER(cuGreenCtxDestroy)(green);
    if (context)
        gs_throttle_context_ended(context, result == CUDA_SUCCESS);
    if (result == CUDA_SUCCESS)
        ended(card, NULL, green);
    return result;
}

/* ---- primary contexts: created by the first call that retains them ---- */

static bool is_active(CUdevice device)
{
    unsigned int flags;
    int active = 0;
    return DRIVER(cuDevicePrimaryCtxGetState)(device, &flags, &active) == CUDA_SUCCESS && active;
}

static void remember_primary(CUdevice device, CUcontext context)
{
    if (device >= 0 && device < GS_DEVICES)
        __atomic_store_n(&primary_contexts[device], context, __ATOMIC_RELEASE);
}

static int retain_first(CUcontext *context, CUdevice device)
{
    struct creation creation = {0};
    begin(&creation, device, false);
    if (creation.refused)
        return CUDA_ERROR_OUT_OF_MEMORY;
    int result = DRIVER(cuDevicePrimaryCtxRetain)(context, device);
    if (result == CUDA_SUCCESS)
        remember_primary(device, *context);
    if (finish(&creation, result == CUDA_SUCCESS, context ? *context : NULL))
        return result;
    if (gs_driver_has(GS_cuDevicePrimaryCtxRelease_v2))
        DRIVER(cuDevicePrimaryCtxRelease_v2)(device);
    else
        DRIVER(cuDevicePrimaryCtxRelease)(device);
    ended(creation.card, *context, *context);
    return refuse(&creation);
}

int cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    if (is_creating || is_active(device))
        return DRIVER(cuDevicePrimaryCtxRetain)(context, device);
    struct gs_lock *creations = begin_creation(device);
    int result = is_active(device) ? DRIVER(cuDevicePrimaryCtxRetain)(context, device) : retain_first(context, device);
    end_creation(creations);
    return result;
}

/* The CUDA runtime and graphics libraries can create contexts through private functions of the driver, which we do not
 * intercept. Such a context is noticed when it is first used, and can be counted but not refused. */
static void take_in(struct gs_card *card, CUdevice device, CUcontext context)
{
    if (is_active(device))
        remember_primary(device, context);
    gs_context_made(card, gs_key(context), 0);
    gs_throttle_meet(card);
    gs_assume_nvml_pid(card);
    if (gs_measure(card))
        return;
    gs_watch_kernels();
    gs_add_piece(card, gs_key(context), 0, (int64_t)expected(card, device));
}

/* A context may still be current after it was reset. */
static bool is_alive(void)
{
    size_t free_bytes, total;
    GS_RELAX_CAPTURE;
    return DRIVER(cuMemGetInfo_v2)(&free_bytes, &total) == CUDA_SUCCESS;
}

/* Adds to the accounts a current context that was created without a call that we intercept. */
static void noticed(struct gs_card *card, CUdevice device, CUcontext context)
{
    if (is_creating || !is_alive())
        return;
    struct gs_lock *creations = begin_creation(device);
    if (!gs_has_context(card))
        take_in(card, device, context);
    end_creation(creations);
}
GS_ON_CONTEXT(noticed);

/* A primary context ends, and its green ones with it: first all that is to come, then all that has gone, if they have. */
struct primary_end {
    uint64_t owner; /* in the table of green contexts */
    bool over, gone;
};

static bool end_green(struct gs_entry *green, void *context)
{
    const struct primary_end *end = context;
    CUcontext of = (CUcontext)(uintptr_t)green->key;
    if (green->owner != end->owner)
        return false;
    end->over ? gs_throttle_context_ended(of, end->gone) : gs_throttle_context_ends(of);
    if (end->gone)
        gs_drop_context(of);
    return end->gone;
}

static CUcontext primary_ends(CUdevice device)
{
    struct primary_end end = {.owner = (uint64_t)device + 1};
    CUcontext context =
        device >= 0 && device < GS_DEVICES ? __atomic_load_n(&primary_contexts[device], __ATOMIC_ACQUIRE) : NULL;
    gs_table_sift(&greens, end_green, &end);
    gs_throttle_context_ends(context);
    return context;
}

/* True if the device's primary context no longer exists. */
static bool primary_ended(CUdevice device, CUcontext context, int result)
{
    struct primary_end end = {(uint64_t)device + 1, true, result == CUDA_SUCCESS && context && !is_active(device)};
    gs_table_sift(&greens, end_green, &end);
    gs_throttle_context_ended(context, end.gone);
    return end.gone &&
           __atomic_compare_exchange_n(&primary_contexts[device], &context, NULL, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
}

#define END_PRIMARY(symbol)                                                                                                    \
    int symbol(CUdevice device)                                                                                                \
    {                                                                                                                          \
        gs_pools_stream_ends(NULL);                                                                                            \
        gs_releasing_begins();                                                                                                 \
        CUcontext context = primary_ends(device);                                                                              \
        int result = DRIVER(symbol)(device);                                                                                   \
        bool others = primary_ended(device, context, result) && is_ended(gs_card_of_device(device), context, context);         \
        gs_releasing_ends();                                                                                                   \
        if (others)                                                                                                            \
            gs_measure(gs_card_of_device(device));                                                                             \
        return result;                                                                                                         \
    }

END_PRIMARY(cuDevicePrimaryCtxRelease)
END_PRIMARY(cuDevicePrimaryCtxRelease_v2)
END_PRIMARY(cuDevicePrimaryCtxReset)
END_PRIMARY(cuDevicePrimaryCtxReset_v2)
