/* Copies and fills. They happen at the call; what is small has contents, what is large has none. Fills and copies within
 * the card also take its time. */
#include <string.h>

#include "driver.h"

#define NODE_MEMCPY 1
#define NODE_MEMSET 2
#define MEMORY_TYPE 2 /* CU_POINTER_ATTRIBUTE_MEMORY_TYPE */
#define UNUSED __attribute__((unused))

static CUresult ready(void)
{
    struct context *context;
    return context_current(&context);
}

/* An asynchronous copy needs a stream; a capturing one only writes it down. */
static CUresult on_stream(CUstream handle, int node_type, bool *captured)
{
    struct stream *stream;
    TRY(stream_of(handle, &stream));
    *captured = stream->capturing != NULL;
    return *captured ? capture_simple(stream, node_type) : CUDA_SUCCESS;
}

#define BYTES_PER_NS 2000u /* of a card's memory */

static void take_time(struct stream *stream, size_t bytes)
{
    if (!stream->capturing && bytes >= BYTES_PER_NS)
        stream_work(stream, bytes / BYTES_PER_NS, SIM_WHOLE_CARD);
}

CUresult cuPointerGetAttribute(void *value, int attribute, CUdeviceptr address);

static bool is_on_card(CUdeviceptr address)
{
    unsigned type = 0;
    return cuPointerGetAttribute(&type, MEMORY_TYPE, address) == CUDA_SUCCESS && type == CU_MEMORYTYPE_DEVICE;
}

static CUresult take_time_within(CUstream handle, CUdeviceptr to, CUdeviceptr from, size_t bytes)
{
    struct stream *stream;
    TRY(stream_of(handle, &stream));
    if (bytes >= BYTES_PER_NS && is_on_card(to) && is_on_card(from))
        take_time(stream, bytes);
    return CUDA_SUCCESS;
}

static CUresult move(CUdeviceptr to, CUdeviceptr from, size_t bytes)
{
    TRY(ready());
    if (bytes && (!to || !from))
        return CUDA_ERROR_INVALID_VALUE;
    bytes_move(to, from, bytes);
    return CUDA_SUCCESS;
}

static CUresult move_on(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream)
{
    bool captured;
    TRY(on_stream(stream, NODE_MEMCPY, &captured));
    if (captured)
        return CUDA_SUCCESS;
    TRY(move(to, from, bytes));
    return take_time_within(stream, to, from, bytes);
}

/* A copy between host and card returns when it is done, so after all that its stream had to do before. */
static CUresult move_after(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream handle)
{
    struct stream *stream;
    TRY(stream_of(handle, &stream));
    if (!stream->capturing)
        stream_wait(stream);
    TRY(move(to, from, bytes));
    return take_time_within(handle, to, from, bytes);
}

/* The card that NVML counts traffic of: of a MIG device, the whole one. */
static struct sim_card *counted_card(const struct context *context)
{
    struct sim_card *card = &sim_state()->cards[context->device->card];
    return card->parent >= 0 ? &sim_state()->cards[card->parent] : card;
}

#define COUNT(counter, amount) __atomic_fetch_add(&(counter), (amount), __ATOMIC_RELAXED)

static void over_pcie(size_t bytes, bool to_card)
{
    struct context *context;
    if (context_current(&context) != CUDA_SUCCESS)
        return;
    struct sim_card *card = counted_card(context);
    COUNT(*(to_card ? &card->pcie_rx_bytes : &card->pcie_tx_bytes), bytes);
}

/* Over NVLink where both have it, else through the host. */
static void between(CUcontext to, CUcontext from, size_t bytes)
{
    if (!object_is(to, OBJECT_CONTEXT) || !object_is(from, OBJECT_CONTEXT) || to == from)
        return;
    struct sim_card *target = counted_card((const struct context *)to);
    struct sim_card *source = counted_card((const struct context *)from);
    bool linked = target->nvlink_count && source->nvlink_count;
    COUNT(*(linked ? &source->nvlink_tx_kib : &source->pcie_tx_bytes), linked ? bytes / 1024 : bytes);
    COUNT(*(linked ? &target->nvlink_rx_kib : &target->pcie_rx_bytes), linked ? bytes / 1024 : bytes);
}

#define HOST(pointer) ((CUdeviceptr)(uintptr_t)(pointer))

/* Four forms of each: at once and on a stream, each with a per-thread twin. */
#define COPY(name, version, to_type, from_type, to, from)                                                                      \
    EXPORT CUresult name##version(to_type t, from_type f, size_t n) { return move_after(to, from, n, NULL); }                  \
    EXPORT CUresult name##version##_ptds(to_type t, from_type f, size_t n)                                                     \
    {                                                                                                                          \
        return move_after(to, from, n, CU_STREAM_PER_THREAD);                                                                  \
    }                                                                                                                          \
    EXPORT CUresult name##Async##version(to_type t, from_type f, size_t n, CUstream s) { return move_on(to, from, n, s); }     \
    EXPORT CUresult name##Async##version##_ptsz(to_type t, from_type f, size_t n, CUstream s)                                  \
    {                                                                                                                          \
        return move_on(to, from, n, PER_THREAD(s));                                                                            \
    }
COPY(cuMemcpy, , CUdeviceptr, CUdeviceptr, t, f)
COPY(cuMemcpyHtoD, _v2, CUdeviceptr, const void *, (over_pcie(n, true), t), HOST(f))
COPY(cuMemcpyDtoH, _v2, void *, CUdeviceptr, (over_pcie(n, false), HOST(t)), f)
COPY(cuMemcpyDtoD, _v2, CUdeviceptr, CUdeviceptr, t, f)

#define PEER CUdeviceptr t, CUcontext tc, CUdeviceptr f, CUcontext fc, size_t n
#define TO (between(tc, fc, n), t)
EXPORT CUresult cuMemcpyPeer(PEER) { return move(TO, f, n); }
EXPORT CUresult cuMemcpyPeer_ptds(PEER) { return move(TO, f, n); }
EXPORT CUresult cuMemcpyPeerAsync(PEER, CUstream s) { return move_on(TO, f, n, s); }
EXPORT CUresult cuMemcpyPeerAsync_ptsz(PEER, CUstream s) { return move_on(TO, f, n, PER_THREAD(s)); }

EXPORT CUresult cuMemcpyWithAttributesAsync(CUdeviceptr t, CUdeviceptr f, size_t n, UNUSED void *a, CUstream s)
{
    return move_on(t, f, n, s);
}

EXPORT CUresult cuMemcpyWithAttributesAsync_ptsz(CUdeviceptr t, CUdeviceptr f, size_t n, UNUSED void *a, CUstream s)
{
    return move_on(t, f, n, PER_THREAD(s));
}

#define BATCH CUdeviceptr *to, CUdeviceptr *from, size_t *bytes, size_t count, UNUSED void *attributes, UNUSED size_t *at
EXPORT CUresult cuMemcpyBatchAsync_v2(BATCH, UNUSED size_t attribute_count, CUstream stream)
{
    if (!to || !from || !bytes || !count)
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count; i++)
        TRY(move_on(to[i], from[i], bytes[i], stream));
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemcpyBatchAsync_v2_ptsz(BATCH, size_t attribute_count, CUstream stream)
{
    return cuMemcpyBatchAsync_v2(to, from, bytes, count, attributes, at, attribute_count, PER_THREAD(stream));
}

EXPORT CUresult cuMemcpyBatchAsync(BATCH, size_t attribute_count, UNUSED size_t *failed, CUstream stream)
{
    return cuMemcpyBatchAsync_v2(to, from, bytes, count, attributes, at, attribute_count, stream);
}

EXPORT CUresult cuMemcpyBatchAsync_ptsz(BATCH, size_t attribute_count, UNUSED size_t *failed, CUstream stream)
{
    return cuMemcpyBatchAsync_v2(to, from, bytes, count, attributes, at, attribute_count, PER_THREAD(stream));
}

/* ------------------------------------------------------------------------------ two and three dimensions */

/* Where a side of a copy lies: 0 for an array, whose contents are not kept. */
static CUdeviceptr side(int type, const void *host, CUdeviceptr device)
{
    return type == CU_MEMORYTYPE_HOST ? HOST(host) : type == CU_MEMORYTYPE_ARRAY ? 0 : device;
}

static void move_rows(CUdeviceptr to, size_t to_pitch, CUdeviceptr from, size_t from_pitch, size_t width, size_t rows)
{
    for (size_t row = 0; to && from && row < rows; row++)
        bytes_move(to + row * to_pitch, from + row * from_pitch, width);
}

static CUresult copy_2d(const CUDA_MEMCPY2D *copy)
{
    TRY(ready());
    if (!copy)
        return CUDA_ERROR_INVALID_VALUE;
    CUdeviceptr to = side(copy->dst_type, copy->dst_host, copy->dst_device);
    CUdeviceptr from = side(copy->src_type, copy->src_host, copy->src_device);
    size_t to_pitch = copy->dst_pitch ? copy->dst_pitch : copy->width;
    size_t from_pitch = copy->src_pitch ? copy->src_pitch : copy->width;
    if ((to && to_pitch < copy->width) || (from && from_pitch < copy->width))
        return CUDA_ERROR_INVALID_VALUE;
    move_rows(to ? to + copy->dst_y * to_pitch + copy->dst_x : 0, to_pitch,
              from ? from + copy->src_y * from_pitch + copy->src_x : 0, from_pitch, copy->width, copy->height);
    return CUDA_SUCCESS;
}

static CUresult copy_3d(const CUDA_MEMCPY3D *copy)
{
    TRY(ready());
    if (!copy)
        return CUDA_ERROR_INVALID_VALUE;
    CUdeviceptr to = side(copy->dst_type, copy->dst_host, copy->dst_device);
    CUdeviceptr from = side(copy->src_type, copy->src_host, copy->src_device);
    size_t to_pitch = copy->dst_pitch ? copy->dst_pitch : copy->width;
    size_t from_pitch = copy->src_pitch ? copy->src_pitch : copy->width;
    size_t to_rows = copy->dst_height ? copy->dst_height : copy->height;
    size_t from_rows = copy->src_height ? copy->src_height : copy->height;
    for (size_t z = 0; to && from && z < copy->depth; z++)
        move_rows(to + ((copy->dst_z + z) * to_rows + copy->dst_y) * to_pitch + copy->dst_x, to_pitch,
                  from + ((copy->src_z + z) * from_rows + copy->src_y) * from_pitch + copy->src_x, from_pitch, copy->width,
                  copy->height);
    return CUDA_SUCCESS;
}

#define COPY_SHAPE(name, version, type, act)                                                                                   \
    static CUresult act##_on(const type *copy, CUstream stream)                                                                \
    {                                                                                                                          \
        bool captured;                                                                                                         \
        TRY(on_stream(stream, NODE_MEMCPY, &captured));                                                                        \
        return captured ? CUDA_SUCCESS : act(copy);                                                                            \
    }                                                                                                                          \
    EXPORT CUresult name##version(const type *copy) { return act(copy); }                                                      \
    EXPORT CUresult name##version##_ptds(const type *copy) { return act(copy); }                                               \
    EXPORT CUresult name##Async##version(const type *copy, CUstream s) { return act##_on(copy, s); }                           \
    EXPORT CUresult name##Async##version##_ptsz(const type *copy, CUstream s) { return act##_on(copy, PER_THREAD(s)); }
COPY_SHAPE(cuMemcpy2D, _v2, CUDA_MEMCPY2D, copy_2d)
COPY_SHAPE(cuMemcpy3D, _v2, CUDA_MEMCPY3D, copy_3d)
EXPORT CUresult cuMemcpy2DUnaligned_v2(const CUDA_MEMCPY2D *copy) { return copy_2d(copy); }
EXPORT CUresult cuMemcpy2DUnaligned_v2_ptds(const CUDA_MEMCPY2D *copy) { return copy_2d(copy); }
EXPORT CUresult cuMemcpy3DPeer(const CUDA_MEMCPY3D *copy) { return copy_3d(copy); }
EXPORT CUresult cuMemcpy3DPeer_ptds(const CUDA_MEMCPY3D *copy) { return copy_3d(copy); }
EXPORT CUresult cuMemcpy3DPeerAsync(const CUDA_MEMCPY3D *copy, CUstream s) { return copy_3d_on(copy, s); }
EXPORT CUresult cuMemcpy3DPeerAsync_ptsz(const CUDA_MEMCPY3D *copy, CUstream s) { return copy_3d_on(copy, PER_THREAD(s)); }

/* Arrays take copies and keep none of them. */
#define ARRAY_COPY(name, ...)                                                                                                  \
    EXPORT CUresult name(__VA_ARGS__) { return ready(); }
ARRAY_COPY(cuMemcpyHtoA_v2, UNUSED CUarray t, UNUSED size_t o, UNUSED const void *f, UNUSED size_t n)
ARRAY_COPY(cuMemcpyAtoH_v2, UNUSED void *t, UNUSED CUarray f, UNUSED size_t o, UNUSED size_t n)
ARRAY_COPY(cuMemcpyDtoA_v2, UNUSED CUarray t, UNUSED size_t o, UNUSED CUdeviceptr f, UNUSED size_t n)
ARRAY_COPY(cuMemcpyAtoD_v2, UNUSED CUdeviceptr t, UNUSED CUarray f, UNUSED size_t o, UNUSED size_t n)

/* --------------------------------------------------------------------------------------------- fills */

static CUresult fill(CUstream handle, CUdeviceptr to, const void *pattern, size_t pattern_bytes, size_t count)
{
    struct stream *stream;
    TRY(stream_of(handle, &stream));
    if (count && !to)
        return CUDA_ERROR_INVALID_VALUE;
    bytes_fill(to, pattern, pattern_bytes, count);
    take_time(stream, pattern_bytes * count);
    return CUDA_SUCCESS;
}

static CUresult fill_2d(CUstream handle, CUdeviceptr to, size_t pitch, const void *pattern, size_t pattern_bytes, size_t width,
                        size_t rows)
{
    struct stream *stream;
    TRY(stream_of(handle, &stream));
    if (!to || (rows > 1 && pitch < width * pattern_bytes))
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t row = 0; row < rows && pattern_bytes * width * rows <= 64 * MIB; row++) /* as of one piece (address.c) */
        bytes_fill(to + row * pitch, pattern, pattern_bytes, width);
    take_time(stream, pattern_bytes * width * rows);
    return CUDA_SUCCESS;
}

#define FILL(bits, type)                                                                                                       \
    EXPORT CUresult cuMemsetD##bits##_v2(CUdeviceptr t, type v, size_t n) { return fill(NULL, t, &v, sizeof v, n); }           \
    EXPORT CUresult cuMemsetD##bits##_v2_ptds(CUdeviceptr t, type v, size_t n)                                                 \
    {                                                                                                                          \
        return fill(CU_STREAM_PER_THREAD, t, &v, sizeof v, n);                                                                 \
    }                                                                                                                          \
    EXPORT CUresult cuMemsetD##bits##Async(CUdeviceptr t, type v, size_t n, CUstream s)                                        \
    {                                                                                                                          \
        bool captured;                                                                                                         \
        TRY(on_stream(s, NODE_MEMSET, &captured));                                                                             \
        return captured ? CUDA_SUCCESS : fill(s, t, &v, sizeof v, n);                                                          \
    }                                                                                                                          \
    EXPORT CUresult cuMemsetD##bits##Async_ptsz(CUdeviceptr t, type v, size_t n, CUstream s)                                   \
    {                                                                                                                          \
        return cuMemsetD##bits##Async(t, v, n, PER_THREAD(s));                                                                 \
    }                                                                                                                          \
    EXPORT CUresult cuMemsetD2D##bits##_v2(CUdeviceptr t, size_t p, type v, size_t w, size_t h)                                \
    {                                                                                                                          \
        return fill_2d(NULL, t, p, &v, sizeof v, w, h);                                                                        \
    }                                                                                                                          \
    EXPORT CUresult cuMemsetD2D##bits##_v2_ptds(CUdeviceptr t, size_t p, type v, size_t w, size_t h)                           \
    {                                                                                                                          \
        return fill_2d(CU_STREAM_PER_THREAD, t, p, &v, sizeof v, w, h);                                                        \
    }                                                                                                                          \
    EXPORT CUresult cuMemsetD2D##bits##Async(CUdeviceptr t, size_t p, type v, size_t w, size_t h, CUstream s)                  \
    {                                                                                                                          \
        bool captured;                                                                                                         \
        TRY(on_stream(s, NODE_MEMSET, &captured));                                                                             \
        return captured ? CUDA_SUCCESS : fill_2d(s, t, p, &v, sizeof v, w, h);                                                 \
    }                                                                                                                          \
    EXPORT CUresult cuMemsetD2D##bits##Async_ptsz(CUdeviceptr t, size_t p, type v, size_t w, size_t h, CUstream s)             \
    {                                                                                                                          \
        return cuMemsetD2D##bits##Async(t, p, v, w, h, PER_THREAD(s));                                                         \
    }
FILL(8, unsigned char)
FILL(16, unsigned short)
FILL(32, unsigned)
