/* A small CUDA runtime for programs that nvcc compiles with -cudart none. NVIDIA's own static runtime verifies that the
 * driver is NVIDIA's and refuses a simulated one; this one reaches the driver in the same way (dlopen, dlsym of
 * cuGetProcAddress_v2, every entry point by name, version and stream flag) and serves the part of the interface that
 * small programs use. Compiled with -DCUDART_PER_THREAD it asks for per-thread streams, as nvcc's option
 * --default-stream per-thread makes the real one do.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../libcuda/cuda_abi.h"

#define VERSION 12000
#ifdef CUDART_PER_THREAD
#define FLAGS CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM
#else
#define FLAGS CU_GET_PROC_ADDRESS_LEGACY_STREAM
#endif

typedef int cudaError_t;
enum { MEMORY_ALLOCATION = 2, INVALID_VALUE = 1, NO_DEVICE = 100, INSUFFICIENT_DRIVER = 35, UNKNOWN = 999 };

typedef struct {
    unsigned x, y, z;
} dim3;

/* ENTRY(name, parameters): what is asked of the driver. */
#define ENTRIES                                                                                                                \
    ENTRY(cuInit, (unsigned))                                                                                                  \
    ENTRY(cuDriverGetVersion, (int *))                                                                                         \
    ENTRY(cuDeviceGetCount, (int *))                                                                                           \
    ENTRY(cuDeviceTotalMem, (size_t *, CUdevice))                                                                              \
    ENTRY(cuDevicePrimaryCtxRetain, (CUcontext *, CUdevice))                                                                   \
    ENTRY(cuDevicePrimaryCtxReset, (CUdevice))                                                                                 \
    ENTRY(cuCtxSetCurrent, (CUcontext))                                                                                        \
    ENTRY(cuCtxSynchronize, (void))                                                                                            \
    ENTRY(cuMemAlloc, (CUdeviceptr *, size_t))                                                                                 \
    ENTRY(cuMemAllocManaged, (CUdeviceptr *, size_t, unsigned))                                                                \
    ENTRY(cuMemAllocAsync, (CUdeviceptr *, size_t, CUstream))                                                                  \
    ENTRY(cuMemFree, (CUdeviceptr))                                                                                            \
    ENTRY(cuMemFreeAsync, (CUdeviceptr, CUstream))                                                                             \
    ENTRY(cuMemGetInfo, (size_t *, size_t *))                                                                                  \
    ENTRY(cuMemcpy, (CUdeviceptr, CUdeviceptr, size_t))                                                                        \
    ENTRY(cuMemcpyAsync, (CUdeviceptr, CUdeviceptr, size_t, CUstream))                                                         \
    ENTRY(cuMemsetD8, (CUdeviceptr, unsigned char, size_t))                                                                    \
    ENTRY(cuStreamCreate, (CUstream *, unsigned))                                                                              \
    ENTRY(cuStreamDestroy, (CUstream))                                                                                         \
    ENTRY(cuStreamSynchronize, (CUstream))                                                                                     \
    ENTRY(cuModuleLoadData, (CUmodule *, const void *))                                                                        \
    ENTRY(cuModuleGetFunction, (CUfunction *, CUmodule, const char *))                                                         \
    ENTRY(cuLaunchKernel,                                                                                                      \
          (CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **, void **))

static struct {
#define ENTRY(name, parameters) CUresult(*name) parameters;
    ENTRIES
#undef ENTRY
} driver;

struct binary {
    const void *image;
    CUmodule module;
};

struct kernel {
    const void *host;
    const char *name;
    struct binary *binary;
    CUfunction function;
    struct kernel *next;
};

static struct kernel *kernels;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static cudaError_t started = UNKNOWN;
static _Thread_local cudaError_t last;
static _Thread_local bool bound;

static cudaError_t say(cudaError_t error)
{
    if (error)
        last = error;
    return error;
}

static bool find_entries(void *library)
{
    CUresult (*find)(const char *, void **, int, uint64_t, int *) = dlsym(library, "cuGetProcAddress_v2");
    bool complete = find != NULL;
#define ENTRY(name, parameters)                                                                                                \
    complete = complete && find(#name, (void **)&driver.name, VERSION, FLAGS, NULL) == CUDA_SUCCESS && driver.name;
    ENTRIES
#undef ENTRY
    return complete;
}

static void start(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    started = !library || !find_entries(library) ? INSUFFICIENT_DRIVER : driver.cuInit(0);
}

/* The driver is there and this thread has the first device's primary context. */
static cudaError_t ready(void)
{
    pthread_once(&once, start);
    if (started || bound)
        return started;
    CUcontext context;
    CUresult result = driver.cuDevicePrimaryCtxRetain(&context, 0);
    if (result == CUDA_SUCCESS)
        result = driver.cuCtxSetCurrent(context);
    bound = result == CUDA_SUCCESS;
    return result;
}

#define CALL(expression)                                                                                                       \
    do {                                                                                                                       \
        cudaError_t call_result = ready();                                                                                     \
        return say(call_result ? call_result : (expression));                                                                  \
    } while (0)
#define DEVICE(pointer) ((CUdeviceptr)(uintptr_t)(pointer))

EXPORT cudaError_t cudaGetDeviceCount(int *count)
{
    pthread_once(&once, start);
    *count = 0;
    return say(started ? started : driver.cuDeviceGetCount(count));
}

EXPORT cudaError_t cudaDriverGetVersion(int *version)
{
    pthread_once(&once, start);
    return say(driver.cuDriverGetVersion ? driver.cuDriverGetVersion(version) : INSUFFICIENT_DRIVER);
}

EXPORT cudaError_t cudaSetDevice(int device) { CALL(device == 0 ? 0 : 101); }
EXPORT cudaError_t cudaDeviceSynchronize(void) { CALL(driver.cuCtxSynchronize()); }
EXPORT cudaError_t cudaMalloc(void **out, size_t bytes) { CALL(driver.cuMemAlloc((CUdeviceptr *)out, bytes)); }
EXPORT cudaError_t cudaFree(void *memory) { CALL(driver.cuMemFree(DEVICE(memory))); }
EXPORT cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) { CALL(driver.cuMemGetInfo(free_bytes, total)); }
EXPORT cudaError_t cudaMemset(void *to, int value, size_t n) { CALL(driver.cuMemsetD8(DEVICE(to), (unsigned char)value, n)); }
EXPORT cudaError_t cudaStreamCreate(CUstream *made) { CALL(driver.cuStreamCreate(made, 0)); }
EXPORT cudaError_t cudaStreamDestroy(CUstream stream) { CALL(driver.cuStreamDestroy(stream)); }
EXPORT cudaError_t cudaStreamSynchronize(CUstream stream) { CALL(driver.cuStreamSynchronize(stream)); }

EXPORT cudaError_t cudaMallocManaged(void **out, size_t bytes, unsigned flags)
{
    CALL(driver.cuMemAllocManaged((CUdeviceptr *)out, bytes, flags));
}

EXPORT cudaError_t cudaMallocAsync(void **out, size_t bytes, CUstream stream)
{
    CALL(driver.cuMemAllocAsync((CUdeviceptr *)out, bytes, stream));
}

EXPORT cudaError_t cudaFreeAsync(void *memory, CUstream stream) { CALL(driver.cuMemFreeAsync(DEVICE(memory), stream)); }

EXPORT cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, int kind)
{
    (void)kind;
    CALL(driver.cuMemcpy(DEVICE(to), DEVICE(from), bytes));
}

EXPORT cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, CUstream stream)
{
    (void)kind;
    CALL(driver.cuMemcpyAsync(DEVICE(to), DEVICE(from), bytes, stream));
}

EXPORT cudaError_t cudaDeviceReset(void)
{
    bound = false;
    return say(started ? started : driver.cuDevicePrimaryCtxReset(0));
}

EXPORT cudaError_t cudaPeekAtLastError(void) { return last; }

EXPORT cudaError_t cudaGetLastError(void)
{
    cudaError_t error = last;
    last = 0;
    return error;
}

EXPORT const char *cudaGetErrorName(cudaError_t error)
{
    return error == 0 ? "cudaSuccess" : error == MEMORY_ALLOCATION ? "cudaErrorMemoryAllocation" : "cudaErrorUnknown";
}

/* ------------------------------------------------------------------- what nvcc's code calls by itself */

static _Thread_local struct {
    dim3 grid, block;
    size_t shared;
    CUstream stream;
} configuration;

EXPORT void **__cudaRegisterFatBinary(void *image)
{
    struct binary *binary = calloc(1, sizeof *binary);
    if (binary)
        binary->image = image;
    return (void **)binary;
}

EXPORT void __cudaRegisterFatBinaryEnd(void **binary) { (void)binary; }
EXPORT void __cudaUnregisterFatBinary(void **binary) { free(binary); }
EXPORT char __cudaInitModule(void **binary) { return binary != NULL; }

EXPORT void __cudaRegisterFunction(void **binary, const char *host, char *stub, const char *name, int limit, void *a, void *b,
                                   void *c, void *d, int *e)
{
    (void)stub, (void)limit, (void)a, (void)b, (void)c, (void)d, (void)e;
    struct kernel *kernel = calloc(1, sizeof *kernel);
    if (!kernel)
        return;
    *kernel = (struct kernel){host, name, (struct binary *)binary, NULL, kernels};
    kernels = kernel;
}

EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, CUstream stream)
{
    configuration.grid = grid;
    configuration.block = block;
    configuration.shared = shared;
    configuration.stream = stream;
    return 0;
}

EXPORT cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream)
{
    *grid = configuration.grid;
    *block = configuration.block;
    *shared = configuration.shared;
    *(CUstream *)stream = configuration.stream;
    return 0;
}

static cudaError_t load(struct kernel *kernel)
{
    if (!kernel->binary->module) {
        CUresult result = driver.cuModuleLoadData(&kernel->binary->module, kernel->binary->image);
        if (result)
            return result;
    }
    return driver.cuModuleGetFunction(&kernel->function, kernel->binary->module, kernel->name);
}

static cudaError_t launch(const void *host, dim3 grid, dim3 block, void **arguments, size_t shared, CUstream stream)
{
    struct kernel *kernel = kernels;
    while (kernel && kernel->host != host)
        kernel = kernel->next;
    if (!kernel)
        return 98; /* no such device function */
    cudaError_t error = kernel->function ? 0 : load(kernel);
    return error ? error
                 : driver.cuLaunchKernel(kernel->function, grid.x, grid.y, grid.z, block.x, block.y, block.z, (unsigned)shared,
                                         stream, arguments, NULL);
}

EXPORT cudaError_t cudaLaunchKernel(const void *host, dim3 grid, dim3 block, void **arguments, size_t shared, CUstream stream)
{
    CALL(launch(host, grid, block, arguments, shared, stream));
}

EXPORT cudaError_t __cudaLaunchKernel(const void *host, dim3 grid, dim3 block, void **arguments, size_t shared, CUstream stream)
{
    CALL(launch(host, grid, block, arguments, shared, stream));
}

EXPORT cudaError_t __cudaGetKernel(void **kernel, const void *host)
{
    *kernel = (void *)(uintptr_t)host;
    return 0;
}
