/* Graphs and their nodes. */
#ifndef GPUSLICE_SIM_GRAPH_H
#define GPUSLICE_SIM_GRAPH_H

#include "driver.h"

enum node_type {
    NODE_KERNEL,
    NODE_MEMCPY,
    NODE_MEMSET,
    NODE_HOST,
    NODE_GRAPH,
    NODE_EMPTY,
    NODE_WAIT_EVENT,
    NODE_EVENT_RECORD,
    NODE_MEM_ALLOC = 10,
    NODE_MEM_FREE = 11
};

struct node {
    struct object object;
    struct graph *graph;
    int type;
    struct node **after; /* what must be finished before it */
    size_t after_count;
    struct node *before, *next; /* in the order of adding */
    uint64_t duration_ns;
    uint32_t width; /* of the card, of SIM_WHOLE_CARD */
    uint64_t address;
    CUDA_HOST_NODE_PARAMS host;
    struct graph *child;
};

struct graph {
    struct object object;
    struct node *first, *last;
    size_t node_count;
    unsigned users; /* executable graphs made of it */
    bool abandoned; /* destroyed while in use */
};

CUresult graph_of(CUgraph handle);
CUresult node_new(struct graph *graph, int type, CUgraphNode const *after, size_t count, struct node **made);
void node_set_kernel(struct node *node, const struct device *device, const struct function *function,
                     const CUDA_KERNEL_NODE_PARAMS *kernel);
bool graph_memory_live(struct allocation *allocation); /* under memory_lock: gives a node's addresses memory */
CUresult cuGraphCreate(CUgraph *made, unsigned flags);
CUresult cuGraphDestroy(CUgraph graph);
CUresult cuGraphAddMemAllocNode(CUgraphNode *made, CUgraph graph, CUgraphNode const *after, size_t count,
                                CUDA_MEM_ALLOC_NODE_PARAMS *alloc);

/* First thing in a call that could disturb a capture: while one goes on, the driver refuses it and gives the capture up,
 * unless the thread took such calls upon itself by cuThreadExchangeStreamCaptureMode. The manual names allocations and
 * cuEventQuery; questions to pools are known to be among them. */
CUresult capture_permits(void);
/* An event of what is captured was asked after: that invalidates the capture (CUDA C++ Programming Guide, "Prohibited and
 * Unhandled Operations" of stream capture). */
CUresult capture_asked(const struct graph *graph);

#endif
