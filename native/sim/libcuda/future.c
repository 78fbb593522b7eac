/* What a driver newer than anybody has seen brings: newer forms of known functions, for the library of build/sim/future
 * alone. They do what their elders do. CUDA has brought such forms with most releases (cuMemAlloc to _v2 in 3.2, cuCtxCreate to
 * _v4 in 12.5, cuMemcpyBatchAsync to _v2 in 13.0); cuGetProcAddress gives them to programs that name that version. */
#include "driver.h"

CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes);
CUresult cuMemAllocAsync(CUdeviceptr *address, size_t bytes, CUstream stream);
CUresult cuMemCreate(CUmemGenericAllocationHandle *made, size_t bytes, const CUmemAllocationProp *properties,
                     unsigned long long flags);
CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes);
CUresult cuLaunchKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned shared, CUstream stream, void **parameters, void **extra);

EXPORT CUresult cuMemAlloc_v3(CUdeviceptr *address, size_t bytes) { return cuMemAlloc_v2(address, bytes); }
EXPORT CUresult cuMemFree_v3(CUdeviceptr address) { return cuMemFree_v2(address); }
EXPORT CUresult cuMemGetInfo_v3(size_t *free_bytes, size_t *total) { return cuMemGetInfo_v2(free_bytes, total); }

EXPORT CUresult cuMemAllocAsync_v2(CUdeviceptr *address, size_t bytes, CUstream stream)
{
    return cuMemAllocAsync(address, bytes, stream);
}

EXPORT CUresult cuMemCreate_v2(CUmemGenericAllocationHandle *made, size_t bytes, const CUmemAllocationProp *properties,
                               unsigned long long flags)
{
    return cuMemCreate(made, bytes, properties, flags);
}

EXPORT CUresult cuLaunchKernel_v2(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                  unsigned bz, unsigned shared, CUstream stream, void **parameters, void **extra)
{
    return cuLaunchKernel(function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra);
}
