/* Allocates and frees in every way, at random, as fast as it can, until it is killed or has done COUNT steps.
 *
 *     storm SEED [COUNT [THREADS]]
 *
 * After COUNT steps a thread it frees everything and prints "done"; a wrong answer of the driver ends it with status 2.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../libcuda/cuda_abi.h"

CUresult cuInit(unsigned);
CUresult cuDevicePrimaryCtxRetain(CUcontext *, CUdevice);
CUresult cuCtxSetCurrent(CUcontext);
CUresult cuCtxSynchronize(void);
CUresult cuMemAlloc_v2(CUdeviceptr *, size_t);
CUresult cuMemAllocManaged(CUdeviceptr *, size_t, unsigned);
CUresult cuMemAllocAsync(CUdeviceptr *, size_t, CUstream);
CUresult cuMemFree_v2(CUdeviceptr);
CUresult cuMemFreeAsync(CUdeviceptr, CUstream);
CUresult cuMemCreate(CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *, unsigned long long);
CUresult cuMemRelease(CUmemGenericAllocationHandle);
CUresult cuArrayCreate_v2(CUarray *, const CUDA_ARRAY_DESCRIPTOR *);
CUresult cuArrayDestroy(CUarray);
CUresult cuStreamCreate(CUstream *, unsigned);
CUresult cuStreamDestroy_v2(CUstream);
CUresult cuGraphCreate(CUgraph *, unsigned);
CUresult cuGraphDestroy(CUgraph);

#define SLOTS 64u
#define THREADS 16
#define MIB (1024ull * 1024ull)

enum kind { NONE, PLAIN, MANAGED, POOLED, PHYSICAL, ARRAY, STREAM, GRAPH, KINDS };

static _Thread_local struct {
    enum kind kind;
    unsigned long long handle;
} held[SLOTS];

static void must(CUresult result, const char *what)
{
    if (result == CUDA_SUCCESS)
        return;
    fprintf(stderr, "%s answered %d\n", what, result);
    exit(2);
}

static CUresult take(enum kind kind, size_t bytes, unsigned long long *handle)
{
    static const CUmemAllocationProp properties = {.type = 1, .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
    const CUDA_ARRAY_DESCRIPTOR shape = {bytes / 4096 + 1, 1024, 0x20, 1};
    switch (kind) {
    case PLAIN: return cuMemAlloc_v2(handle, bytes);
    case MANAGED: return cuMemAllocManaged(handle, bytes, 1);
    case POOLED: return cuMemAllocAsync(handle, bytes, NULL);
    case PHYSICAL: return cuMemCreate(handle, (bytes / (2 * MIB) + 1) * 2 * MIB, &properties, 0);
    case ARRAY: return cuArrayCreate_v2((CUarray *)handle, &shape);
    case STREAM: return cuStreamCreate((CUstream *)handle, 0);
    case GRAPH: return cuGraphCreate((CUgraph *)handle, 0);
    default: return CUDA_ERROR_INVALID_VALUE;
    }
}

static void give(unsigned slot)
{
    unsigned long long handle = held[slot].handle;
    switch (held[slot].kind) {
    case PLAIN:
    case MANAGED: must(cuMemFree_v2(handle), "cuMemFree"); break;
    case POOLED: must(cuMemFreeAsync(handle, NULL), "cuMemFreeAsync"); break;
    case PHYSICAL: must(cuMemRelease(handle), "cuMemRelease"); break;
    case ARRAY: must(cuArrayDestroy((CUarray)(uintptr_t)handle), "cuArrayDestroy"); break;
    case STREAM: must(cuStreamDestroy_v2((CUstream)(uintptr_t)handle), "cuStreamDestroy"); break;
    case GRAPH: must(cuGraphDestroy((CUgraph)(uintptr_t)handle), "cuGraphDestroy"); break;
    default: break;
    }
    held[slot].kind = NONE;
}

static void step(unsigned short random[3])
{
    unsigned slot = (unsigned)(nrand48(random) % SLOTS);
    enum kind kind = (enum kind)(1 + nrand48(random) % (KINDS - 1));
    size_t bytes = 1 + (size_t)nrand48(random) % (8 * MIB);
    if (held[slot].kind != NONE) {
        give(slot);
        return;
    }
    CUresult result = take(kind, bytes, &held[slot].handle);
    if (result != CUDA_ERROR_OUT_OF_MEMORY)
        must(result, "an allocation");
    held[slot].kind = result == CUDA_SUCCESS ? kind : NONE;
}

struct work {
    int seed;
    unsigned long long steps;
    CUcontext context;
};

static void *work(void *given)
{
    const struct work *it = given;
    unsigned short random[3] = {(unsigned short)it->seed, 7, 11};
    must(cuCtxSetCurrent(it->context), "cuCtxSetCurrent");
    for (unsigned long long i = 1; i <= it->steps; i++) {
        step(random);
        if (i % 64 == 0)
            must(cuCtxSynchronize(), "cuCtxSynchronize");
    }
    for (unsigned slot = 0; slot < SLOTS; slot++)
        give(slot);
    must(cuCtxSynchronize(), "cuCtxSynchronize");
    return NULL;
}

static void work_in_threads(const struct work *it, int threads)
{
    pthread_t started[THREADS];
    struct work parts[THREADS];
    for (int i = 0; i < threads; i++) {
        parts[i] = *it;
        parts[i].seed += i;
        must(pthread_create(&started[i], NULL, work, &parts[i]), "pthread_create");
    }
    for (int i = 0; i < threads; i++)
        pthread_join(started[i], NULL);
}

int main(int count, char **arguments)
{
    struct work it = {.seed = count > 1 ? atoi(arguments[1]) : 1,
                      .steps = count > 2 ? strtoull(arguments[2], NULL, 10) : ~0ull};
    int threads = count > 3 ? atoi(arguments[3]) : 1;
    must(cuInit(0), "cuInit");
    must(cuDevicePrimaryCtxRetain(&it.context, 0), "cuDevicePrimaryCtxRetain");
    printf("started\n");
    fflush(stdout);
    work_in_threads(&it, threads < 1 ? 1 : threads > THREADS ? THREADS : threads);
    printf("done\n");
    return EXIT_SUCCESS;
}
