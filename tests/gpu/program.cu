// A program as nvcc builds it: the CUDA runtime is linked statically.
#include <cstdio>
#include <cuda_runtime.h>

__global__ void work(int *cell) { atomicAdd(cell, 1); }

int main()
{
    size_t free_bytes = 0, total = 0;
    void *memory = nullptr, *more = nullptr;
    int result = 0, *cell = nullptr;
    cudaDeviceProp properties;
    cudaGetDeviceProperties(&properties, 0);
    cudaMemGetInfo(&free_bytes, &total);
    printf("total %zu property %zu\n", total >> 20, (size_t)properties.totalGlobalMem >> 20);
    printf("half %d\n", cudaMalloc(&memory, total / 2));
    printf("whole %d\n", cudaMalloc(&more, total));
    printf("async %d\n", cudaMallocAsync(&more, total, cudaStreamPerThread));
    cudaGetLastError();
    cudaMalloc(&cell, sizeof *cell);
    cudaMemset(cell, 0, sizeof *cell);
    for (int i = 0; i < 1000; i++)
        work<<<1, 1>>>(cell);
    cudaMemcpy(&result, cell, sizeof result, cudaMemcpyDeviceToHost);
    printf("work %d\n", result);
    return 0;
}
