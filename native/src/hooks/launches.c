/* Launches, and the code that the driver loads for them. Where nothing is throttled, they cost the test of one flag. */
#include "hooks/launches.h"

#include "hooks/place.h"
#include "policy/process_usage.h"
#include "system/at_fork.h"
#include "system/table.h"

/* ---- a kernel's code ---- */

/* Since CUDA 12.2 the driver loads a kernel's code when the kernel is first looked up or launched. Where NVML has a figure for
 * this process, the next measurement includes the code. Elsewhere, the memory that the card loses during that call is charged
 * as code. Since a neighbour may grow at the same moment, that is limited per call and per context. */
#define LARGEST_CODE_BYTES (UINT64_C(64) << 20) /* of one first launch: code, and the local memory that it needs */
#define MOST_CODE_BYTES (UINT64_C(1) << 30)     /* in a context */

/* A cache of those launched last, by a few bits of their address. */
#define PLACE_BITS 12
static CUfunction seen[1 << PLACE_BITS] GS_PER_PROCESS;
static bool watched GS_PER_PROCESS;

static struct gs_table launched GS_TABLE_PER_PROCESS; /* all functions launched so far */
static _Atomic bool measuring GS_PER_PROCESS; /* one thread at a time: otherwise each of two would be charged for both */

static _Thread_local struct {
    struct gs_place place;
    struct gs_snapshot before;
    bool measured;
} first __attribute__((tls_model("initial-exec")));

void gs_watch_kernels(void) { __atomic_store_n(&watched, true, __ATOMIC_RELAXED); }

static void forget(void) { first.measured = false; }
GS_AT_FORK(forget);

static uint32_t place_of(CUfunction function)
{
    return (uint32_t)((gs_key(function) * UINT64_C(0x9e3779b97f4a7c15)) >> (64 - PLACE_BITS));
}

static inline bool may_be_first(CUfunction function)
{
    return gs_unlikely(__atomic_load_n(&watched, __ATOMIC_RELAXED)) &&
           __atomic_load_n(&seen[place_of(function)], __ATOMIC_RELAXED) != function;
}

static bool is_known(CUfunction function)
{
    struct gs_entry entry = {.key = gs_key(function)};
    bool known = !function || gs_table_get(&launched, entry.key, &entry) || !gs_table_put(&launched, &entry);
    __atomic_store_n(&seen[place_of(function)], function, __ATOMIC_RELAXED);
    return known;
}

static void code_may_come(void)
{
    bool nobody = false;
    first.measured = __atomic_load_n(&watched, __ATOMIC_RELAXED) && !gs_nvml_pid_known() &&
                     atomic_compare_exchange_strong(&measuring, &nobody, true);
    if (!first.measured)
        return;
    first.before.known = false;
    first.place = gs_current_place();
    if (first.place.card && first.place.card->index < GPUSLICE_CARDS)
        gs_snapshot(first.place.card, &first.before, NULL);
}

static void first_launch(CUfunction function)
{
    first.measured = false;
    if (!is_known(function))
        code_may_come();
}

/* Handles are aligned, so this differs from the key of the context itself. */
static uint64_t key_of_code(CUcontext context) { return gs_key(context) + 3; }

static void charge_code(void)
{
    struct gs_snapshot after;
    struct gs_card *card = first.place.card;
    gs_snapshot(card, &after, NULL);
    if (!after.known || after.held != first.before.held || after.used <= first.before.used)
        return;
    uint64_t grown = after.used - first.before.used, key = key_of_code(first.place.context);
    if (grown <= LARGEST_CODE_BYTES && gs_piece(key) + grown <= MOST_CODE_BYTES)
        gs_add_piece(card, key, gs_key(first.place.context), (int64_t)grown);
}

static int code_came(int result)
{
    if (!first.measured)
        return result;
    if (first.before.known && result == CUDA_SUCCESS)
        charge_code();
    first.measured = false;
    measuring = false;
    return result;
}

/* Calls that may load code before it is launched. */
#define BRING(symbol, parameters, call)                                                                                        \
    int symbol parameters                                                                                                      \
    {                                                                                                                          \
        code_may_come();                                                                                                       \
        return code_came(DRIVER(symbol) call);                                                                                 \
    }

BRING(cuLibraryGetModule, (CUmodule * module, CUlibrary library), (module, library))
BRING(cuKernelGetFunction, (CUfunction * function, CUkernel kernel), (function, kernel))
BRING(cuFuncLoad, (CUfunction function), (function))
BRING(cuModuleGetFunction, (CUfunction * function, CUmodule module, const char *name), (function, module, name))

/* ---- launches ---- */

/* Wraps the driver's call. */
#define WATCHED(function, call) (gs_likely(!may_be_first(function)) ? (call) : (first_launch(function), code_came(call)))

#define BLOCKS ((uint64_t)grid_x * grid_y * grid_z)

bool gs_launch_freely;

struct gs_work gs_launch_begin(CUstream stream, bool own_stream, uint64_t key)
{
    struct gs_work work = {.stream = {.handle = stream, .thread = gs_own_stream(stream, own_stream)}, .key = key};
    if (!gs_throttles())
        __atomic_store_n(&gs_launch_freely, true, __ATOMIC_RELAXED);
    if (!gs_throttles() || gs_goes_untimed(key))
        return work;
    work.place = gs_stream_place(stream);
    work.stream.context = work.place.context;
    gs_work_begin(&work);
    return work;
}

#define LAUNCH(symbol, own_stream, parameters, call)                                                                           \
    THROTTLED(symbol, parameters, call, !may_be_first(function), WATCHED(function, DRIVER(symbol) call), stream, own_stream,   \
              gs_work_key(function, BLOCKS))
#define KERNEL                                                                                                                 \
    CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,                \
        unsigned block_z, unsigned shared_bytes, CUstream stream, void **parameters
#define AS_CALLED function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes, stream, parameters

LAUNCH(cuLaunchKernel, false, (KERNEL, void **extra), (AS_CALLED, extra))
LAUNCH(cuLaunchKernel_ptsz, true, (KERNEL, void **extra), (AS_CALLED, extra))
LAUNCH(cuLaunchCooperativeKernel, false, (KERNEL), (AS_CALLED))
LAUNCH(cuLaunchCooperativeKernel_ptsz, true, (KERNEL), (AS_CALLED))

static uint64_t key_of(CUfunction function, const CUlaunchConfig *config)
{
    return gs_work_key(function, config ? (uint64_t)config->gridDimX * config->gridDimY * config->gridDimZ : 0);
}

#define LAUNCH_EX(symbol, own_stream)                                                                                          \
    THROTTLED(symbol, (const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra),                    \
              (config, function, parameters, extra), !may_be_first(function),                                                  \
              WATCHED(function, DRIVER(symbol)(config, function, parameters, extra)), config ? config->hStream : NULL,         \
              own_stream, key_of(function, config))

LAUNCH_EX(cuLaunchKernelEx, false)
LAUNCH_EX(cuLaunchKernelEx_ptsz, true)
THROTTLED(cuLaunch, (CUfunction function), (function), true, DRIVER(cuLaunch)(function), NULL, false, gs_work_key(function, 1))
THROTTLED(cuLaunchGrid, (CUfunction function, int width, int height), (function, width, height), true,
          DRIVER(cuLaunchGrid)(function, width, height), NULL, false, gs_work_key(function, (uint64_t)width *(uint64_t)height))
THROTTLED(cuLaunchGridAsync, (CUfunction function, int width, int height, CUstream stream), (function, width, height, stream),
          true, DRIVER(cuLaunchGridAsync)(function, width, height, stream), stream, false,
          gs_work_key(function, (uint64_t)width *(uint64_t)height))

int cuLaunchCooperativeKernelMultiDevice(CUDA_LAUNCH_PARAMS *launches, unsigned int count, unsigned int flags)
{
    struct gs_work works[GS_DEVICES];
    if (gs_likely(__atomic_load_n(&gs_launch_freely, __ATOMIC_RELAXED)) || !launches || count > GS_DEVICES)
        return DRIVER(cuLaunchCooperativeKernelMultiDevice)(launches, count, flags);
    for (unsigned int i = 0; i < count; i++)
        works[i] = gs_launch_begin(launches[i].hStream, false, gs_work_key(launches[i].function, launches[i].gridDimX));
    int result = DRIVER(cuLaunchCooperativeKernelMultiDevice)(launches, count, flags);
    for (unsigned int i = 0; i < count; i++)
        gs_work_end(&works[i], result == CUDA_SUCCESS);
    return result;
}

/* ---- destroying streams ---- */

static void stream_ends(CUstream stream)
{
    if (!stream)
        return;
    gs_pools_stream_ends(stream);
    if (gs_throttles())
        gs_throttle_stream_ends(stream);
}

int cuStreamDestroy(CUstream stream)
{
    stream_ends(stream);
    return DRIVER(cuStreamDestroy)(stream);
}

int cuStreamDestroy_v2(CUstream stream)
{
    stream_ends(stream);
    return DRIVER(cuStreamDestroy_v2)(stream);
}
