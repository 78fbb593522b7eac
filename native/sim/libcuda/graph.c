/* Graphs: nodes with an order, made by hand or by capturing a stream. */
#include <stdlib.h>
#include <string.h>

#include "graph.h"

CUresult graph_of(CUgraph handle)
{
    TRY(driver_ready());
    return object_is(handle, OBJECT_GRAPH) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* ----------------------------------------------------------------------------------------------- nodes */

EXPORT CUresult cuGraphCreate(CUgraph *made, unsigned flags)
{
    TRY(driver_ready());
    if (!made || flags)
        return CUDA_ERROR_INVALID_VALUE;
    *made = object_new(OBJECT_GRAPH, sizeof **made, NULL);
    return *made ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static bool all_known(struct graph *graph, CUgraphNode const *after, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (!object_is(after[i], OBJECT_NODE) || after[i]->graph != graph)
            return false;
    return true;
}

CUresult node_new(struct graph *graph, int type, CUgraphNode const *after, size_t count, struct node **made)
{
    TRY(graph_of(graph));
    if ((count && !after) || !all_known(graph, after, count))
        return CUDA_ERROR_INVALID_VALUE;
    struct node *node = object_new(OBJECT_NODE, sizeof *node, NULL);
    if (!node)
        return CUDA_ERROR_OUT_OF_MEMORY;
    node->graph = graph;
    node->type = type;
    node->after_count = count;
    node->after = count ? malloc(count * sizeof *node->after) : NULL;
    if (node->after)
        memcpy(node->after, after, count * sizeof *node->after);
    node->before = graph->last;
    *(graph->last ? &graph->last->next : &graph->first) = node;
    graph->last = node;
    graph->node_count++;
    *made = node;
    return CUDA_SUCCESS;
}

static void node_free(struct node *node)
{
    struct graph *graph = node->graph;
    *(node->before ? &node->before->next : &graph->first) = node->next;
    *(node->next ? &node->next->before : &graph->last) = node->before;
    graph->node_count--;
    free(node->after);
    object_free(node);
}

EXPORT CUresult cuGraphDestroyNode(CUgraphNode node)
{
    TRY(driver_ready());
    if (!object_is(node, OBJECT_NODE))
        return CUDA_ERROR_INVALID_VALUE;
    node_free(node);
    return CUDA_SUCCESS;
}

/* Addresses of memory nodes go with the graph, unless their memory lives on. */
static void drop_memory(struct node *node)
{
    memory_lock();
    struct allocation *allocation = node->type == NODE_MEM_ALLOC ? allocation_at(node->address) : NULL;
    if (allocation && allocation->kind == ALLOCATION_GRAPH && !allocation->live)
        allocation_drop(allocation);
    memory_unlock();
}

EXPORT CUresult cuGraphDestroy(CUgraph graph)
{
    TRY(graph_of(graph));
    if (graph->users) { /* executable graphs are made of its nodes: it ends with the last of them */
        graph->abandoned = true;
        return CUDA_SUCCESS;
    }
    while (graph->first) {
        drop_memory(graph->first);
        node_free(graph->first);
    }
    object_free(graph);
    return CUDA_SUCCESS;
}

/* ------------------------------------------------------------------------------------ adding by hand */

#define AFTER CUgraphNode *made, CUgraph graph, CUgraphNode const *after, size_t count

void node_set_kernel(struct node *node, const struct device *device, const struct function *function,
                     const CUDA_KERNEL_NODE_PARAMS *kernel)
{
    node->duration_ns = kernel_duration(device, function, kernel->parameters, kernel->extra);
    node->width = grid_width(device, (uint64_t)kernel->grid_x * kernel->grid_y * kernel->grid_z,
                             (uint64_t)kernel->block_x * kernel->block_y * kernel->block_z);
}

static CUresult add_kernel(AFTER, const CUDA_KERNEL_NODE_PARAMS *kernel, CUfunction function)
{
    struct context *context;
    TRY(context_current(&context));
    if (!object_is(function, OBJECT_FUNCTION))
        return CUDA_ERROR_INVALID_VALUE;
    TRY(module_load(function->module, context->device));
    TRY(node_new(graph, NODE_KERNEL, after, count, made));
    node_set_kernel(*made, context->device, function, kernel);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphAddKernelNode_v2(AFTER, const CUDA_KERNEL_NODE_PARAMS *kernel)
{
    if (!kernel || !made)
        return CUDA_ERROR_INVALID_VALUE;
    return add_kernel(made, graph, after, count, kernel, kernel->function ? kernel->function : kernel->kernel);
}

EXPORT CUresult cuGraphAddKernelNode(AFTER, const CUDA_KERNEL_NODE_PARAMS *kernel)
{
    if (!kernel || !made)
        return CUDA_ERROR_INVALID_VALUE;
    return add_kernel(made, graph, after, count, kernel, kernel->function);
}

static CUresult add_alloc(AFTER, size_t bytes, int location, CUdeviceptr *address)
{
    struct device *device;
    TRY(device_of(location, &device));
    if (!bytes || !made)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(node_new(graph, NODE_MEM_ALLOC, after, count, made));
    memory_lock();
    struct allocation *allocation = allocation_new(bytes, ALLOCATION_GRAPH, NULL);
    if (allocation)
        allocation->device = device;
    memory_unlock();
    if (!allocation) {
        node_free(*made);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *address = (*made)->address = allocation->address;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphAddMemAllocNode(AFTER, CUDA_MEM_ALLOC_NODE_PARAMS *alloc)
{
    if (!alloc)
        return CUDA_ERROR_INVALID_VALUE;
    return add_alloc(made, graph, after, count, alloc->bytes, alloc->pool.location.id, &alloc->address);
}

EXPORT CUresult cuGraphAddMemFreeNode(AFTER, CUdeviceptr address)
{
    if (!made || !address)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(node_new(graph, NODE_MEM_FREE, after, count, made));
    (*made)->address = address;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphAddHostNode(AFTER, const CUDA_HOST_NODE_PARAMS *host)
{
    if (!made || !host || !host->function)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(node_new(graph, NODE_HOST, after, count, made));
    (*made)->host = *host;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphAddChildGraphNode(AFTER, CUgraph child)
{
    TRY(graph_of(child));
    TRY(node_new(graph, NODE_GRAPH, after, count, made));
    (*made)->child = child;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphAddEmptyNode(AFTER) { return node_new(graph, NODE_EMPTY, after, count, made); }

EXPORT CUresult cuGraphAddMemsetNode(AFTER, const CUDA_MEMSET_NODE_PARAMS *parameters, CUcontext context)
{
    (void)parameters, (void)context;
    return node_new(graph, NODE_MEMSET, after, count, made);
}

EXPORT CUresult cuGraphAddMemcpyNode(AFTER, const CUDA_MEMCPY3D *parameters, CUcontext context)
{
    (void)parameters, (void)context;
    return node_new(graph, NODE_MEMCPY, after, count, made);
}

EXPORT CUresult cuGraphAddEventRecordNode(AFTER, CUevent event)
{
    (void)event;
    return node_new(graph, NODE_EVENT_RECORD, after, count, made);
}

EXPORT CUresult cuGraphAddEventWaitNode(AFTER, CUevent event)
{
    (void)event;
    return node_new(graph, NODE_WAIT_EVENT, after, count, made);
}

EXPORT CUresult cuGraphAddNode(AFTER, CUgraphNodeParams *of)
{
    if (!of)
        return CUDA_ERROR_INVALID_VALUE;
    switch (of->type) {
    case NODE_KERNEL: return cuGraphAddKernelNode_v2(made, graph, after, count, &of->kernel);
    case NODE_HOST: return cuGraphAddHostNode(made, graph, after, count, &of->host);
    case NODE_GRAPH: return cuGraphAddChildGraphNode(made, graph, after, count, of->child);
    case NODE_MEM_ALLOC: return cuGraphAddMemAllocNode(made, graph, after, count, &of->alloc);
    case NODE_MEM_FREE: return cuGraphAddMemFreeNode(made, graph, after, count, of->free);
    default: return node_new(graph, of->type, after, count, made);
    }
}

EXPORT CUresult cuGraphAddNode_v2(CUgraphNode *made, CUgraph graph, CUgraphNode const *after, const void *edges, size_t count,
                                  CUgraphNodeParams *of)
{
    (void)edges;
    return cuGraphAddNode(made, graph, after, count, of);
}

EXPORT CUresult cuGraphAddNode_v3(CUgraphNode *made, CUgraph graph, CUgraphNode const *after, const void *edges, size_t count,
                                  CUgraphNodeParams *of)
{
    return cuGraphAddNode_v2(made, graph, after, edges, count, of);
}

/* ------------------------------------------------------------------------------------------ looking */

EXPORT CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode *nodes, size_t *count)
{
    size_t room = count ? *count : 0, found = 0;
    TRY(graph_of(graph));
    if (!count)
        return CUDA_ERROR_INVALID_VALUE;
    *count = graph->node_count;
    for (struct node *node = graph->first; nodes && node && found < room; node = node->next)
        nodes[found++] = node;
    if (nodes)
        *count = found;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphGetRootNodes(CUgraph graph, CUgraphNode *nodes, size_t *count)
{
    size_t found = 0;
    TRY(graph_of(graph));
    if (!count)
        return CUDA_ERROR_INVALID_VALUE;
    for (struct node *node = graph->first; node; node = node->next) {
        if (node->after_count)
            continue;
        if (nodes && found < *count)
            nodes[found] = node;
        found++;
    }
    *count = found;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphNodeGetType(CUgraphNode node, int *type)
{
    TRY(driver_ready());
    if (!object_is(node, OBJECT_NODE) || !type)
        return CUDA_ERROR_INVALID_VALUE;
    *type = node->type;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphChildGraphNodeGetGraph(CUgraphNode node, CUgraph *graph)
{
    TRY(driver_ready());
    if (!object_is(node, OBJECT_NODE) || node->type != NODE_GRAPH || !graph)
        return CUDA_ERROR_INVALID_VALUE;
    *graph = node->child;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphMemAllocNodeGetParams(CUgraphNode node, CUDA_MEM_ALLOC_NODE_PARAMS *out)
{
    TRY(driver_ready());
    if (!object_is(node, OBJECT_NODE) || node->type != NODE_MEM_ALLOC || !out)
        return CUDA_ERROR_INVALID_VALUE;
    memset(out, 0, sizeof *out);
    memory_lock();
    const struct allocation *allocation = allocation_at(node->address);
    if (allocation) {
        out->bytes = allocation->bytes;
        out->pool.location = (CUmemLocation){CU_MEM_LOCATION_TYPE_DEVICE, allocation->device->ordinal};
    }
    memory_unlock();
    out->address = node->address;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphMemFreeNodeGetParams(CUgraphNode node, CUdeviceptr *address)
{
    TRY(driver_ready());
    if (!object_is(node, OBJECT_NODE) || node->type != NODE_MEM_FREE || !address)
        return CUDA_ERROR_INVALID_VALUE;
    *address = node->address;
    return CUDA_SUCCESS;
}
