/* Host memory that the card can reach: it takes nothing of the card's. */
#include <stdlib.h>

#include "driver.h"

struct host_block {
    void *address;
    size_t bytes;
    unsigned flags;
    bool registered; /* the program's own memory */
    struct host_block *next;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct host_block *blocks;

static struct host_block **link_of(const void *address)
{
    struct host_block **link = &blocks;
    while (*link && !((const char *)address >= (char *)(*link)->address &&
                      (const char *)address < (char *)(*link)->address + (*link)->bytes))
        link = &(*link)->next;
    return link;
}

bool host_block_at(const void *address, void **start, size_t *bytes, unsigned *flags)
{
    pthread_mutex_lock(&mutex);
    const struct host_block *block = *link_of(address);
    if (block) {
        *start = block->address;
        *bytes = block->bytes;
        *flags = block->flags;
    }
    pthread_mutex_unlock(&mutex);
    return block != NULL;
}

static CUresult add(void *address, size_t bytes, unsigned flags, bool registered)
{
    struct host_block *block = malloc(sizeof *block);
    if (!block)
        return CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&mutex);
    *block = (struct host_block){address, bytes, flags, registered, blocks};
    blocks = block;
    pthread_mutex_unlock(&mutex);
    return CUDA_SUCCESS;
}

static CUresult take(void *address, bool registered, struct host_block *taken)
{
    pthread_mutex_lock(&mutex);
    struct host_block **link = link_of(address), *block = *link;
    bool right = block && block->address == address && block->registered == registered;
    if (right) {
        *taken = *block;
        *link = block->next;
        free(block);
    }
    pthread_mutex_unlock(&mutex);
    return right ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemHostAlloc(void **address, size_t bytes, unsigned flags)
{
    struct context *context;
    TRY(context_current(&context));
    if (!address || !bytes || flags & ~7u)
        return CUDA_ERROR_INVALID_VALUE;
    if (posix_memalign(address, 4096, bytes) != 0)
        return CUDA_ERROR_OUT_OF_MEMORY;
    return add(*address, bytes, flags, false);
}

EXPORT CUresult cuMemAllocHost_v2(void **address, size_t bytes) { return cuMemHostAlloc(address, bytes, 0); }

EXPORT CUresult cuMemAllocHost(void **address, unsigned bytes) { return cuMemHostAlloc(address, bytes, 0); }

EXPORT CUresult cuMemFreeHost(void *address)
{
    struct host_block block;
    TRY(driver_ready());
    TRY(take(address, false, &block));
    free(block.address);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemHostRegister_v2(void *address, size_t bytes, unsigned flags)
{
    struct context *context;
    void *start;
    size_t size;
    unsigned other;
    TRY(context_current(&context));
    if (!address || !bytes || flags & ~0xfu)
        return CUDA_ERROR_INVALID_VALUE;
    if (host_block_at(address, &start, &size, &other))
        return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    return add(address, bytes, flags, true);
}

EXPORT CUresult cuMemHostRegister(void *address, size_t bytes, unsigned flags)
{
    return cuMemHostRegister_v2(address, bytes, flags);
}

EXPORT CUresult cuMemHostUnregister(void *address)
{
    struct host_block block;
    TRY(driver_ready());
    return take(address, true, &block) == CUDA_SUCCESS ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

EXPORT CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *out, void *address, unsigned flags)
{
    void *start;
    size_t bytes;
    unsigned other;
    TRY(driver_ready());
    if (!out || flags || !host_block_at(address, &start, &bytes, &other))
        return CUDA_ERROR_INVALID_VALUE;
    *out = (CUdeviceptr)(uintptr_t)address;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemHostGetFlags(unsigned *flags, void *address)
{
    void *start;
    size_t bytes;
    TRY(driver_ready());
    return flags && host_block_at(address, &start, &bytes, flags) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
