/* Stream capture: while a stream captures, work on it becomes nodes of a graph, each after the one before. */
#include <string.h>

#include "graph.h"

static CUresult add(struct stream *stream, int type, struct node **made)
{
    struct node *last = stream->captured_last;
    TRY(node_new(stream->capturing, type, &last, last != NULL, made));
    stream->captured_last = *made;
    return CUDA_SUCCESS;
}

CUresult capture_kernel(struct stream *stream, uint64_t duration_ns, uint32_t width)
{
    struct node *node;
    TRY(add(stream, NODE_KERNEL, &node));
    node->duration_ns = duration_ns;
    node->width = width;
    return CUDA_SUCCESS;
}

CUresult capture_simple(struct stream *stream, int node_type)
{
    struct node *node;
    return add(stream, node_type, &node);
}

CUresult capture_host(struct stream *stream, CUhostFn function, void *user_data)
{
    struct node *node;
    TRY(add(stream, NODE_HOST, &node));
    node->host = (CUDA_HOST_NODE_PARAMS){function, user_data};
    return CUDA_SUCCESS;
}

CUresult capture_allocate(struct stream *stream, size_t bytes, CUdeviceptr *address)
{
    struct node *last = stream->captured_last;
    CUDA_MEM_ALLOC_NODE_PARAMS alloc = {.bytes = bytes};
    alloc.pool.location = (CUmemLocation){CU_MEM_LOCATION_TYPE_DEVICE, stream->device->ordinal};
    TRY(cuGraphAddMemAllocNode(&stream->captured_last, stream->capturing, &last, last != NULL, &alloc));
    *address = alloc.address;
    return CUDA_SUCCESS;
}

CUresult capture_free(struct stream *stream, CUdeviceptr address)
{
    struct node *node;
    TRY(add(stream, NODE_MEM_FREE, &node));
    node->address = address;
    return CUDA_SUCCESS;
}

enum { GLOBAL, THREAD_LOCAL, RELAXED };
static _Thread_local int mode_of_thread;
static _Atomic unsigned captures;

struct question {
    pthread_t asker;
    int mode;
    bool refused;
};

static void ask_stream(struct object *object, void *with)
{
    struct stream *stream = (struct stream *)object;
    struct question *question = with;
    if (!stream->capturing || stream->capture_mode == RELAXED)
        return;
    bool ours = pthread_equal(stream->capture_thread, question->asker);
    bool anybodys = question->mode == GLOBAL && stream->capture_mode == GLOBAL;
    if (!ours && !anybodys)
        return;
    stream->capture_spoiled = true;
    question->refused = true;
}

CUresult capture_permits(void)
{
    struct question question = {pthread_self(), mode_of_thread, false};
    if (captures && mode_of_thread != RELAXED)
        objects_each(OBJECT_STREAM, ask_stream, &question);
    return question.refused ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
}

static void spoil(struct object *object, void *graph)
{
    struct stream *stream = (struct stream *)object;
    stream->capture_spoiled |= stream->capturing == graph;
}

CUresult capture_asked(const struct graph *graph)
{
    objects_each(OBJECT_STREAM, spoil, (void *)graph);
    return CUDA_ERROR_CAPTURED_EVENT;
}

static CUresult begin(CUstream handle, CUgraph graph, int mode)
{
    struct stream *stream;
    TRY(stream_of(handle, &stream));
    if (handle == NULL || handle == CU_STREAM_LEGACY || stream->capturing)
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (mode < 0 || mode > 2)
        return CUDA_ERROR_INVALID_VALUE;
    if (!graph)
        TRY(cuGraphCreate(&graph, 0));
    stream->capturing = graph;
    stream->captured_last = NULL;
    stream->capture_mode = mode;
    stream->capture_thread = pthread_self();
    stream->capture_spoiled = false;
    captures++;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamBeginCapture_v2(CUstream stream, int mode) { return begin(stream, NULL, mode); }
EXPORT CUresult cuStreamBeginCapture_v2_ptsz(CUstream stream, int mode) { return begin(PER_THREAD(stream), NULL, mode); }
EXPORT CUresult cuStreamBeginCapture(CUstream stream) { return begin(stream, NULL, 0); }
EXPORT CUresult cuStreamBeginCapture_ptsz(CUstream stream) { return begin(PER_THREAD(stream), NULL, 0); }

EXPORT CUresult cuStreamBeginCaptureToGraph(CUstream stream, CUgraph graph, const CUgraphNode *after, const void *edges,
                                            size_t count, int mode)
{
    (void)after, (void)edges, (void)count;
    TRY(graph_of(graph));
    return begin(stream, graph, mode);
}

EXPORT CUresult cuStreamBeginCaptureToGraph_ptsz(CUstream stream, CUgraph graph, const CUgraphNode *after, const void *edges,
                                                 size_t count, int mode)
{
    return cuStreamBeginCaptureToGraph(PER_THREAD(stream), graph, after, edges, count, mode);
}

/* Streams that joined by waiting for a captured event leave with the one that began. */
static void leave(struct object *object, void *graph)
{
    struct stream *stream = (struct stream *)object;
    if (stream->capturing == graph)
        stream->capturing = NULL;
}

EXPORT CUresult cuStreamEndCapture(CUstream handle, CUgraph *graph)
{
    struct stream *stream;
    TRY(stream_of(handle, &stream));
    if (!stream->capturing)
        return CUDA_ERROR_ILLEGAL_STATE;
    struct graph *captured = stream->capturing;
    objects_each(OBJECT_STREAM, leave, captured);
    captures -= captures > 0;
    if (graph)
        *graph = stream->capture_spoiled ? NULL : captured;
    return stream->capture_spoiled ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
}

EXPORT CUresult cuStreamEndCapture_ptsz(CUstream stream, CUgraph *graph)
{
    return cuStreamEndCapture(PER_THREAD(stream), graph);
}

EXPORT CUresult cuStreamIsCapturing(CUstream handle, int *status)
{
    struct stream *stream;
    TRY(stream_of(handle, &stream));
    if (!status)
        return CUDA_ERROR_INVALID_VALUE;
    *status = stream->capturing != NULL;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamIsCapturing_ptsz(CUstream stream, int *status)
{
    return cuStreamIsCapturing(PER_THREAD(stream), status);
}

EXPORT CUresult cuStreamGetCaptureInfo_v2(CUstream handle, int *status, uint64_t *id, CUgraph *graph, const CUgraphNode **after,
                                          size_t *count)
{
    struct stream *stream;
    TRY(stream_of(handle, &stream));
    if (!status)
        return CUDA_ERROR_INVALID_VALUE;
    *status = stream->capturing != NULL;
    if (id)
        *id = stream->id;
    if (graph)
        *graph = stream->capturing;
    if (after)
        *after = &stream->captured_last;
    if (count)
        *count = stream->captured_last != NULL;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamGetCaptureInfo_v2_ptsz(CUstream stream, int *status, uint64_t *id, CUgraph *graph,
                                               const CUgraphNode **after, size_t *count)
{
    return cuStreamGetCaptureInfo_v2(PER_THREAD(stream), status, id, graph, after, count);
}

EXPORT CUresult cuStreamGetCaptureInfo_v3(CUstream stream, int *status, uint64_t *id, CUgraph *graph, const CUgraphNode **after,
                                          const void **edges, size_t *count)
{
    if (edges)
        *edges = NULL;
    return cuStreamGetCaptureInfo_v2(stream, status, id, graph, after, count);
}

EXPORT CUresult cuStreamGetCaptureInfo_v3_ptsz(CUstream stream, int *status, uint64_t *id, CUgraph *graph,
                                               const CUgraphNode **after, const void **edges, size_t *count)
{
    return cuStreamGetCaptureInfo_v3(PER_THREAD(stream), status, id, graph, after, edges, count);
}

EXPORT CUresult cuStreamGetCaptureInfo(CUstream stream, int *status, uint64_t *id)
{
    return cuStreamGetCaptureInfo_v2(stream, status, id, NULL, NULL, NULL);
}

EXPORT CUresult cuStreamGetCaptureInfo_ptsz(CUstream stream, int *status, uint64_t *id)
{
    return cuStreamGetCaptureInfo(PER_THREAD(stream), status, id);
}

EXPORT CUresult cuStreamUpdateCaptureDependencies(CUstream handle, CUgraphNode *after, size_t count, unsigned flags)
{
    struct stream *stream;
    (void)flags;
    TRY(stream_of(handle, &stream));
    if (!stream->capturing)
        return CUDA_ERROR_ILLEGAL_STATE;
    if (count)
        stream->captured_last = after[count - 1];
    return CUDA_SUCCESS;
}

EXPORT CUresult cuThreadExchangeStreamCaptureMode(int *mode)
{
    TRY(driver_ready());
    if (!mode || *mode < 0 || *mode > 2)
        return CUDA_ERROR_INVALID_VALUE;
    int before = mode_of_thread;
    mode_of_thread = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}
