/* Launches. Where nothing is throttled, they cost the test of one flag. */
#include "hooks/launches.h"

#include "hooks/kernels.h"
#include "hooks/place.h"

#define BLOCKS ((uint64_t)grid_x * grid_y * grid_z)

bool gs_launch_freely;

struct gs_work gs_launch_begin(CUstream stream, bool own_stream, uint64_t key)
{
    struct gs_work work = {.stream = {.handle = stream, .thread = gs_own_stream(stream, own_stream)}, .key = key};
    if (!gs_throttles()) {
        __atomic_store_n(&gs_launch_freely, true, __ATOMIC_RELAXED);
        return work;
    }
    work.place = gs_stream_place(stream);
    work.stream.context = work.place.context;
    gs_work_begin(&work);
    return work;
}

static uint64_t key_of(CUfunction function, const CUlaunchConfig *config)
{
    return gs_work_key(function, config ? (uint64_t)config->gridDimX * config->gridDimY * config->gridDimZ : 0);
}

int cuLaunchKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z, unsigned int block_x,
                   unsigned int block_y, unsigned int block_z, unsigned int shared_bytes, CUstream stream, void **parameters,
                   void **extra)
{
    THROTTLED(WATCHED(function, DRIVER(cuLaunchKernel)(function, grid_x, grid_y, grid_z, block_x, block_y, block_z,
                                                       shared_bytes, stream, parameters, extra)),
              stream, false, gs_work_key(function, BLOCKS));
}

int cuLaunchKernel_ptsz(CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                        unsigned int block_x, unsigned int block_y, unsigned int block_z, unsigned int shared_bytes,
                        CUstream stream, void **parameters, void **extra)
{
    THROTTLED(WATCHED(function, DRIVER(cuLaunchKernel_ptsz)(function, grid_x, grid_y, grid_z, block_x, block_y, block_z,
                                                            shared_bytes, stream, parameters, extra)),
              stream, true, gs_work_key(function, BLOCKS));
}

int cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra)
{
    CUstream stream = config ? config->hStream : NULL;
    THROTTLED(WATCHED(function, DRIVER(cuLaunchKernelEx)(config, function, parameters, extra)), stream, false,
              key_of(function, config));
}

int cuLaunchKernelEx_ptsz(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra)
{
    CUstream stream = config ? config->hStream : NULL;
    THROTTLED(WATCHED(function, DRIVER(cuLaunchKernelEx_ptsz)(config, function, parameters, extra)), stream, true,
              key_of(function, config));
}

int cuLaunchCooperativeKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                              unsigned int block_x, unsigned int block_y, unsigned int block_z, unsigned int shared_bytes,
                              CUstream stream, void **parameters)
{
    THROTTLED(WATCHED(function, DRIVER(cuLaunchCooperativeKernel)(function, grid_x, grid_y, grid_z, block_x, block_y, block_z,
                                                                  shared_bytes, stream, parameters)),
              stream, false, gs_work_key(function, BLOCKS));
}

int cuLaunchCooperativeKernel_ptsz(CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                                   unsigned int block_x, unsigned int block_y, unsigned int block_z, unsigned int shared_bytes,
                                   CUstream stream, void **parameters)
{
    THROTTLED(WATCHED(function, DRIVER(cuLaunchCooperativeKernel_ptsz)(function, grid_x, grid_y, grid_z, block_x, block_y,
                                                                       block_z, shared_bytes, stream, parameters)),
              stream, true, gs_work_key(function, BLOCKS));
}

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

int cuLaunch(CUfunction function) { THROTTLED(DRIVER(cuLaunch)(function), NULL, false, gs_work_key(function, 1)); }

int cuLaunchGrid(CUfunction function, int width, int height)
{
    THROTTLED(DRIVER(cuLaunchGrid)(function, width, height), NULL, false,
              gs_work_key(function, (uint64_t)width * (uint64_t)height));
}

int cuLaunchGridAsync(CUfunction function, int width, int height, CUstream stream)
{
    THROTTLED(DRIVER(cuLaunchGridAsync)(function, width, height, stream), stream, false,
              gs_work_key(function, (uint64_t)width * (uint64_t)height));
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
