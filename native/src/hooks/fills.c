/* Memsets and copies within the card take the card as kernels do, so they wait for the share and are charged for. On an
 * H100 a container that only filled memory had 65 % of the card beside one of equal share. Copies from and to the host
 * have engines of their own. */
#include "hooks/launches.h"

/* Work of about the same size takes about as long. `what`: any address that no function has. */
static uint64_t key_of(const void *what, uint64_t bytes)
{
    return gs_work_key(what, bytes ? 64u - (unsigned)__builtin_clzll(bytes) : 0);
}

static const char filling, copying;

/* FILL takes the parameters and the call, which the shapes below are. */
#define FILL(...) FILL_AS(__VA_ARGS__)
#define FILL_AS(symbol, parameters, call, stream, own, bytes)                                                                  \
    THROTTLED(symbol, parameters, call, true, DRIVER(symbol) call, stream, own, key_of(&filling, bytes))
#define COPY(symbol, parameters, call, stream, own)                                                                            \
    THROTTLED(symbol, parameters, call, true, DRIVER(symbol) call, stream, own, key_of(&copying, bytes))

/* Before CUDA 3.2 addresses and sizes had 32 bits. */
#define OLD(type) (unsigned to, type value, unsigned count), (to, value, count)
#define LINE(type) (CUdeviceptr to, type value, size_t count), (to, value, count)
#define LINE_ASYNC(type) (CUdeviceptr to, type value, size_t count, CUstream stream), (to, value, count, stream)
#define OLD_PLANE(type)                                                                                                        \
    (unsigned to, unsigned pitch, type value, unsigned width, unsigned height), (to, pitch, value, width, height)
#define PLANE(type) (CUdeviceptr to, size_t pitch, type value, size_t width, size_t height), (to, pitch, value, width, height)
#define PLANE_ASYNC(type)                                                                                                      \
    (CUdeviceptr to, size_t pitch, type value, size_t width, size_t height, CUstream stream),                                  \
        (to, pitch, value, width, height, stream)
#define FILL_LINE(symbol, shape, stream, own) FILL(symbol, shape, stream, own, (uint64_t)count * sizeof value)
#define FILL_PLANE(symbol, shape, stream, own) FILL(symbol, shape, stream, own, (uint64_t)width * height * sizeof value)

#define FILLS(bits, type)                                                                                                      \
    FILL_LINE(cuMemsetD##bits, OLD(type), NULL, false)                                                                         \
    FILL_LINE(cuMemsetD##bits##_v2, LINE(type), NULL, false)                                                                   \
    FILL_LINE(cuMemsetD##bits##_v2_ptds, LINE(type), NULL, true)                                                               \
    FILL_LINE(cuMemsetD##bits##Async, LINE_ASYNC(type), stream, false)                                                         \
    FILL_LINE(cuMemsetD##bits##Async_ptsz, LINE_ASYNC(type), stream, true)                                                     \
    FILL_PLANE(cuMemsetD2D##bits, OLD_PLANE(type), NULL, false)                                                                \
    FILL_PLANE(cuMemsetD2D##bits##_v2, PLANE(type), NULL, false)                                                               \
    FILL_PLANE(cuMemsetD2D##bits##_v2_ptds, PLANE(type), NULL, true)                                                           \
    FILL_PLANE(cuMemsetD2D##bits##Async, PLANE_ASYNC(type), stream, false)                                                     \
    FILL_PLANE(cuMemsetD2D##bits##Async_ptsz, PLANE_ASYNC(type), stream, true)
FILLS(8, unsigned char)
FILLS(16, unsigned short)
FILLS(32, unsigned int)

/* ---- copies ---- */

COPY(cuMemcpyDtoD, (unsigned to, unsigned from, unsigned bytes), (to, from, bytes), NULL, false)
COPY(cuMemcpyDtoD_v2, (CUdeviceptr to, CUdeviceptr from, size_t bytes), (to, from, bytes), NULL, false)
COPY(cuMemcpyDtoD_v2_ptds, (CUdeviceptr to, CUdeviceptr from, size_t bytes), (to, from, bytes), NULL, true)
COPY(cuMemcpyDtoDAsync, (unsigned to, unsigned from, unsigned bytes, CUstream stream), (to, from, bytes, stream), stream, false)
COPY(cuMemcpyDtoDAsync_v2, (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream), (to, from, bytes, stream), stream,
     false)
COPY(cuMemcpyDtoDAsync_v2_ptsz, (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream), (to, from, bytes, stream),
     stream, true)

/* The addresses say which kind of copy this is. Of those that it does not know the driver answers nothing, where
 * cuPointerGetAttribute would fail: the driver's log and compute-sanitizer show that as the program's error. */
static bool is_on_card(CUdeviceptr address)
{
    int attribute = CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
    unsigned int type = 0;
    void *value = &type;
    return DRIVER(cuPointerGetAttributes)(1, &attribute, &value, address) == CUDA_SUCCESS && type == CU_MEMORYTYPE_DEVICE;
}

#define COPY_ANYWHERE(symbol, parameters, call, stream, own)                                                                   \
    int symbol parameters                                                                                                      \
    {                                                                                                                          \
        if (gs_likely(__atomic_load_n(&gs_launch_freely, __ATOMIC_RELAXED)) || !gs_throttles() || !is_on_card(to) ||           \
            !is_on_card(from))                                                                                                 \
            return DRIVER(symbol) call;                                                                                        \
        THROTTLE(DRIVER(symbol) call, stream, own, key_of(&copying, bytes))                                                    \
    }

COPY_ANYWHERE(cuMemcpy, (CUdeviceptr to, CUdeviceptr from, size_t bytes), (to, from, bytes), NULL, false)
COPY_ANYWHERE(cuMemcpy_ptds, (CUdeviceptr to, CUdeviceptr from, size_t bytes), (to, from, bytes), NULL, true)
COPY_ANYWHERE(cuMemcpyAsync, (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream), (to, from, bytes, stream),
              stream, false)
COPY_ANYWHERE(cuMemcpyAsync_ptsz, (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream), (to, from, bytes, stream),
              stream, true)
