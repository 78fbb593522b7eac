/* Launches. Where nothing is throttled, they cost the test of one flag. */
#include "hooks/launches.h"

#include "hooks/kernels.h"
#include "hooks/place.h"

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
    THROTTLED(symbol, parameters, call, !gs_may_be_first(function), WATCHED(function, DRIVER(symbol) call), stream,            \
              own_stream, gs_work_key(function, BLOCKS))
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
              (config, function, parameters, extra), !gs_may_be_first(function),                                               \
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

#define MOST_DEVICES 64u

int cuLaunchCooperativeKernelMultiDevice(CUDA_LAUNCH_PARAMS *launches, unsigned int count, unsigned int flags)
{
    struct gs_work works[MOST_DEVICES];
    if (gs_likely(__atomic_load_n(&gs_launch_freely, __ATOMIC_RELAXED)) || !launches || count > MOST_DEVICES)
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
