/* Kernels do nothing but take time. How long, in this order: the first parameter of a kernel whose name contains
 * gpusim_busy_ns; GPUSLICE_SIM_KERNELS by name; GPUSLICE_SIM_KERNEL_US; the card's kernel_ns. */
#include <stdlib.h>
#include <string.h>

#include "driver.h"

#define PARAM_BUFFER ((void *)1)
#define PARAM_END ((void *)0)

static uint64_t first_parameter(void **parameters, void **extra)
{
    uint64_t value = 0;
    for (; !parameters && extra && *extra != PARAM_END; extra += 2)
        if (*extra == PARAM_BUFFER)
            memcpy(&value, extra[1], sizeof value);
    if (parameters && *parameters)
        memcpy(&value, *parameters, sizeof value);
    return value;
}

uint64_t kernel_duration(const struct device *device, const struct function *function, void **parameters, void **extra)
{
    if (function->duration_from_first)
        return first_parameter(parameters, extra);
    return function->duration_ns != SIM_ABSENT64 ? function->duration_ns : card_of(device)->kernel_ns;
}

/* A multiprocessor takes 2,048 threads at a time (1,536 on some, which is near enough here) and 32 blocks. */
uint32_t grid_width(const struct device *device, uint64_t blocks, uint64_t threads)
{
    if (!blocks || !threads || threads > 1024)
        return SIM_WHOLE_CARD;
    uint64_t at_once = 2048 / ((threads + 31) / 32 * 32);
    uint64_t room = (at_once > 32 ? 32 : at_once) * card_of(device)->multiprocessor_count;
    return blocks >= room ? SIM_WHOLE_CARD : (uint32_t)(blocks * SIM_WHOLE_CARD / room);
}

static CUresult launch(CUfunction function, CUstream handle, uint64_t blocks, uint64_t threads, void **parameters, void **extra)
{
    struct stream *stream;
    TRY(stream_of(handle, &stream));
    if (!object_is(function, OBJECT_FUNCTION))
        return CUDA_ERROR_INVALID_HANDLE;
    if (!function->module->records[stream->device->ordinal])
        TRY(module_load(function->module, stream->device));
    uint64_t duration_ns = kernel_duration(stream->device, function, parameters, extra);
    if (stream->capturing)
        return capture_kernel(stream, duration_ns, grid_width(stream->device, blocks, threads));
    sim_count_launch(stream->per_thread ? SIM_LAUNCH_PER_THREAD : SIM_LAUNCH_LEGACY);
    stream_work(stream, duration_ns, duration_ns ? grid_width(stream->device, blocks, threads) : 0);
    return CUDA_SUCCESS;
}

static bool fits(unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz)
{
    return gx && gy && gz && bx && by && bz && (uint64_t)bx * by * bz <= 1024;
}

#define GEOMETRY unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared

EXPORT CUresult cuLaunchKernel(CUfunction function, GEOMETRY, CUstream stream, void **parameters, void **extra)
{
    (void)shared;
    if (!fits(gx, gy, gz, bx, by, bz))
        return CUDA_ERROR_INVALID_VALUE;
    return launch(function, stream, (uint64_t)gx * gy * gz, (uint64_t)bx * by * bz, parameters, extra);
}

EXPORT CUresult cuLaunchKernel_ptsz(CUfunction function, GEOMETRY, CUstream stream, void **parameters, void **extra)
{
    return cuLaunchKernel(function, gx, gy, gz, bx, by, bz, shared, PER_THREAD(stream), parameters, extra);
}

EXPORT CUresult cuLaunchCooperativeKernel(CUfunction function, GEOMETRY, CUstream stream, void **parameters)
{
    return cuLaunchKernel(function, gx, gy, gz, bx, by, bz, shared, stream, parameters, NULL);
}

EXPORT CUresult cuLaunchCooperativeKernel_ptsz(CUfunction function, GEOMETRY, CUstream stream, void **parameters)
{
    return cuLaunchKernel(function, gx, gy, gz, bx, by, bz, shared, PER_THREAD(stream), parameters, NULL);
}

EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra)
{
    if (!config)
        return CUDA_ERROR_INVALID_VALUE;
    return cuLaunchKernel(function, config->grid_x, config->grid_y, config->grid_z, config->block_x, config->block_y,
                          config->block_z, config->shared_bytes, config->stream, parameters, extra);
}

EXPORT CUresult cuLaunchKernelEx_ptsz(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra)
{
    if (!config)
        return CUDA_ERROR_INVALID_VALUE;
    CUlaunchConfig changed = *config;
    changed.stream = PER_THREAD(config->stream);
    return cuLaunchKernelEx(&changed, function, parameters, extra);
}

struct launch_params {
    CUfunction function;
    unsigned gx, gy, gz, bx, by, bz, shared;
    CUstream stream;
    void **parameters;
};

EXPORT CUresult cuLaunchCooperativeKernelMultiDevice(struct launch_params *list, unsigned count, unsigned flags)
{
    (void)flags;
    if (!list || !count || count > device_count)
        return CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i < count; i++)
        TRY(cuLaunchKernel(list[i].function, list[i].gx, list[i].gy, list[i].gz, list[i].bx, list[i].by, list[i].bz,
                           list[i].shared, list[i].stream, list[i].parameters, NULL));
    return CUDA_SUCCESS;
}

/* The interface before CUDA 4: the block's shape and parameters are set on the function first. */
EXPORT CUresult cuLaunch(CUfunction function) { return launch(function, NULL, 1, 1, NULL, NULL); }

EXPORT CUresult cuLaunchGridAsync(CUfunction function, int width, int height, CUstream stream)
{
    if (width <= 0 || height <= 0)
        return CUDA_ERROR_INVALID_VALUE;
    return launch(function, stream, (uint64_t)width * (uint64_t)height, 1, NULL, NULL);
}

EXPORT CUresult cuLaunchGrid(CUfunction function, int width, int height)
{
    return cuLaunchGridAsync(function, width, height, NULL);
}

static CUresult function_known(CUfunction function)
{
    TRY(driver_ready());
    return object_is(function, OBJECT_FUNCTION) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

#define UNUSED __attribute__((unused))
#define FUNCTION_ACCEPTS(name, ...)                                                                                            \
    EXPORT CUresult name(CUfunction function, __VA_ARGS__) { return function_known(function); }
FUNCTION_ACCEPTS(cuFuncSetBlockShape, UNUSED int x, UNUSED int y, UNUSED int z)
FUNCTION_ACCEPTS(cuFuncSetSharedSize, UNUSED unsigned bytes)
FUNCTION_ACCEPTS(cuParamSetSize, UNUSED unsigned bytes)
FUNCTION_ACCEPTS(cuParamSeti, UNUSED int offset, UNUSED unsigned value)
FUNCTION_ACCEPTS(cuParamSetf, UNUSED int offset, UNUSED float value)
FUNCTION_ACCEPTS(cuParamSetv, UNUSED int offset, UNUSED void *value, UNUSED unsigned bytes)
FUNCTION_ACCEPTS(cuFuncSetCacheConfig, UNUSED int config)
FUNCTION_ACCEPTS(cuFuncSetSharedMemConfig, UNUSED int config)
FUNCTION_ACCEPTS(cuFuncSetAttribute, UNUSED int attribute, UNUSED int value)

EXPORT CUresult cuKernelSetAttribute(int attribute, int value, CUkernel kernel, CUdevice device)
{
    (void)device;
    return cuFuncSetAttribute(kernel, attribute, value);
}

EXPORT CUresult cuKernelSetCacheConfig(CUkernel kernel, int config, CUdevice device)
{
    (void)device;
    return cuFuncSetCacheConfig(kernel, config);
}

EXPORT CUresult cuFuncGetAttribute(int *value, int attribute, CUfunction function)
{
    static const int values[] = {1024, 0, 0, 0, 32, 70, 70, 0, 49152, -1, 0, 0, 0, 0, 0, 0};
    TRY(function_known(function));
    if (!value || attribute < 0 || (size_t)attribute >= sizeof values / sizeof *values)
        return CUDA_ERROR_INVALID_VALUE;
    *value = values[attribute];
    return CUDA_SUCCESS;
}

EXPORT CUresult cuKernelGetAttribute(int *value, int attribute, CUkernel kernel, CUdevice device)
{
    (void)device;
    return cuFuncGetAttribute(value, attribute, kernel);
}

/* ---------------------------------------------------------------------------------------- occupancy */

static int blocks_per_multiprocessor(int block_size)
{
    return block_size > 0 && block_size <= 1024 ? 2048 / ((block_size + 31) / 32 * 32) : 0;
}

EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, CUfunction function, int block_size,
                                                                     size_t shared, unsigned flags)
{
    (void)shared, (void)flags;
    TRY(function_known(function));
    if (!blocks || block_size <= 0)
        return CUDA_ERROR_INVALID_VALUE;
    *blocks = blocks_per_multiprocessor(block_size);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int size, size_t shared)
{
    return cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, size, shared, 0);
}

EXPORT CUresult cuOccupancyMaxPotentialBlockSizeWithFlags(int *grid, int *block, CUfunction function, void *shared_of,
                                                          size_t shared, int limit, unsigned flags)
{
    struct context *context;
    (void)shared_of, (void)shared, (void)flags;
    TRY(context_current(&context));
    TRY(function_known(function));
    if (!grid || !block)
        return CUDA_ERROR_INVALID_VALUE;
    *block = limit > 0 && limit < 1024 ? limit : 1024;
    *grid = (int)card_of(context->device)->multiprocessor_count * blocks_per_multiprocessor(*block);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuOccupancyMaxPotentialBlockSize(int *grid, int *block, CUfunction function, void *shared_of, size_t shared,
                                                 int limit)
{
    return cuOccupancyMaxPotentialBlockSizeWithFlags(grid, block, function, shared_of, shared, limit, 0);
}

EXPORT CUresult cuOccupancyAvailableDynamicSMemPerBlock(size_t *bytes, CUfunction function, int blocks, int block_size)
{
    (void)blocks, (void)block_size;
    TRY(function_known(function));
    if (!bytes)
        return CUDA_ERROR_INVALID_VALUE;
    *bytes = 49152;
    return CUDA_SUCCESS;
}
