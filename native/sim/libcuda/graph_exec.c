/* Executable graphs: launching runs the nodes of the graph they were made of. */
#include "graph.h"

struct graph_exec {
    struct object object;
    struct graph *graph;
    bool free_on_launch;
};

EXPORT CUresult cuGraphInstantiateWithFlags(CUgraphExec *made, CUgraph graph, unsigned long long flags)
{
    struct context *context;
    TRY(context_current(&context));
    TRY(graph_of(graph));
    if (!made)
        return CUDA_ERROR_INVALID_VALUE;
    struct graph_exec *exec = object_new(OBJECT_GRAPH_EXEC, sizeof *exec, NULL);
    if (!exec)
        return CUDA_ERROR_OUT_OF_MEMORY;
    exec->graph = graph;
    exec->free_on_launch = flags & 1;
    graph->users++;
    *made = exec;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphInstantiate(CUgraphExec *made, CUgraph graph, CUgraphNode *error, char *log, size_t bytes)
{
    if (error)
        *error = NULL;
    if (log && bytes)
        *log = '\0';
    return cuGraphInstantiateWithFlags(made, graph, 0);
}

EXPORT CUresult cuGraphInstantiate_v2(CUgraphExec *made, CUgraph graph, CUgraphNode *error, char *log, size_t bytes)
{
    return cuGraphInstantiate(made, graph, error, log, bytes);
}

EXPORT CUresult cuGraphInstantiateWithParams(CUgraphExec *made, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *of)
{
    if (!of)
        return CUDA_ERROR_INVALID_VALUE;
    of->error_node = NULL;
    of->result = 0;
    return cuGraphInstantiateWithFlags(made, graph, of->flags);
}

EXPORT CUresult cuGraphInstantiateWithParams_ptsz(CUgraphExec *made, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *of)
{
    return cuGraphInstantiateWithParams(made, graph, of);
}

EXPORT CUresult cuGraphExecDestroy(CUgraphExec exec)
{
    TRY(driver_ready());
    if (!object_is(exec, OBJECT_GRAPH_EXEC))
        return CUDA_ERROR_INVALID_VALUE;
    struct graph *graph = exec->graph;
    object_free(exec);
    return --graph->users == 0 && graph->abandoned ? cuGraphDestroy(graph) : CUDA_SUCCESS;
}

static CUresult run(struct graph *graph, struct stream *stream, bool free_first);

static CUresult run_memory(const struct node *node, bool free_first)
{
    CUresult result = CUDA_SUCCESS;
    memory_lock();
    struct allocation *allocation = allocation_at(node->address);
    bool ours = allocation && allocation->kind == ALLOCATION_GRAPH;
    if (node->type == NODE_MEM_FREE)
        result = ours ? graph_memory_free(allocation) : CUDA_ERROR_INVALID_VALUE;
    else if (ours && allocation->live && !free_first)
        result = CUDA_ERROR_INVALID_VALUE; /* the last launch's memory was not freed */
    else
        result = ours && graph_memory_live(allocation) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
    memory_unlock();
    return result;
}

static CUresult run_node(const struct node *node, struct stream *stream, bool free_first)
{
    switch (node->type) {
    case NODE_KERNEL: stream_work(stream, node->duration_ns, node->width); return CUDA_SUCCESS;
    case NODE_GRAPH: return run(node->child, stream, free_first);
    case NODE_MEM_ALLOC:
    case NODE_MEM_FREE: return run_memory(node, free_first);
    case NODE_HOST: return task_add(stream, node->host.function, node->host.user_data);
    default: return CUDA_SUCCESS;
    }
}

/* Nodes run in the order in which they were added, which is one of those that their dependencies allow. */
static CUresult run(struct graph *graph, struct stream *stream, bool free_first)
{
    for (const struct node *node = graph->first; node; node = node->next)
        TRY(run_node(node, stream, free_first));
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphLaunch(CUgraphExec exec, CUstream handle)
{
    struct stream *stream;
    TRY(stream_of(handle, &stream));
    if (!object_is(exec, OBJECT_GRAPH_EXEC))
        return CUDA_ERROR_INVALID_VALUE;
    TRY(run(exec->graph, stream, exec->free_on_launch));
    sim_count_launch(SIM_LAUNCH_GRAPH);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphLaunch_ptsz(CUgraphExec exec, CUstream stream) { return cuGraphLaunch(exec, PER_THREAD(stream)); }

/* Physical memory comes with the first launch here, so an upload has nothing to do. */
EXPORT CUresult cuGraphUpload(CUgraphExec exec, CUstream handle)
{
    struct stream *stream;
    TRY(stream_of(handle, &stream));
    return object_is(exec, OBJECT_GRAPH_EXEC) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuGraphUpload_ptsz(CUgraphExec exec, CUstream stream) { return cuGraphUpload(exec, PER_THREAD(stream)); }

/* ---------------------------------------------------------------------------------- changing afterwards */

/* Another graph takes the place of the one it was made of. */
static CUresult update(CUgraphExec exec, CUgraph graph)
{
    TRY(graph_of(graph));
    if (!object_is(exec, OBJECT_GRAPH_EXEC))
        return CUDA_ERROR_INVALID_VALUE;
    struct graph *before = exec->graph;
    graph->users++;
    exec->graph = graph;
    return --before->users == 0 && before->abandoned ? cuGraphDestroy(before) : CUDA_SUCCESS;
}

EXPORT CUresult cuGraphExecUpdate_v2(CUgraphExec exec, CUgraph graph, void *result)
{
    *(int *)result = 0;
    return update(exec, graph);
}

EXPORT CUresult cuGraphExecUpdate(CUgraphExec exec, CUgraph graph, CUgraphNode *error_node, int *result)
{
    if (error_node)
        *error_node = NULL;
    if (result)
        *result = 0;
    return update(exec, graph);
}

static CUresult set_kernel(struct node *node, CUfunction function, const CUDA_KERNEL_NODE_PARAMS *kernel)
{
    struct context *context;
    TRY(context_current(&context));
    if (!object_is(node, OBJECT_NODE) || node->type != NODE_KERNEL || !object_is(function, OBJECT_FUNCTION))
        return CUDA_ERROR_INVALID_VALUE;
    node_set_kernel(node, context->device, function, kernel);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphKernelNodeSetParams_v2(CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *kernel)
{
    if (!kernel)
        return CUDA_ERROR_INVALID_VALUE;
    return set_kernel(node, kernel->function ? kernel->function : kernel->kernel, kernel);
}

EXPORT CUresult cuGraphKernelNodeSetParams(CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *kernel)
{
    return kernel ? set_kernel(node, kernel->function, kernel) : CUDA_ERROR_INVALID_VALUE;
}

/* An executable graph shares its nodes with the graph here, so this changes both. */
EXPORT CUresult cuGraphExecKernelNodeSetParams_v2(CUgraphExec exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *kernel)
{
    return object_is(exec, OBJECT_GRAPH_EXEC) ? cuGraphKernelNodeSetParams_v2(node, kernel) : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuGraphExecKernelNodeSetParams(CUgraphExec exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *kernel)
{
    return object_is(exec, OBJECT_GRAPH_EXEC) ? cuGraphKernelNodeSetParams(node, kernel) : CUDA_ERROR_INVALID_VALUE;
}
