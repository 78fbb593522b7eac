/* Graphs with memory nodes. The driver allocates their memory when a graph is instantiated, uploaded or launched, and
 * keeps it for the next graph, so what it reports as reserved is charged. Before a call that may allocate, the most that it
 * can take is reserved: on each device, the sum of the graph's allocations there. */
#include "hooks/launches.h"
#include "policy/pool_accounts.h"
#include "policy/reserve.h"
#include "system/at_fork.h"

enum { LAUNCHED = 1 };

static struct gs_table executables GS_TABLE_PER_PROCESS; /* executable graph → the most that it takes, in `owner` */

/* ---- adding nodes ---- */

/* The node's device; -1 for host memory. A captured node may not name a location, which means the current device. */
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
    struct gs_card *card = device < GS_DEVICES ? gs_card_of_device(device) : NULL;
    if (card)
        gs_graph_memory_seen(device, card);
    return card;
}

/* An allocation that can never fit is refused when its node is added, where the program can still relate the error to it. */
static bool never_fits(const CUDA_MEM_ALLOC_NODE_PARAMS *parameters)
{
    struct gs_card *card = see(parameters);
    bool too_large = card && parameters->bytesize > card->limit_bytes;
    if (too_large)
        gs_refuse(card);
    return too_large;
}

static bool refuse_node(const CUgraphNodeParams *node)
{
    return node && node->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC && never_fits(&node->of.alloc);
}

#define ADD(symbol, parameters, call, refused)                                                                                 \
    int symbol parameters { return (refused) ? CUDA_ERROR_OUT_OF_MEMORY : DRIVER(symbol) call; }

ADD(cuGraphAddMemAllocNode,
    (CUgraphNode * node, CUgraph graph, const CUgraphNode *before, size_t count, CUDA_MEM_ALLOC_NODE_PARAMS *alloc),
    (node, graph, before, count, alloc), alloc &&never_fits(alloc))
ADD(cuGraphAddNode, (CUgraphNode * node, CUgraph graph, const CUgraphNode *before, size_t count, CUgraphNodeParams *of),
    (node, graph, before, count, of), refuse_node(of))
ADD(cuGraphAddNode_v2,
    (CUgraphNode * node, CUgraph graph, const CUgraphNode *before, const void *edges, size_t count, CUgraphNodeParams *of),
    (node, graph, before, edges, count, of), refuse_node(of))
ADD(cuGraphAddNode_v3,
    (CUgraphNode * node, CUgraph graph, const CUgraphNode *before, const void *edges, size_t count, CUgraphNodeParams *of),
    (node, graph, before, edges, count, of), refuse_node(of))

/* ---- how much a graph may take ---- */

struct amounts {
    uint64_t devices; /* one bit for each device that has one */
    uint64_t bytes[GS_DEVICES];
};

static void add_demand(struct amounts *demand, CUdevice device, uint64_t bytes)
{
    demand->devices |= UINT64_C(1) << device;
    if (__builtin_add_overflow(demand->bytes[device], bytes, &demand->bytes[device]))
        demand->bytes[device] = UINT64_MAX;
}

/* The next device after this one; GS_DEVICES after the last. Starts with -1. */
static CUdevice next_device(uint64_t devices, CUdevice device)
{
    uint64_t left = device < GS_DEVICES - 1 ? devices >> (device + 1) << (device + 1) : 0;
    return left ? (CUdevice)__builtin_ctzll(left) : GS_DEVICES;
}

#define FOR_EACH_DEVICE(device, devices)                                                                                       \
    for (CUdevice device = next_device(devices, -1); device < GS_DEVICES; device = next_device(devices, device))

/* Returns the graph that is inside this node, if one is. */
static CUgraph add_node(struct amounts *demand, CUgraphNode node)
{
    int type;
    CUgraph child = NULL;
    CUDA_MEM_ALLOC_NODE_PARAMS parameters;
    if (DRIVER(cuGraphNodeGetType)(node, &type) != CUDA_SUCCESS)
        return NULL;
    if (type == CU_GRAPH_NODE_TYPE_MEM_ALLOC && DRIVER(cuGraphMemAllocNodeGetParams)(node, &parameters) == CUDA_SUCCESS &&
        see(&parameters))
        add_demand(demand, device_of(&parameters), gs_round_up(parameters.bytesize, GS_PAGE_BYTES));
    return type == CU_GRAPH_NODE_TYPE_GRAPH && DRIVER(cuGraphChildGraphNodeGetGraph)(node, &child) == CUDA_SUCCESS ? child
                                                                                                                   : NULL;
}

/* The nodes of one graph, of which `next` comes next; `outer` is the graph that contains it. Not on the stack, which may be small,
 * while graphs may be inside each other to any depth. */
struct nodes {
    struct nodes *outer;
    size_t bytes, count, next;
    CUgraphNode of[];
};

static struct nodes *enter(struct nodes *outer, CUgraph graph)
{
    size_t count = 0;
    if (DRIVER(cuGraphGetNodes)(graph, NULL, &count) != CUDA_SUCCESS || !count)
        return outer;
    size_t bytes = sizeof(struct nodes) + count * sizeof(CUgraphNode);
    struct nodes *nodes = gs_map_private(bytes);
    if (!nodes)
        return outer;
    *nodes = (struct nodes){.outer = outer, .bytes = bytes, .count = count};
    if (DRIVER(cuGraphGetNodes)(graph, nodes->of, &nodes->count) != CUDA_SUCCESS)
        nodes->count = 0;
    nodes->count = nodes->count < count ? nodes->count : count;
    return nodes;
}

static struct nodes *leave(struct nodes *nodes)
{
    struct nodes *outer = nodes->outer;
    gs_unmap(nodes, nodes->bytes);
    return outer;
}

static void add_graph(struct amounts *demand, CUgraph graph)
{
    struct nodes *nodes = enter(NULL, graph);
    while (nodes) {
        CUgraph inner = nodes->next < nodes->count ? add_node(demand, nodes->of[nodes->next++]) : NULL;
        nodes = inner ? enter(nodes, inner) : nodes->next < nodes->count ? nodes : leave(nodes);
    }
}

static struct amounts demand_of(CUgraph graph)
{
    struct amounts demand = {0};
    if (gs_graph_memory_exists())
        add_graph(&demand, graph);
    return demand;
}

/* Memory that is already reserved for graphs serves the next graph, unless it is in use. A repeated launch of the same graph
 * uses its own memory again. */
static uint64_t missing(uint64_t bytes, CUdevice device, bool again)
{
    uint64_t reserved = 0, used = 0;
    if (!gs_ask_graph_memory(device, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT, &reserved))
        return bytes;
    if (!again)
        gs_ask_graph_memory(device, CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT, &used);
    uint64_t idle = reserved > used ? reserved - used : 0;
    return bytes > idle ? bytes - idle : 0;
}

static void finish(const struct amounts *reserved)
{
    FOR_EACH_DEVICE(device, reserved->devices) {
        gs_graph_settle(device, gs_card_of_device(device), reserved->bytes[device]);
    }
}

/* False if one of the devices refused; then nothing stays reserved on any of them. */
static bool begin(struct amounts *reserved, const struct amounts *demand, bool again)
{
    reserved->devices = 0;
    FOR_EACH_DEVICE(device, demand->devices) {
        reserved->bytes[device] = missing(demand->bytes[device], device, again);
        if (!gs_reserve(gs_card_of_device(device), reserved->bytes[device])) {
            finish(reserved);
            return false;
        }
        reserved->devices |= UINT64_C(1) << device;
    }
    return true;
}

/* ---- instantiating ---- */

static void remember(CUgraphExec made, const struct amounts *demand)
{
    struct amounts *kept = demand->devices ? gs_map_private(sizeof *kept) : NULL;
    if (!kept)
        return;
    *kept = *demand;
    gs_table_put(&executables, &(struct gs_entry){.key = gs_key(made), .owner = gs_key(kept)});
}

static struct amounts *amounts_of(const struct gs_entry *executable) { return (struct amounts *)(uintptr_t)executable->owner; }

/* To be called before the driver's call, since afterwards another graph may get the same address. */
static bool forget_graph(CUgraphExec graph)
{
    struct gs_entry executable;
    bool known = gs_table_take(&executables, gs_key(graph), &executable);
    if (known)
        gs_unmap(amounts_of(&executable), sizeof(struct amounts));
    return known;
}

#define INSTANTIATE(symbol, parameters, call)                                                                                  \
    int symbol parameters                                                                                                      \
    {                                                                                                                          \
        struct amounts reserved;                                                                                               \
        if (gs_likely(!gs_graph_memory_exists()))                                                                              \
            return DRIVER(symbol) call;                                                                                        \
        struct amounts demand = demand_of(graph);                                                                              \
        if (!begin(&reserved, &demand, false))                                                                                 \
            return CUDA_ERROR_OUT_OF_MEMORY;                                                                                   \
        int result = DRIVER(symbol) call;                                                                                      \
        finish(&reserved);                                                                                                     \
        if (result == CUDA_SUCCESS)                                                                                            \
            remember(*made, &demand);                                                                                          \
        return result;                                                                                                         \
    }

INSTANTIATE(cuGraphInstantiate, (CUgraphExec * made, CUgraph graph, CUgraphNode *failed, char *log, size_t room),
            (made, graph, failed, log, room))
INSTANTIATE(cuGraphInstantiate_v2, (CUgraphExec * made, CUgraph graph, CUgraphNode *failed, char *log, size_t room),
            (made, graph, failed, log, room))
INSTANTIATE(cuGraphInstantiateWithFlags, (CUgraphExec * made, CUgraph graph, unsigned long long flags), (made, graph, flags))
INSTANTIATE(cuGraphInstantiateWithParams, (CUgraphExec * made, CUgraph graph, void *parameters), (made, graph, parameters))
INSTANTIATE(cuGraphInstantiateWithParams_ptsz, (CUgraphExec * made, CUgraph graph, void *parameters), (made, graph, parameters))

int cuGraphExecDestroy(CUgraphExec graph)
{
    bool known = gs_graph_memory_exists() && forget_graph(graph);
    int result = DRIVER(cuGraphExecDestroy)(graph);
    if (known)
        gs_pools_changed();
    return result;
}

int cuDeviceGraphMemTrim(CUdevice device)
{
    int result = DRIVER(cuDeviceGraphMemTrim)(device);
    gs_pools_changed();
    return result;
}

/* ---- uploading and launching ---- */

#define RUN(of, symbol)                                                                                                        \
    of(CUgraphExec graph, CUstream stream)                                                                                     \
    {                                                                                                                          \
        struct gs_entry entry;                                                                                                 \
        struct amounts reserved;                                                                                               \
        if (gs_likely(!gs_graph_memory_exists()) || !gs_table_get(&executables, gs_key(graph), &entry))                        \
            return DRIVER(symbol)(graph, stream);                                                                              \
        if (!begin(&reserved, amounts_of(&entry), entry.kind == LAUNCHED))                                                     \
            return CUDA_ERROR_OUT_OF_MEMORY;                                                                                   \
        int result = DRIVER(symbol)(graph, stream);                                                                            \
        finish(&reserved);                                                                                                     \
        if (result == CUDA_SUCCESS && entry.kind != LAUNCHED) {                                                                \
            entry.kind = LAUNCHED;                                                                                             \
            gs_table_put(&executables, &entry);                                                                                \
        }                                                                                                                      \
        return result;                                                                                                         \
    }

RUN(int cuGraphUpload, cuGraphUpload)
RUN(int cuGraphUpload_ptsz, cuGraphUpload_ptsz)
RUN(static int launch, cuGraphLaunch)
RUN(static int launch_own, cuGraphLaunch_ptsz)
#define LAUNCH(symbol, launch, own_stream)                                                                                     \
    THROTTLED(symbol, (CUgraphExec graph, CUstream stream), (graph, stream), !gs_graph_memory_exists(), launch(graph, stream), \
              stream, own_stream, gs_work_key(graph, 0))
LAUNCH(cuGraphLaunch, launch, false)
LAUNCH(cuGraphLaunch_ptsz, launch_own, true)
