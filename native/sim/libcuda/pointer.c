/* What an address is, and advice about managed memory. */
#include <string.h>

#include "driver.h"

enum {
    CONTEXT = 1,
    MEMORY_TYPE,
    DEVICE_POINTER,
    HOST_POINTER,
    P2P_TOKENS,
    SYNC_MEMOPS,
    BUFFER_ID,
    IS_MANAGED,
    DEVICE_ORDINAL,
    IPC_CAPABLE,
    RANGE_START,
    RANGE_SIZE,
    MAPPED,
    HANDLE_TYPES,
    RDMA_CAPABLE,
    ACCESS_FLAGS,
    MEMPOOL_HANDLE,
    MAPPING_SIZE,
    MAPPING_BASE,
    BLOCK_ID,
    DECOMPRESS
};

struct facts {
    bool device, host, managed;
    uint64_t start, bytes, id;
    struct context *context;
    int ordinal;
    struct pool *pool;
};

static bool device_facts(uint64_t address, struct facts *facts)
{
    memory_lock();
    const struct allocation *found = allocation_at(address);
    bool known = found != NULL;
    if (known) {
        *facts = (struct facts){.device = true,
                                .managed = found->kind == ALLOCATION_MANAGED,
                                .start = found->address,
                                .bytes = found->bytes,
                                .id = found->id,
                                .context = found->context,
                                .ordinal = found->device ? found->device->ordinal : 0};
        if (found->kind == ALLOCATION_CHUNK) {
            facts->start = address;
            known = block_range(found, &facts->start, &facts->bytes);
            facts->pool = pool_of_block(found);
        }
        known = known && address < facts->start + facts->bytes;
    }
    memory_unlock();
    return known;
}

static bool host_facts(uint64_t address, struct facts *facts)
{
    void *start;
    size_t bytes;
    unsigned flags;
    if (!host_block_at((void *)(uintptr_t)address, &start, &bytes, &flags))
        return false;
    *facts = (struct facts){.host = true, .start = (uint64_t)(uintptr_t)start, .bytes = bytes};
    return true;
}

static void put(void *out, const void *value, size_t bytes) { memcpy(out, value, bytes); }

#define PUT(type, expression)                                                                                                  \
    do {                                                                                                                       \
        type put_value = (type)(expression);                                                                                   \
        put(out, &put_value, sizeof put_value);                                                                                \
        return CUDA_SUCCESS;                                                                                                   \
    } while (0)

static CUresult answer(void *out, int attribute, uint64_t address, const struct facts *facts)
{
    switch (attribute) {
    case CONTEXT: PUT(CUcontext, facts->context);
    case MEMORY_TYPE: PUT(unsigned, facts->host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE);
    case DEVICE_POINTER: PUT(CUdeviceptr, address);
    case HOST_POINTER:
        if (!facts->host && !facts->managed)
            return CUDA_ERROR_INVALID_VALUE;
        PUT(void *, (uintptr_t)address);
    case SYNC_MEMOPS: PUT(unsigned char, 0);
    case BUFFER_ID: PUT(unsigned long long, facts->id);
    case IS_MANAGED: PUT(unsigned char, facts->managed);
    case DEVICE_ORDINAL: PUT(int, facts->host ? -1 : facts->ordinal);
    case IPC_CAPABLE: PUT(unsigned char, facts->device && !facts->managed && !facts->pool);
    case RANGE_START: PUT(CUdeviceptr, facts->start);
    case RANGE_SIZE: PUT(size_t, facts->bytes);
    case MAPPED: PUT(unsigned char, 1);
    case HANDLE_TYPES: PUT(int, 0);
    case RDMA_CAPABLE: PUT(unsigned char, 0);
    case ACCESS_FLAGS: PUT(int, 3);
    case MEMPOOL_HANDLE: PUT(struct pool *, facts->pool);
    case MAPPING_SIZE: PUT(size_t, facts->bytes);
    case MAPPING_BASE: PUT(CUdeviceptr, facts->start);
    case BLOCK_ID: PUT(unsigned long long, facts->id);
    case DECOMPRESS: PUT(unsigned char, 0);
    default: return CUDA_ERROR_INVALID_VALUE;
    }
}

EXPORT CUresult cuPointerGetAttribute(void *out, int attribute, CUdeviceptr address)
{
    struct facts facts;
    TRY(driver_ready());
    if (!out || (!device_facts(address, &facts) && !host_facts(address, &facts))) {
        gate_pass("unknown-address");
        return CUDA_ERROR_INVALID_VALUE;
    }
    return answer(out, attribute, address, &facts);
}

/* For an address that the driver does not know, each attribute gets its zero. */
static void nothing(void *out, int attribute)
{
    static const uint64_t zero;
    size_t bytes = attribute == SYNC_MEMOPS || attribute == IS_MANAGED || attribute == IPC_CAPABLE || attribute == MAPPED ||
                           attribute == RDMA_CAPABLE || attribute == DECOMPRESS
                       ? 1
                   : attribute == MEMORY_TYPE || attribute == HANDLE_TYPES || attribute == ACCESS_FLAGS ? 4
                                                                                                        : 8;
    const int no_device = -2;
    if (attribute == DEVICE_ORDINAL)
        memcpy(out, &no_device, sizeof no_device);
    else
        memcpy(out, &zero, bytes);
}

EXPORT CUresult cuPointerGetAttributes(unsigned count, int *attributes, void **outs, CUdeviceptr address)
{
    struct facts facts;
    TRY(driver_ready());
    if (!count || !attributes || !outs)
        return CUDA_ERROR_INVALID_VALUE;
    bool known = device_facts(address, &facts) || host_facts(address, &facts);
    for (unsigned i = 0; i < count; i++)
        if (!known || answer(outs[i], attributes[i], address, &facts) != CUDA_SUCCESS)
            nothing(outs[i], attributes[i]);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuPointerSetAttribute(const void *value, int attribute, CUdeviceptr address)
{
    struct facts facts;
    TRY(driver_ready());
    return value && attribute == SYNC_MEMOPS && device_facts(address, &facts) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* ------------------------------------------------------------------------- advice: heard, not followed */

static CUresult managed(CUdeviceptr address)
{
    struct facts facts;
    TRY(driver_ready());
    return device_facts(address, &facts) && facts.managed ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

#define UNUSED __attribute__((unused))
#define ADVICE(name, ...)                                                                                                      \
    EXPORT CUresult name(CUdeviceptr address, __VA_ARGS__) { return managed(address); }
ADVICE(cuMemAdvise, UNUSED size_t bytes, UNUSED int advice, UNUSED CUdevice device)
ADVICE(cuMemAdvise_v2, UNUSED size_t bytes, UNUSED int advice, UNUSED CUmemLocation location)
ADVICE(cuMemPrefetchAsync, UNUSED size_t bytes, UNUSED CUdevice device, UNUSED CUstream s)
ADVICE(cuMemPrefetchAsync_ptsz, UNUSED size_t bytes, UNUSED CUdevice device, UNUSED CUstream s)
ADVICE(cuMemPrefetchAsync_v2, UNUSED size_t bytes, UNUSED CUmemLocation to, UNUSED unsigned flags, UNUSED CUstream s)
ADVICE(cuMemPrefetchAsync_v2_ptsz, UNUSED size_t bytes, UNUSED CUmemLocation to, UNUSED unsigned f, UNUSED CUstream s)
