/* Graphs with memory nodes. The driver takes their memory when a graph is instantiated, uploaded or launched, and
 * keeps it for the next graph: what it tells to have reserved is charged. Before a call that may take memory, the
 * most it can take is reserved: the sum of the graph's allocations. */
#include "core.h"
#include "own.h"
#include "pools.h"
#include "throttle.h"

enum { CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT = 0, LAUNCHED = 1, NODES = 4096, DEEPEST = 8 };

static struct gs_table executables; /* → the most one takes, its device */

void gs_forget_graphs(void) { gs_table_forget(&executables); }

/* ---- adding nodes ---- */

/* A node that was captured may not say where: then it is the current device. -1 for host memory. */
static CUdevice device_of(const CUDA_MEM_ALLOC_NODE_PARAMS *parameters)
{
    CUdevice device = -1;
    if (parameters->poolProps.location.type == CU_MEM_LOCATION_TYPE_DEVICE)
        return parameters->poolProps.location.id;
    if (parameters->poolProps.location.type == 0)
        DRIVER(cuCtxGetDevice)(&device);
    return device;
}

static struct gs_card *see(const CUDA_MEM_ALLOC_NODE_PARAMS *parameters)
{
    CUdevice device = device_of(parameters);
    struct gs_card *card = gs_card_of_device(device);
    if (card)
        gs_graph_memory_seen(device, card);
    return card;
}

/* One that never fits is refused here, where the program still knows what it asked for. */
static bool never_fits(const CUDA_MEM_ALLOC_NODE_PARAMS *parameters)
{
    struct gs_card *card = see(parameters);
    bool too_large = card && parameters->bytesize > card->limit_bytes;
    if (too_large)
        gs_refuse(card);
    return too_large;
}

int cuGraphAddMemAllocNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *before, size_t count,
                           CUDA_MEM_ALLOC_NODE_PARAMS *parameters)
{
    if (gs_enter_cuda() && parameters && never_fits(parameters))
        return CUDA_ERROR_OUT_OF_MEMORY;
    return DRIVER(cuGraphAddMemAllocNode)(node, graph, before, count, parameters);
}

static bool refuse_node(const CUgraphNodeParams *parameters)
{
    return gs_enter_cuda() && parameters && parameters->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC &&
           never_fits(&parameters->of.alloc);
}

int cuGraphAddNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *before, size_t count,
                   CUgraphNodeParams *parameters)
{
    if (refuse_node(parameters))
        return CUDA_ERROR_OUT_OF_MEMORY;
    return DRIVER(cuGraphAddNode)(node, graph, before, count, parameters);
}

int cuGraphAddNode_v2(CUgraphNode *node, CUgraph graph, const CUgraphNode *before, const void *edges, size_t count,
                      CUgraphNodeParams *parameters)
{
    if (refuse_node(parameters))
        return CUDA_ERROR_OUT_OF_MEMORY;
    return DRIVER(cuGraphAddNode_v2)(node, graph, before, edges, count, parameters);
}

int cuGraphAddNode_v3(CUgraphNode *node, CUgraph graph, const CUgraphNode *before, const void *edges, size_t count,
                      CUgraphNodeParams *parameters)
{
    if (refuse_node(parameters))
        return CUDA_ERROR_OUT_OF_MEMORY;
    return DRIVER(cuGraphAddNode_v3)(node, graph, before, edges, count, parameters);
}

/* ---- how much a graph may take ---- */

struct demand {
    uint64_t bytes;
    CUdevice device;
};

static void add_graph(struct demand *demand, CUgraph graph, int depth);

static void add_node(struct demand *demand, CUgraphNode node, int depth)
{
    int type;
    CUgraph child;
    CUDA_MEM_ALLOC_NODE_PARAMS parameters;
    if (DRIVER(cuGraphNodeGetType)(node, &type) != CUDA_SUCCESS)
        return;
    if (type == CU_GRAPH_NODE_TYPE_GRAPH && DRIVER(cuGraphChildGraphNodeGetGraph)(node, &child) == CUDA_SUCCESS)
        add_graph(demand, child, depth + 1);
    if (type == CU_GRAPH_NODE_TYPE_MEM_ALLOC &&
        DRIVER(cuGraphMemAllocNodeGetParams)(node, &parameters) == CUDA_SUCCESS && see(&parameters)) {
        demand->bytes += gs_round_up(parameters.bytesize, GS_PAGE_BYTES);
        demand->device = device_of(&parameters);
    }
}

static void add_graph(struct demand *demand, CUgraph graph, int depth)
{
    size_t count = 0;
    if (depth > DEEPEST || DRIVER(cuGraphGetNodes)(graph, NULL, &count) != CUDA_SUCCESS || !count)
        return;
    CUgraphNode *nodes = gs_map_private(count * sizeof *nodes);
    size_t got = count;
    if (nodes && DRIVER(cuGraphGetNodes)(graph, nodes, &got) == CUDA_SUCCESS)
        for (size_t i = 0; i < got && i < count; i++)
            add_node(demand, nodes[i], depth);
    if (nodes)
        gs_unmap(nodes, count * sizeof *nodes);
}

static struct demand demand_of(CUgraph graph)
{
    struct demand demand = {0, -1};
    if (gs_graph_memory_exists())
        add_graph(&demand, graph, 0);
    return demand;
}

/* What is reserved for graphs already serves the next; what is in use does not, but for a graph's own repetition. */
static uint64_t missing(struct demand demand, bool again)
{
    uint64_t reserved = 0, used = 0;
    if (!gs_ask_graph_memory(demand.device, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT, &reserved))
        return demand.bytes;
    if (!again)
        gs_ask_graph_memory(demand.device, CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT, &used);
    uint64_t idle = reserved > used ? reserved - used : 0;
    return demand.bytes > idle ? demand.bytes - idle : 0;
}

struct step {
    struct gs_card *card;
    struct demand demand;
    uint64_t reserved;
};

static bool begin(struct step *step, struct demand demand, bool again)
{
    *step = (struct step){.demand = demand};
    if (!demand.bytes)
        return true;
    step->card = gs_card_of_device(demand.device);
    step->reserved = missing(demand, again);
    return !step->card || gs_reserve(step->card, step->reserved);
}

static void finish(const struct step *step)
{
    if (step->card)
        gs_graph_settle(step->demand.device, step->card, step->reserved);
}

/* ---- instantiating ---- */

static void remember(CUgraphExec made, struct demand demand)
{
    if (demand.bytes)
        gs_table_put(&executables, &(struct gs_entry){.key = (uint64_t)(uintptr_t)made,
                                                      .bytes = demand.bytes,
                                                      .owner = (uint64_t)demand.device});
}

#define INSTANTIATE(symbol, call)                                                                                      \
    do {                                                                                                               \
        struct step step;                                                                                              \
        if (!gs_enter_cuda() || gs_likely(!gs_graph_memory_exists()))                                                  \
            return DRIVER(symbol) call;                                                                                \
        struct demand demand = demand_of(graph);                                                                       \
        if (!begin(&step, demand, false))                                                                              \
            return CUDA_ERROR_OUT_OF_MEMORY;                                                                           \
        int result = DRIVER(symbol) call;                                                                              \
        finish(&step);                                                                                                 \
        if (result == CUDA_SUCCESS)                                                                                    \
            remember(*made, demand);                                                                                   \
        return result;                                                                                                 \
    } while (0)

int cuGraphInstantiate(CUgraphExec *made, CUgraph graph, CUgraphNode *failed, char *log, size_t room)
{
    INSTANTIATE(cuGraphInstantiate, (made, graph, failed, log, room));
}

int cuGraphInstantiate_v2(CUgraphExec *made, CUgraph graph, CUgraphNode *failed, char *log, size_t room)
{
    INSTANTIATE(cuGraphInstantiate_v2, (made, graph, failed, log, room));
}

int cuGraphInstantiateWithFlags(CUgraphExec *made, CUgraph graph, unsigned long long flags)
{
    INSTANTIATE(cuGraphInstantiateWithFlags, (made, graph, flags));
}

int cuGraphInstantiateWithParams(CUgraphExec *made, CUgraph graph, void *parameters)
{
    INSTANTIATE(cuGraphInstantiateWithParams, (made, graph, parameters));
}

int cuGraphInstantiateWithParams_ptsz(CUgraphExec *made, CUgraph graph, void *parameters)
{
    INSTANTIATE(cuGraphInstantiateWithParams_ptsz, (made, graph, parameters));
}

int cuGraphExecDestroy(CUgraphExec graph)
{
    struct gs_entry entry;
    bool known = gs_enter_cuda() && gs_graph_memory_exists() &&
                 gs_table_take(&executables, (uint64_t)(uintptr_t)graph, &entry);
    int result = DRIVER(cuGraphExecDestroy)(graph);
    if (known)
        gs_pools_changed();
    return result;
}

int cuDeviceGraphMemTrim(CUdevice device)
{
    bool active = gs_enter_cuda();
    int result = DRIVER(cuDeviceGraphMemTrim)(device);
    if (active)
        gs_pools_changed();
    return result;
}

/* ---- uploading and launching ---- */

#define RUN(symbol, call)                                                                                              \
    do {                                                                                                               \
        struct gs_entry entry;                                                                                         \
        struct step step;                                                                                              \
        if (gs_likely(!gs_graph_memory_exists()) || !gs_enter_cuda() ||                                                \
            !gs_table_get(&executables, (uint64_t)(uintptr_t)graph, &entry))                                           \
            return DRIVER(symbol) call;                                                                                \
        if (!begin(&step, (struct demand){entry.bytes, (CUdevice)entry.owner}, entry.kind == LAUNCHED))               \
            return CUDA_ERROR_OUT_OF_MEMORY;                                                                           \
        int result = DRIVER(symbol) call;                                                                              \
        finish(&step);                                                                                                 \
        if (result == CUDA_SUCCESS && entry.kind != LAUNCHED) {                                                        \
            entry.kind = LAUNCHED;                                                                                     \
            gs_table_put(&executables, &entry);                                                                        \
        }                                                                                                              \
        return result;                                                                                                 \
    } while (0)

static int upload(CUgraphExec graph, CUstream stream)
{
    RUN(cuGraphUpload, (graph, stream));
}

static int upload_own(CUgraphExec graph, CUstream stream)
{
    RUN(cuGraphUpload_ptsz, (graph, stream));
}

int cuGraphUpload(CUgraphExec graph, CUstream stream)
{
    gs_enter_cuda();
    return upload(graph, stream);
}

int cuGraphUpload_ptsz(CUgraphExec graph, CUstream stream)
{
    gs_enter_cuda();
    return upload_own(graph, stream);
}

static int launch(CUgraphExec graph, CUstream stream)
{
    RUN(cuGraphLaunch, (graph, stream));
}

static int launch_own(CUgraphExec graph, CUstream stream)
{
    RUN(cuGraphLaunch_ptsz, (graph, stream));
}

int cuGraphLaunch(CUgraphExec graph, CUstream stream) { THROTTLED(launch(graph, stream), stream, false, gs_work_key(graph, 0)); }
int cuGraphLaunch_ptsz(CUgraphExec graph, CUstream stream) { THROTTLED(launch_own(graph, stream), stream, true, gs_work_key(graph, 0)); }
