/* The workload of the shared-GPU story, on the driver API.
 *
 *     cuda_malloc -size=1024      says what it sees, allocates so many MiB, frees them and ends
 *     cuda_malloc 3G              as the image cuda-malloc:3G: allocates it quietly and stays until it is told to go
 *     cuda_malloc -hold -size=N   the same for N MiB; without any size 3 GiB
 *
 * A refused allocation prints one line and ends with status 1.
 */
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../libcuda/cuda_abi.h"

CUresult cuInit(unsigned);
CUresult cuDriverGetVersion(int *);
CUresult cuDeviceGetCount(int *);
CUresult cuDeviceGet(CUdevice *, int);
CUresult cuDeviceGetName(char *, int, CUdevice);
CUresult cuDeviceTotalMem_v2(size_t *, CUdevice);
CUresult cuDevicePrimaryCtxRetain(CUcontext *, CUdevice);
CUresult cuCtxSetCurrent(CUcontext);
CUresult cuMemAlloc_v2(CUdeviceptr *, size_t);
CUresult cuMemFree_v2(CUdeviceptr);

#define MIB (1024ull * 1024ull)
#define RUNTIME "10.1" /* what the program was built with */

struct options {
    bool hold;
    unsigned long long size_mib;
};

/* The runtime's names for the driver's errors, as far as they can occur here. */
static const char *runtime_name(CUresult code)
{
    switch (code) {
    case 1: return "cudaErrorInvalidValue";
    case 2: return "cudaErrorMemoryAllocation";
    case 3: return "cudaErrorInitializationError";
    case 100: return "cudaErrorNoDevice";
    case 201: return "cudaErrorDeviceUninitialized";
    default: return "cudaErrorUnknown";
    }
}

static void check(CUresult code, int line, const char *call)
{
    if (code == CUDA_SUCCESS)
        return;
    fflush(stdout);
    fprintf(stderr, "CUDA error at cgpu_cuda_malloc.cu:%d code=%d(%s) \"%s\"\n", line, code, runtime_name(code), call);
    exit(EXIT_FAILURE);
}

static unsigned long long size_of(const char *text)
{
    char *unit;
    unsigned long long size = strtoull(text, &unit, 10);
    return *unit == 'G' || *unit == 'g' ? size * 1024 : size;
}

static struct options parse(int count, char **arguments)
{
    struct options options = {.hold = true, .size_mib = 3072};
    bool hold = false, sized = false;
    for (int i = 1; i < count; i++) {
        const char *argument = arguments[i];
        if (strcmp(argument, "-hold") == 0) {
            hold = true;
        } else if (strncmp(argument, "-size=", 6) == 0) {
            options.size_mib = size_of(argument + 6);
            sized = true;
        } else {
            options.size_mib = size_of(argument);
            hold = true;
        }
    }
    options.hold = hold || !sized;
    return options;
}

static void describe(int count)
{
    int version = 0;
    printf("gpu_cuda_malloc starting...\nDetected %d CUDA Capable device(s)\n", count);
    check(cuDriverGetVersion(&version), 72, "cudaDriverGetVersion(&driverVersion)");
    for (CUdevice device = 0; device < count; device++) {
        char name[256];
        size_t bytes = 0;
        check(cuDeviceGetName(name, sizeof name, device), 76, "cudaGetDeviceProperties(&deviceProp, dev)");
        check(cuDeviceTotalMem_v2(&bytes, device), 76, "cudaGetDeviceProperties(&deviceProp, dev)");
        printf("\nDevice %d: \"%s\"\n", device, name);
        printf("  CUDA Driver Version / Runtime Version          %d.%d / %s\n", version / 1000, version % 1000 / 10, RUNTIME);
        printf("  Total amount of global memory:                 %llu MBytes (%zu bytes)\n", bytes / MIB, bytes);
    }
}

static void use_device(int ordinal)
{
    CUdevice device;
    CUcontext context;
    check(cuDeviceGet(&device, ordinal), 112, "cudaSetDevice(gpu)");
    check(cuDevicePrimaryCtxRetain(&context, device), 119, "cudaMalloc( (void**)&dev_c, malloc_size)");
    check(cuCtxSetCurrent(context), 119, "cudaMalloc( (void**)&dev_c, malloc_size)");
}

static void wait_for_signal(void)
{
    sigset_t set;
    int received;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    sigprocmask(SIG_BLOCK, &set, NULL);
    sigwait(&set, &received);
}

int main(int count, char **arguments)
{
    struct options options = parse(count, arguments);
    int devices = 0;
    CUdeviceptr memory;
    check(cuInit(0), 60, "cudaGetDeviceCount(&deviceCount)");
    check(cuDeviceGetCount(&devices), 60, "cudaGetDeviceCount(&deviceCount)");
    if (!options.hold) {
        describe(devices);
        printf("Try to malloc %llu MBytes memory on GPU 0\n", options.size_mib);
    }
    use_device(0);
    check(cuMemAlloc_v2(&memory, options.size_mib * MIB), 119, "cudaMalloc( (void**)&dev_c, malloc_size)");
    if (options.hold)
        wait_for_signal();
    check(cuMemFree_v2(memory), 124, "cudaFree(dev_c)");
    return EXIT_SUCCESS;
}
