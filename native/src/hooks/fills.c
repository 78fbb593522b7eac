/* Memsets and copies within the card take the card as kernels do, so they wait for the share and are charged for. On an
 * H100 a container that only filled memory had 65 % of the card beside one of equal share. Copies from and to the host
 * have engines of their own. */
#include "hooks/launches.h"

enum { CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2, CU_MEMORYTYPE_DEVICE = 2 };

/* Work of about the same size takes about as long. `what`: any address that no function has. */
static uint64_t key_of(const void *what, uint64_t bytes)
{
    return gs_work_key(what, bytes ? 64u - (unsigned)__builtin_clzll(bytes) : 0);
}

static const char filling, copying;

#define FILLED(call, stream, own, bytes) THROTTLED(DRIVER call, stream, own, key_of(&filling, bytes))
#define COPIED(call, stream, own, bytes) THROTTLED(DRIVER call, stream, own, key_of(&copying, bytes))

#define FILLS(bits, type)                                                                                                      \
    int cuMemsetD##bits(unsigned int to, type value, unsigned int count)                                                       \
    {                                                                                                                          \
        FILLED((cuMemsetD##bits)(to, value, count), NULL, false, (uint64_t)count * sizeof value);                              \
    }                                                                                                                          \
    int cuMemsetD##bits##_v2(CUdeviceptr to, type value, size_t count)                                                         \
    {                                                                                                                          \
        FILLED((cuMemsetD##bits##_v2)(to, value, count), NULL, false, count * sizeof value);                                   \
    }                                                                                                                          \
    int cuMemsetD##bits##_v2_ptds(CUdeviceptr to, type value, size_t count)                                                    \
    {                                                                                                                          \
        FILLED((cuMemsetD##bits##_v2_ptds)(to, value, count), NULL, true, count * sizeof value);                               \
    }                                                                                                                          \
    int cuMemsetD##bits##Async(CUdeviceptr to, type value, size_t count, CUstream stream)                                      \
    {                                                                                                                          \
        FILLED((cuMemsetD##bits##Async)(to, value, count, stream), stream, false, count * sizeof value);                       \
    }                                                                                                                          \
    int cuMemsetD##bits##Async_ptsz(CUdeviceptr to, type value, size_t count, CUstream stream)                                 \
    {                                                                                                                          \
        FILLED((cuMemsetD##bits##Async_ptsz)(to, value, count, stream), stream, true, count * sizeof value);                   \
    }                                                                                                                          \
    int cuMemsetD2D##bits(unsigned int to, unsigned int pitch, type value, unsigned int width, unsigned int height)            \
    {                                                                                                                          \
        FILLED((cuMemsetD2D##bits)(to, pitch, value, width, height), NULL, false, (uint64_t)width * height * sizeof value);    \
    }                                                                                                                          \
    int cuMemsetD2D##bits##_v2(CUdeviceptr to, size_t pitch, type value, size_t width, size_t height)                          \
    {                                                                                                                          \
        FILLED((cuMemsetD2D##bits##_v2)(to, pitch, value, width, height), NULL, false, width * height * sizeof value);         \
    }                                                                                                                          \
    int cuMemsetD2D##bits##_v2_ptds(CUdeviceptr to, size_t pitch, type value, size_t width, size_t height)                     \
    {                                                                                                                          \
        FILLED((cuMemsetD2D##bits##_v2_ptds)(to, pitch, value, width, height), NULL, true, width * height * sizeof value);     \
    }                                                                                                                          \
    int cuMemsetD2D##bits##Async(CUdeviceptr to, size_t pitch, type value, size_t width, size_t height, CUstream stream)       \
    {                                                                                                                          \
        FILLED((cuMemsetD2D##bits##Async)(to, pitch, value, width, height, stream), stream, false,                             \
               width * height * sizeof value);                                                                                 \
    }                                                                                                                          \
    int cuMemsetD2D##bits##Async_ptsz(CUdeviceptr to, size_t pitch, type value, size_t width, size_t height, CUstream stream)  \
    {                                                                                                                          \
        FILLED((cuMemsetD2D##bits##Async_ptsz)(to, pitch, value, width, height, stream), stream, true,                         \
               width * height * sizeof value);                                                                                 \
    }
FILLS(8, unsigned char)
FILLS(16, unsigned short)
FILLS(32, unsigned int)

/* ---- copies ---- */

int cuMemcpyDtoD(unsigned int to, unsigned int from, unsigned int bytes)
{
    COPIED((cuMemcpyDtoD)(to, from, bytes), NULL, false, bytes);
}

int cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes)
{
    COPIED((cuMemcpyDtoD_v2)(to, from, bytes), NULL, false, bytes);
}

int cuMemcpyDtoD_v2_ptds(CUdeviceptr to, CUdeviceptr from, size_t bytes)
{
    COPIED((cuMemcpyDtoD_v2_ptds)(to, from, bytes), NULL, true, bytes);
}

int cuMemcpyDtoDAsync(unsigned int to, unsigned int from, unsigned int bytes, CUstream stream)
{
    COPIED((cuMemcpyDtoDAsync)(to, from, bytes, stream), stream, false, bytes);
}

int cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream)
{
    COPIED((cuMemcpyDtoDAsync_v2)(to, from, bytes, stream), stream, false, bytes);
}

int cuMemcpyDtoDAsync_v2_ptsz(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream)
{
    COPIED((cuMemcpyDtoDAsync_v2_ptsz)(to, from, bytes, stream), stream, true, bytes);
}

/* The addresses say which kind of copy this is. Of those that it does not know the driver answers nothing, where
 * cuPointerGetAttribute would fail: the driver's log and compute-sanitizer show that as the program's error. */
static bool is_on_card(CUdeviceptr address)
{
    int attribute = CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
    unsigned int type = 0;
    void *value = &type;
    return DRIVER(cuPointerGetAttributes)(1, &attribute, &value, address) == CUDA_SUCCESS && type == CU_MEMORYTYPE_DEVICE;
}

#define COPIED_ANYWHERE(symbol, arguments, stream, own)                                                                        \
    do {                                                                                                                       \
        if (gs_likely(__atomic_load_n(&gs_launch_freely, __ATOMIC_RELAXED)) || !gs_throttles() || !is_on_card(to) ||           \
            !is_on_card(from))                                                                                                 \
            return DRIVER(symbol) arguments;                                                                                   \
        COPIED((symbol)arguments, stream, own, bytes);                                                                         \
    } while (0)

int cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t bytes) { COPIED_ANYWHERE(cuMemcpy, (to, from, bytes), NULL, false); }
int cuMemcpy_ptds(CUdeviceptr to, CUdeviceptr from, size_t bytes)
{
    COPIED_ANYWHERE(cuMemcpy_ptds, (to, from, bytes), NULL, true);
}

int cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream)
{
    COPIED_ANYWHERE(cuMemcpyAsync, (to, from, bytes, stream), stream, false);
}

int cuMemcpyAsync_ptsz(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream)
{
    COPIED_ANYWHERE(cuMemcpyAsync_ptsz, (to, from, bytes, stream), stream, true);
}
