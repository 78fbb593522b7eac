/* A program as tests want it: reads commands, calls the driver the way it was told to find it, answers each with one
 * line. "ok ..." or "error N" (the CUresult), "absent" where that way does not lead to the function.
 *
 *     worker WAY [VERSION]     ways: linked, default, dlsym, dlvsym, deepbind, proc, proc2, proc2-own
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "driver/driver_abi.h"

#ifndef RTLD_DEEPBIND /* musl has neither */
#define RTLD_DEEPBIND 0
#endif
__attribute__((weak)) void *dlvsym(void *, const char *, const char *);

enum { EITHER, LEGACY, OWN };
enum function {
#define HOOK(library, symbol, name, since, stream, parameters) FN_##symbol,
#define BORROW(library, symbol, parameters) FN_##symbol,
#include "driver/hooks.def"
    FUNCTIONS
};
#define HOOK(library, symbol, name, since, stream, parameters)                                                                 \
    typedef int(*type_##symbol) parameters;                                                                                    \
    __attribute__((weak)) int symbol parameters;
#define BORROW(library, symbol, parameters) HOOK(library, symbol, "", 0, EITHER, parameters)
#include "driver/hooks.def"

static const struct {
    const char *symbol, *name;
    int since, stream;
    void *linked;
} functions[FUNCTIONS] = {
#define HOOK(library, symbol, name, since, stream, parameters) {#symbol, name, since, stream, (void *)symbol},
#define BORROW(library, symbol, parameters) {#symbol, "", 0, EITHER, (void *)symbol},
#include "driver/hooks.def"
};

static const char *way;
static int version = 12020;
static void *driver, *plug;

static void *by_name(const char *symbol) { return dlsym(driver, symbol); }

typedef int (*proc_function)(const char *, void **, int, uint64_t);
typedef int (*proc2_function)(const char *, void **, int, uint64_t, int *);

static void *by_proc(int index)
{
    void *found = NULL;
    int status = 0;
    if (!functions[index].name[0] || functions[index].since > version)
        return NULL;
    if (strcmp(way, "proc") == 0) {
        proc_function ask = (proc_function)by_name("cuGetProcAddress");
        return ask && ask(functions[index].name, &found, version, 0) == 0 ? found : NULL;
    }
    proc2_function ask = (proc2_function)by_name("cuGetProcAddress_v2");
    uint64_t flags = strcmp(way, "proc2-own") == 0 ? 2 : 0;
    return ask && ask(functions[index].name, &found, version, flags, &status) == 0 ? found : NULL;
}

/* The version under which every glibc of this architecture has dlsym: how tools get at libc's own. */
#if defined(__x86_64__)
#define OLDEST "GLIBC_2.2.5"
#else
#define OLDEST "GLIBC_2.17"
#endif

static void *find(int index)
{
    const char *symbol = functions[index].symbol;
    if (strncmp(way, "proc", 4) == 0)
        return by_proc(index);
    if (strcmp(way, "linked") == 0)
        return functions[index].linked;
    if (strcmp(way, "default") == 0)
        return dlsym(RTLD_DEFAULT, symbol);
    if (strcmp(way, "dlvsym") == 0) {
        void *(*look)(void *, const char *) = (void *(*)(void *, const char *))dlvsym(RTLD_NEXT, "dlsym", OLDEST);
        return look ? look(driver, symbol) : NULL;
    }
    if (strcmp(way, "deepbind") == 0) {
        void *(*look)(const char *) = (void *(*)(const char *))dlsym(plug, "plug_function");
        return look ? look(symbol) : NULL;
    }
    return by_name(symbol);
}

static void *function(int index)
{
    static void *cache[FUNCTIONS];
    if (!cache[index])
        cache[index] = find(index);
    return cache[index];
}

/* Calls by the chosen way; -1 where it does not lead there. */
#define CALL(symbol, ...) (function(FN_##symbol) ? ((type_##symbol)function(FN_##symbol))(__VA_ARGS__) : -1)
/* Calls that only set the scene. */
#define PLAIN(type, symbol, ...) ((type)by_name(symbol))(__VA_ARGS__)

static bool is(const char *a, const char *b) { return strcmp(a, b) == 0; }

/* cuGetProcAddress gives a program the form of the version it was built for, and it must call that form. */
static bool by_version(int since) { return strncmp(way, "proc", 4) == 0 && version >= since; }

static bool own_stream(void) { return is(way, "proc2-own"); }

#define HELD 65536
static struct {
    char kind[16];
    unsigned long long value, address;
    size_t bytes;
    void *pointer;
} held[HELD];

static CUmemoryPool own_pool;

static int make_pool(int device)
{
    CUmemPoolProps properties = {.allocType = 1, .handleTypes = 1, .location = {CU_MEM_LOCATION_TYPE_DEVICE, device}};
    return own_pool ? 0 : CALL(cuMemPoolCreate, &own_pool, &properties);
}

static int take_from_pool(int id, size_t bytes, int made, CUmemoryPool pool)
{
    return made ? made : CALL(cuMemAllocFromPoolAsync, &held[id].value, bytes, pool, NULL);
}

/* Of no place: it comes to the card that uses it. */
static int make_managed_pool(int id)
{
    CUmemPoolProps properties = {.allocType = 2};
    return CALL(cuMemPoolCreate, (CUmemoryPool *)&held[id].pointer, &properties);
}

/* On a stream of another card than the thread's. */
static int allocate_on_stream_of(int ordinal, int id, size_t bytes)
{
    CUcontext context, popped;
    CUstream stream = NULL;
    strcpy(held[id].kind, "async");
    int result = CALL(cuDevicePrimaryCtxRetain, &context, ordinal);
    if (result)
        return result;
    PLAIN(int (*)(CUcontext), "cuCtxPushCurrent_v2", context);
    result = PLAIN(int (*)(CUstream *, unsigned), "cuStreamCreate", &stream, 1);
    PLAIN(int (*)(CUcontext *), "cuCtxPopCurrent_v2", &popped);
    return result ? result : CALL(cuMemAllocAsync, &held[id].value, bytes, stream);
}

static int drop_managed_pool(int id)
{
    int result = CALL(cuMemFreeAsync, held[id].value, NULL);
    return result ? result : CALL(cuMemPoolDestroy, held[id].pointer);
}

static int current_device(void)
{
    int device = 0;
    PLAIN(int (*)(int *), "cuCtxGetDevice", &device);
    return device;
}

static int make_physical_on(int device, int id, size_t bytes)
{
    CUmemAllocationProp properties = {.type = 1, .requestedHandleTypes = 1, .location = {CU_MEM_LOCATION_TYPE_DEVICE, device}};
    return CALL(cuMemCreate, &held[id].value, bytes, &properties, 0);
}

static int make_physical(int id, size_t bytes) { return make_physical_on(current_device(), id, bytes); }

static int map_physical(int id, size_t bytes)
{
    PLAIN(int (*)(CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long), "cuMemAddressReserve", &held[id].address,
          bytes, 0, 0, 0);
    int result = CALL(cuMemMap, held[id].address, bytes, 0, held[id].value, 0);
    if (result != 0)
        PLAIN(int (*)(CUdeviceptr, size_t), "cuMemAddressFree", held[id].address, bytes);
    return result;
}

/* By a handle that may have been given back. */
static int map_again(int id, unsigned long long handle, size_t bytes)
{
    held[id].value = handle;
    held[id].bytes = bytes;
    return map_physical(id, bytes);
}

static int make_array(int id, size_t bytes, int shape)
{
    CUDA_ARRAY_DESCRIPTOR flat = {.Width = 65536, .Height = bytes / 65536 / 4, .Format = 0x20, .NumChannels = 1};
    CUDA_ARRAY3D_DESCRIPTOR solid = {.Width = 1024, .Height = 1024, .Depth = bytes >> 22, .Format = 0x20, .NumChannels = 1};
    if (shape == 1)
        return CALL(cuArrayCreate_v2, (CUarray *)&held[id].pointer, &flat);
    if (shape == 3)
        return CALL(cuArray3DCreate_v2, (CUarray *)&held[id].pointer, &solid);
    return CALL(cuMipmappedArrayCreate, (CUmipmappedArray *)&held[id].pointer, &solid, 3);
}

/* ---- memory that only a group or a tile keeps ---- */

struct group {
    unsigned devices;
    size_t bytes;
    unsigned long long handle_types, flags;
};

static int bind_member(int id, unsigned long long group, size_t offset, size_t bytes)
{
    if (by_version(13010))
        return CALL(cuMulticastBindMem_v2, group, current_device(), offset, held[id].value, 0, bytes, 0);
    return CALL(cuMulticastBindMem, group, offset, held[id].value, 0, bytes, 0);
}

static int bind_address(int id, unsigned long long group, size_t offset, size_t bytes)
{
    if (by_version(13010))
        return CALL(cuMulticastBindAddr_v2, group, current_device(), offset, held[id].address, bytes, 0);
    return CALL(cuMulticastBindAddr, group, offset, held[id].address, bytes, 0);
}

/* The group is what the number stands for; its member has neither a handle nor a mapping of its own. */
static int make_group(int id, size_t bytes, bool by_address)
{
    unsigned long long group = 0;
    struct group properties = {.devices = 1, .bytes = bytes, .handle_types = 1};
    int result = CALL(cuMulticastCreate, &group, &properties);
    if (!result)
        result = PLAIN(int (*)(unsigned long long, int), "cuMulticastAddDevice", group, current_device());
    if (result)
        return result;
    held[id].value = 0;
    result = make_physical(id, bytes);
    if (!result && by_address)
        result = map_physical(id, bytes);
    if (!result)
        result = by_address ? bind_address(id, group, 0, bytes) : bind_member(id, group, 0, bytes);
    if (by_address && held[id].address)
        CALL(cuMemUnmap, held[id].address, bytes);
    if (held[id].value)
        CALL(cuMemRelease, held[id].value);
    if (result)
        CALL(cuMemRelease, group);
    held[id].value = group;
    return result;
}

static int map_tile(int id, unsigned long long handle, int operation)
{
    CUarrayMapInfo tile = {.resource = held[id].pointer,
                           .subresource.sparseLevel = {.extentWidth = 64, .extentHeight = 64, .extentDepth = 1},
                           .memOperationType = operation,
                           .memHandle = handle,
                           .deviceBitMask = 1u << current_device()};
    return own_stream() ? CALL(cuMemMapArrayAsync_ptsz, &tile, 1, NULL) : CALL(cuMemMapArrayAsync, &tile, 1, NULL);
}

static int make_tile(int id, size_t bytes)
{
    CUDA_ARRAY3D_DESCRIPTOR sparse = {
        .Width = 4096, .Height = 4096, .Format = 0x20, .NumChannels = 4, .Flags = CUDA_ARRAY3D_SPARSE};
    int result = CALL(cuArray3DCreate_v2, (CUarray *)&held[id].pointer, &sparse);
    if (result)
        return result;
    held[id].value = 0;
    result = make_physical(id, bytes);
    if (!result)
        result = map_tile(id, held[id].value, CU_MEM_OPERATION_TYPE_MAP);
    if (held[id].value)
        CALL(cuMemRelease, held[id].value);
    if (result)
        CALL(cuArrayDestroy, held[id].pointer);
    return result;
}

/* ---- graphs ---- */

struct graph {
    CUgraph graph;
    CUgraphExec executable;
    CUgraphNode node;
};

static int add_node(struct graph *made, CUgraphNodeParams *parameters)
{
    if (by_version(13040))
        return CALL(cuGraphAddNode_v3, &made->node, made->graph, NULL, NULL, 0, parameters);
    if (by_version(12030))
        return CALL(cuGraphAddNode_v2, &made->node, made->graph, NULL, NULL, 0, parameters);
    return CALL(cuGraphAddNode, &made->node, made->graph, NULL, 0, parameters);
}

static int add_allocation(struct graph *made, int id, size_t bytes, bool general)
{
    CUDA_MEM_ALLOC_NODE_PARAMS parameters = {
        .poolProps = {.allocType = 1, .location = {CU_MEM_LOCATION_TYPE_DEVICE, current_device()}}, .bytesize = bytes};
    CUgraphNodeParams node = {.type = CU_GRAPH_NODE_TYPE_MEM_ALLOC, .of.alloc = parameters};
    int result = PLAIN(int (*)(CUgraph *, unsigned), "cuGraphCreate", &made->graph, 0);
    if (!result)
        result = general ? add_node(made, &node) : CALL(cuGraphAddMemAllocNode, &made->node, made->graph, NULL, 0, &parameters);
    held[id].value = general ? node.of.alloc.dptr : parameters.dptr;
    return result;
}

/* Memory on the current card, and a page on the next one. */
static int add_allocations_on_two(struct graph *made, int id, size_t bytes)
{
    CUDA_MEM_ALLOC_NODE_PARAMS page = {
        .poolProps = {.allocType = 1, .location = {CU_MEM_LOCATION_TYPE_DEVICE, current_device() + 1}}, .bytesize = 1};
    int result = add_allocation(made, id, bytes, false);
    return result ? result : CALL(cuGraphAddMemAllocNode, &made->node, made->graph, NULL, 0, &page);
}

static int capture_allocation(struct graph *made, int id, size_t bytes)
{
    CUstream stream;
    int result = PLAIN(int (*)(CUstream *, unsigned), "cuStreamCreate", &stream, 1), ended;
    if (!result)
        result = PLAIN(int (*)(CUstream, int), "cuStreamBeginCapture_v2", stream, 2);
    if (result)
        return result;
    result = own_stream() ? CALL(cuMemAllocAsync_ptsz, &held[id].value, bytes, stream)
                          : CALL(cuMemAllocAsync, &held[id].value, bytes, stream);
    ended = PLAIN(int (*)(CUstream, CUgraph *), "cuStreamEndCapture", stream, &made->graph);
    PLAIN(int (*)(CUstream), "cuStreamDestroy_v2", stream);
    return result ? result : ended;
}

static int run_graph(struct graph *made)
{
    int result = own_stream() ? CALL(cuGraphUpload_ptsz, made->executable, NULL) : CALL(cuGraphUpload, made->executable, NULL);
    if (result)
        return result;
    return own_stream() ? CALL(cuGraphLaunch_ptsz, made->executable, NULL) : CALL(cuGraphLaunch, made->executable, NULL);
}

static int make_graph(int id, size_t bytes, const char *kind)
{
    struct graph *made = calloc(1, sizeof *made);
    int result = is(kind, "captured")       ? capture_allocation(made, id, bytes)
                 : is(kind, "graph-on-two") ? add_allocations_on_two(made, id, bytes)
                                            : add_allocation(made, id, bytes, is(kind, "node"));
    if (!result)
        result = CALL(cuGraphInstantiateWithFlags, &made->executable, made->graph, 0);
    if (!result)
        result = run_graph(made);
    held[id].pointer = made;
    return result;
}

static int drop_graph(int id)
{
    struct graph *made = held[id].pointer;
    int result = CALL(cuMemFree_v2, held[id].value);
    CALL(cuGraphExecDestroy, made->executable);
    PLAIN(int (*)(CUgraph), "cuGraphDestroy", made->graph);
    CALL(cuDeviceGraphMemTrim, current_device());
    free(made);
    return result;
}

/* ---- what the driver takes for itself ---- */

/* A fat binary of that size, of which the simulated driver reads no more than the head. */
struct module_image {
    unsigned magic;
    unsigned short version, header_bytes;
    unsigned long long bytes;
    char room[64];
};

static int load_module(int id, size_t bytes)
{
    struct module_image image = {0xba55ed50, 1, 16, bytes, {0}};
    return CALL(cuModuleLoadData, (CUmodule *)&held[id].pointer, &image);
}

struct resource {
    int type;
    unsigned char room[140];
};

static int make_green(int id)
{
    struct resource all = {0};
    void *description = NULL;
    int result = PLAIN(int (*)(int, struct resource *, int), "cuDeviceGetDevResource", current_device(), &all, 1);
    if (!result)
        result = PLAIN(int (*)(void **, struct resource *, unsigned), "cuDevResourceGenerateDesc", &description, &all, 1);
    return result ? result : CALL(cuGreenCtxCreate, (CUgreenCtx *)&held[id].pointer, description, current_device(), 1);
}

static int make_context(int id)
{
    CUcontext *context = (CUcontext *)&held[id].pointer;
    if (by_version(12050))
        return CALL(cuCtxCreate_v4, context, NULL, 0, current_device());
    if (by_version(11040))
        return CALL(cuCtxCreate_v3, context, NULL, 0, 0, current_device());
    return CALL(cuCtxCreate_v2, context, 0, current_device());
}

static int synchronize(void)
{
    CUcontext context = NULL;
    PLAIN(int (*)(CUcontext *), "cuCtxGetCurrent", &context);
    return by_version(13000) ? CALL(cuCtxSynchronize_v2, context) : CALL(cuCtxSynchronize);
}

static int allocate(int id, const char *kind, size_t bytes)
{
    size_t pitch;
    strcpy(held[id].kind, kind);
    held[id].bytes = bytes;
    if (is(kind, "plain"))
        return CALL(cuMemAlloc_v2, &held[id].value, bytes);
    if (is(kind, "pitch"))
        return CALL(cuMemAllocPitch_v2, &held[id].value, &pitch, 1000, (bytes + 1023) / 1024, 4);
    if (is(kind, "managed"))
        return CALL(cuMemAllocManaged, &held[id].value, bytes, 1);
    if (is(kind, "async") && is(way, "proc2-own"))
        return CALL(cuMemAllocAsync_ptsz, &held[id].value, bytes, NULL);
    if (is(kind, "async"))
        return CALL(cuMemAllocAsync, &held[id].value, bytes, NULL);
    if (is(kind, "pool")) {
        int made = make_pool(current_device());
        return take_from_pool(id, bytes, made, own_pool);
    }
    if (is(kind, "managed-pool")) {
        int made = make_managed_pool(id);
        return take_from_pool(id, bytes, made, held[id].pointer);
    }
    if (is(kind, "physical"))
        return make_physical(id, bytes);
    if (is(kind, "mapped")) { /* the handle goes at once: only the mapping keeps it */
        int result = make_physical(id, bytes);
        if (!result)
            result = map_physical(id, bytes);
        if (held[id].value)
            CALL(cuMemRelease, held[id].value);
        return result;
    }
    if (is(kind, "array"))
        return make_array(id, bytes, 1);
    if (is(kind, "array3d"))
        return make_array(id, bytes, 3);
    if (is(kind, "mipmap"))
        return make_array(id, bytes, 0);
    if (is(kind, "graph") || is(kind, "graph-on-two") || is(kind, "node") || is(kind, "captured"))
        return make_graph(id, bytes, kind);
    if (is(kind, "group"))
        return make_group(id, bytes, false);
    if (is(kind, "group-addr"))
        return make_group(id, bytes, true);
    if (is(kind, "tile"))
        return make_tile(id, bytes);
    if (is(kind, "context"))
        return make_context(id);
    if (is(kind, "green"))
        return make_green(id);
    if (is(kind, "module"))
        return load_module(id, bytes);
    return -2;
}

static int release(int id)
{
    const char *kind = held[id].kind;
    if (is(kind, "async") && is(way, "proc2-own"))
        return CALL(cuMemFreeAsync_ptsz, held[id].value, NULL);
    if (is(kind, "async") || is(kind, "pool"))
        return CALL(cuMemFreeAsync, held[id].value, NULL);
    if (is(kind, "managed-pool"))
        return drop_managed_pool(id);
    if (is(kind, "their-pool"))
        return CALL(cuMemPoolDestroy, held[id].pointer);
    if (is(kind, "physical"))
        return CALL(cuMemRelease, held[id].value);
    if (is(kind, "mapped"))
        return CALL(cuMemUnmap, held[id].address, held[id].bytes);
    if (is(kind, "array") || is(kind, "array3d"))
        return CALL(cuArrayDestroy, held[id].pointer);
    if (is(kind, "mipmap"))
        return CALL(cuMipmappedArrayDestroy, held[id].pointer);
    if (is(kind, "graph") || is(kind, "node") || is(kind, "captured"))
        return drop_graph(id);
    if (is(kind, "group") || is(kind, "group-addr"))
        return CALL(cuMemRelease, held[id].value);
    if (is(kind, "tile")) {
        int result = map_tile(id, 0, CU_MEM_OPERATION_TYPE_UNMAP);
        CALL(cuArrayDestroy, held[id].pointer);
        return result;
    }
    if (is(kind, "context"))
        return CALL(cuCtxDestroy_v2, held[id].pointer);
    if (is(kind, "green"))
        return CALL(cuGreenCtxDestroy, held[id].pointer);
    if (is(kind, "module"))
        return CALL(cuModuleUnload, held[id].pointer);
    if (is(kind, "import"))
        return CALL(cuIpcCloseMemHandle, held[id].value);
    return CALL(cuMemFree_v2, held[id].value);
}

static void answer(int result)
{
    if (result == 0)
        puts("ok");
    else if (result == -1)
        puts("absent");
    else
        printf("error %d\n", result);
}

static int start(int ordinal)
{
    int device;
    CUcontext context;
    int result = PLAIN(int (*)(unsigned), "cuInit", 0);
    if (!result)
        result = PLAIN(int (*)(int *, int), "cuDeviceGet", &device, ordinal);
    if (!result)
        result = CALL(cuDevicePrimaryCtxRetain, &context, device);
    if (!result)
        result = PLAIN(int (*)(CUcontext), "cuCtxSetCurrent", context);
    return result;
}

/* Past everything that has a name: a table of the driver's that nobody documents. */
static const void *const *private_table(void)
{
    static const char id[] = "gpusim: memory 1"; /* of which the driver reads 16 bytes */
    const void *table = NULL;
    int (*ask)(const void **, const void *) = (int (*)(const void **, const void *))by_name("cuGetExportTable");
    return ask && ask(&table, id) == 0 ? (const void *const *)table + 1 : NULL;
}

static int start_unseen(int ordinal)
{
    const void *const *entries = private_table();
    CUcontext context;
    int result = PLAIN(int (*)(unsigned), "cuInit", 0);
    if (!result)
        result = ((int (*)(CUcontext *, int))entries[1])(&context, ordinal);
    if (!result)
        result = PLAIN(int (*)(CUcontext), "cuCtxSetCurrent", context);
    return result;
}

/* Code that comes to the card without a call that one could stand in front of. */
static int load_unseen(unsigned long long bytes)
{
    struct module_image image = {0xba55ed50, 1, 16, bytes, {0}};
    CUmodule module;
    return ((int (*)(CUmodule *, const void *))private_table()[2])(&module, &image);
}

static void tell_info(void)
{
    size_t free_bytes = 0, total = 0;
    int result = CALL(cuMemGetInfo_v2, &free_bytes, &total);
    if (result)
        answer(result);
    else
        printf("ok %zu %zu\n", free_bytes, total);
}

static void tell_total(int ordinal)
{
    size_t total = 0;
    int result = CALL(cuDeviceTotalMem_v2, &total, ordinal);
    if (result)
        answer(result);
    else
        printf("ok %zu\n", total);
}

/* ---- threads: each allocates and frees until told how often it got something ---- */

struct thread {
    pthread_t thread;
    CUcontext context;
    const char *kind;
    size_t bytes;
    int rounds, granted, refused, odd;
};

static void *churn(void *argument)
{
    struct thread *self = argument;
    PLAIN(int (*)(CUcontext), "cuCtxSetCurrent", self->context);
    for (int i = 0; i < self->rounds; i++) {
        CUdeviceptr address = 0;
        bool async = is(self->kind, "async");
        int result = async ? CALL(cuMemAllocAsync, &address, self->bytes, NULL) : CALL(cuMemAlloc_v2, &address, self->bytes);
        self->granted += result == 0;
        self->refused += result == 2;
        self->odd += result != 0 && result != 2;
        if (!result && (async ? CALL(cuMemFreeAsync, address, NULL) : CALL(cuMemFree_v2, address)))
            self->odd++;
    }
    return NULL;
}

static void run_threads(int count, int rounds, size_t bytes, const char *kind)
{
    struct thread threads[64] = {0};
    CUcontext context;
    int granted = 0, refused = 0, odd = 0;
    PLAIN(int (*)(CUcontext *), "cuCtxGetCurrent", &context);
    for (int i = 0; i < count; i++) {
        threads[i] = (struct thread){.context = context, .kind = kind, .rounds = rounds, .bytes = bytes};
        pthread_create(&threads[i].thread, NULL, churn, &threads[i]);
    }
    for (int i = 0; i < count; i++) {
        pthread_join(threads[i].thread, NULL);
        granted += threads[i].granted;
        refused += threads[i].refused;
        odd += threads[i].odd;
    }
    printf("ok %d %d %d\n", granted, refused, odd);
}

/* ---- a command that another thread obeys meanwhile ---- */

static void obey(char *line);
static pthread_t beside;
static char beside_line[256];
static CUcontext beside_context;

static void *obey_beside(void *unused)
{
    PLAIN(int (*)(CUcontext), "cuCtxSetCurrent", beside_context);
    obey(beside_line);
    return unused;
}

/* Its answer is the second line. */
static void begin_beside(const char *line)
{
    snprintf(beside_line, sizeof beside_line, "%s", line);
    PLAIN(int (*)(CUcontext *), "cuCtxGetCurrent", &beside_context);
    answer(pthread_create(&beside, NULL, obey_beside, NULL));
}

static void end_beside(void) { pthread_join(beside, NULL); }

/* ---- work ---- */

static double seconds(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

static CUfunction kernel(void)
{
    static const char image[] = ".version 6.0\n.target sm_70\n.address_size 64\n.visible .entry work() { ret; }\n";
    static CUfunction made;
    CUmodule module;
    if (!made && CALL(cuModuleLoadData, &module, image) == 0)
        PLAIN(int (*)(CUfunction *, CUmodule, const char *), "cuModuleGetFunction", &made, module, "work");
    return made;
}

/* A library whose code comes to the card with the kernel's first launch, as the runtime has it since 12. */
static int launch_lazily(unsigned long long bytes)
{
    struct module_image image = {0xba55ed50, 1, 16, bytes, {0}};
    CUlibrary library;
    CUkernel work;
    int result = CALL(cuLibraryLoadData, &library, &image, NULL, NULL, 0, NULL, NULL, 0);
    if (!result)
        result = PLAIN(int (*)(CUkernel *, CUlibrary, const char *), "cuLibraryGetKernel", &work, library, "work");
    for (int i = 0; !result && i < 3; i++)
        result = CALL(cuLaunchKernel, (CUfunction)work, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL);
    return result ? result : synchronize();
}

static CUgraphExec one_kernel_graph(CUfunction work)
{
    CUstream stream;
    CUgraph graph;
    CUgraphExec made = NULL;
    PLAIN(int (*)(CUstream *, unsigned), "cuStreamCreate", &stream, 1);
    PLAIN(int (*)(CUstream, int), "cuStreamBeginCapture_v2", stream, 2);
    CALL(cuLaunchKernel, work, 1, 1, 1, 32, 1, 1, 0, stream, NULL, NULL);
    PLAIN(int (*)(CUstream, CUgraph *), "cuStreamEndCapture", stream, &graph);
    CALL(cuGraphInstantiateWithFlags, &made, graph, 0);
    return made;
}

/* One of four, in turn. */
static CUstream next_stream(void)
{
    static CUstream streams[4];
    static unsigned next;
    CUstream *stream = &streams[next++ % 4];
    if (!*stream)
        PLAIN(int (*)(CUstream *, unsigned), "cuStreamCreate", stream, 1);
    return *stream;
}

#define HALF_BYTES ((size_t)256 << 20)
/* 256 MiB to fill, and as much behind it to copy there. */
static CUdeviceptr halves(void)
{
    static CUdeviceptr both;
    if (!both)
        CALL(cuMemAlloc_v2, &both, 2 * HALF_BYTES);
    return both;
}

static int launch_once(const char *how, CUfunction work, CUgraphExec graph)
{
    CUlaunchConfig config = {.gridDimX = 1, .gridDimY = 1, .gridDimZ = 1, .blockDimX = 32, .blockDimY = 1, .blockDimZ = 1};
    if (is(how, "graph"))
        return CALL(cuGraphLaunch, graph, NULL);
    if (is(how, "cooperative"))
        return CALL(cuLaunchCooperativeKernel, work, 1, 1, 1, 32, 1, 1, 0, NULL, NULL);
    if (is(how, "ex"))
        return CALL(cuLaunchKernelEx, &config, work, NULL, NULL);
    if (is(how, "fill"))
        return CALL(cuMemsetD8Async, halves(), 1, HALF_BYTES, NULL);
    if (is(how, "fill-rows"))
        return CALL(cuMemsetD2D32_v2, halves(), 1 << 20, 1, 1 << 18, HALF_BYTES >> 20);
    if (is(how, "copy"))
        return CALL(cuMemcpyDtoDAsync_v2, halves(), halves() + HALF_BYTES, HALF_BYTES, NULL);
    if (is(how, "copy-any"))
        return CALL(cuMemcpyAsync, halves(), halves() + HALF_BYTES, HALF_BYTES, NULL);
    if (is(how, "streams"))
        return CALL(cuLaunchKernel, work, 1, 1, 1, 32, 1, 1, 0, next_stream(), NULL, NULL);
    return CALL(cuLaunchKernel, work, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL);
}

/* Launches for so long; waits for the device after every `every` of them (0: never), and idles `pause_us` then. */
static void burn(double for_s, int every, int pause_us, const char *how)
{
    CUfunction work = kernel();
    CUgraphExec graph = is(how, "graph") ? one_kernel_graph(work) : NULL;
    double until = seconds() + for_s;
    int launched = 0, failed = 0;
    while (work && seconds() < until) {
        failed += launch_once(how, work, graph) != 0;
        launched++;
        if (every && launched % every == 0) {
            synchronize();
            if (pause_us)
                usleep((useconds_t)pause_us);
        }
        if (!every && launched % 64 == 0)
            while (PLAIN(int (*)(CUstream), "cuStreamQuery", NULL) == 600 && seconds() < until)
                usleep(100); /* a queue has an end: the driver lets a program run ahead by so much */
    }
    printf("ok %d %d\n", launched, failed);
}

/* One kernel and the wait for it; how many nanoseconds that took. */
static void request(void)
{
    double began = seconds();
    int failed = launch_once("kernel", kernel(), NULL) != 0;
    synchronize();
    printf("ok %lld %d\n", (long long)((seconds() - began) * 1e9), failed);
}

/* Records launches in a graph, in the mode that forbids other calls meanwhile; how long that took, in milliseconds. */
static void capture_launches(int count)
{
    CUfunction work = kernel();
    CUstream stream;
    CUgraph graph = NULL;
    int failed = PLAIN(int (*)(CUstream *, unsigned), "cuStreamCreate", &stream, 1);
    double began = seconds();
    failed += PLAIN(int (*)(CUstream, int), "cuStreamBeginCapture_v2", stream, 0) != 0;
    for (int i = 0; i < count; i++)
        failed += CALL(cuLaunchKernel, work, 1, 1, 1, 32, 1, 1, 0, stream, NULL, NULL) != 0;
    failed += PLAIN(int (*)(CUstream, CUgraph *), "cuStreamEndCapture", stream, &graph) != 0;
    printf("ok %d %d\n", (int)((seconds() - began) * 1000), failed);
}

/* Another thread of the program takes, frees and waits on its own stream meanwhile, as it may. */
static void *work_beside(void *argument)
{
    struct thread *self = argument;
    CUstream stream;
    CUdeviceptr address = 0;
    size_t free_bytes, total;
    PLAIN(int (*)(CUcontext), "cuCtxSetCurrent", self->context);
    self->odd = PLAIN(int (*)(CUstream *, unsigned), "cuStreamCreate", &stream, 1);
    self->granted = CALL(cuMemAllocAsync, &address, self->bytes, stream);
    self->refused = CALL(cuMemAllocAsync, &address, (size_t)1 << 40, stream);
    self->odd |= CALL(cuStreamSynchronize, stream) | CALL(cuMemGetInfo_v2, &free_bytes, &total);
    return NULL;
}

/* Recording in the mode that forbids everybody to disturb it. What became of it, and of the other thread's calls. */
static void capture_beside(size_t bytes)
{
    struct thread beside = {.bytes = bytes};
    CUfunction work = kernel();
    CUstream stream;
    CUgraph graph = NULL;
    PLAIN(int (*)(CUcontext *), "cuCtxGetCurrent", &beside.context);
    PLAIN(int (*)(CUstream *, unsigned), "cuStreamCreate", &stream, 1);
    PLAIN(int (*)(CUstream, int), "cuStreamBeginCapture_v2", stream, 0);
    CALL(cuLaunchKernel, work, 1, 1, 1, 32, 1, 1, 0, stream, NULL, NULL);
    pthread_create(&beside.thread, NULL, work_beside, &beside);
    pthread_join(beside.thread, NULL);
    int result = PLAIN(int (*)(CUstream, CUgraph *), "cuStreamEndCapture", stream, &graph);
    printf("ok %d %d %d %d\n", result, beside.granted, beside.refused, beside.odd);
}

/* ---- what must not change ---- */

static void tell_manners(void)
{
    struct sigaction action;
    int handlers = 0;
    mode_t mask = umask(0);
    umask(mask);
    for (int number = 1; number < 65; number++)
        handlers += sigaction(number, NULL, &action) == 0 && action.sa_handler != SIG_DFL && action.sa_handler != SIG_IGN;
    CUdeviceptr address;
    errno = 77;
    int result = CALL(cuMemAlloc_v2, &address, (size_t)1 << 50);
    size_t a, b;
    CALL(cuMemGetInfo_v2, &a, &b);
    printf("ok %d %o %d %d\n", handlers, (unsigned)mask, errno, result);
}

static void tell_fork(void)
{
    int pipes[2], result = -3;
    if (pipe(pipes))
        exit(1);
    pid_t child = fork();
    if (child == 0) {
        result = start(0);
        if (write(pipes[1], &result, sizeof result) < 0)
            _exit(1);
        _exit(0);
    }
    if (read(pipes[0], &result, sizeof result) < 0)
        exit(1);
    waitpid(child, NULL, 0);
    close(pipes[0]);
    close(pipes[1]);
    printf("ok %d\n", result);
}

/* A child that does nothing but be there. */
static void tell_idle_child(void)
{
    pid_t child = fork();
    if (child == 0) {
        close(0);
        close(1);
        sleep(60);
        _exit(0);
    }
    printf("ok %d\n", (int)child);
}

static void tell_name(const char *symbol)
{
    Dl_info info = {0};
    void *found = NULL;
    int index = -1;
    for (int i = 0; i < FUNCTIONS; i++)
        if (is(functions[i].symbol, symbol))
            index = i;
    found = index >= 0 ? find(index) : by_name(symbol);
    if (found)
        dladdr(found, &info);
    printf("ok %s %s\n", found ? info.dli_fname : "-", found && info.dli_sname ? info.dli_sname : "-");
}

/* What cuGetProcAddress gives for a name, a version and flags. */
static void tell_proc(const char *name, int asked, unsigned long long flags)
{
    Dl_info info = {0};
    void *found = NULL;
    int status = -1;
    proc2_function ask = (proc2_function)by_name("cuGetProcAddress_v2");
    int result = ask ? ask(name, &found, asked, flags, &status) : -1;
    if (found)
        dladdr(found, &info);
    printf("ok %d %d %s %s\n", result, status, found ? info.dli_fname : "-", found && info.dli_sname ? info.dli_sname : "-");
}

static CUipcMemHandle parse_handle(const char *hex)
{
    CUipcMemHandle handle;
    for (int i = 0; i < 64; i++) {
        unsigned byte;
        sscanf(hex + 2 * i, "%2x", &byte);
        handle.reserved[i] = (char)byte;
    }
    return handle;
}

static void tell_bytes(int result, const CUipcMemHandle *handle)
{
    if (result) {
        answer(result);
        return;
    }
    printf("ok ");
    for (int i = 0; i < 64; i++)
        printf("%02x", (unsigned char)handle->reserved[i]);
    puts("");
}

static void tell_handle(int id)
{
    CUipcMemHandle handle;
    int result = CALL(cuIpcGetMemHandle, &handle, held[id].value);
    tell_bytes(result, &handle);
}

static int open_handle(int id, const char *hex)
{
    strcpy(held[id].kind, "import");
    return CALL(cuIpcOpenMemHandle_v2, &held[id].value, parse_handle(hex), 1);
}

/* ---- descriptors that other processes ask for, by a socket: opened anew in /proc they would stand for nothing ---- */

#define NUMBER_BYTES CMSG_SPACE(sizeof(int))

static struct sockaddr_un counter_of(int pid, socklen_t *length)
{
    struct sockaddr_un name = {.sun_family = AF_UNIX}; /* an abstract one: its name begins with a zero */
    int used = snprintf(name.sun_path + 1, sizeof name.sun_path - 1, "gpuslice-worker-%d", pid);
    *length = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)used);
    return name;
}

static void hand_over(int client)
{
    int number = -1;
    union {
        char bytes[NUMBER_BYTES];
        struct cmsghdr align;
    } control = {{0}};
    struct iovec word = {&number, sizeof number};
    struct msghdr message = {.msg_iov = &word, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = NUMBER_BYTES};
    if (read(client, &number, sizeof number) == (ssize_t)sizeof number) {
        struct cmsghdr *head = CMSG_FIRSTHDR(&message);
        head->cmsg_level = SOL_SOCKET;
        head->cmsg_type = SCM_RIGHTS;
        head->cmsg_len = CMSG_LEN(sizeof number);
        memcpy(CMSG_DATA(head), &number, sizeof number);
        sendmsg(client, &message, MSG_NOSIGNAL);
    }
    close(client);
}

static void *serve(void *listener)
{
    for (;;) {
        int client = accept4((int)(intptr_t)listener, NULL, NULL, SOCK_CLOEXEC);
        if (client >= 0)
            hand_over(client);
    }
    return NULL;
}

static void open_counter(void)
{
    static int listener = -1;
    socklen_t length;
    struct sockaddr_un name = counter_of((int)getpid(), &length);
    pthread_t thread;
    if (listener >= 0)
        return;
    int made = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (made < 0)
        return;
    if (bind(made, (struct sockaddr *)&name, length) || listen(made, 8) ||
        pthread_create(&thread, NULL, serve, (void *)(intptr_t)made)) {
        close(made);
        return;
    }
    pthread_detach(thread);
    listener = made;
}

/* -1 where the other is gone. */
static int descriptor_of(int pid, int number)
{
    socklen_t length;
    struct sockaddr_un name = counter_of(pid, &length);
    union {
        char bytes[NUMBER_BYTES];
        struct cmsghdr align;
    } control = {{0}};
    int descriptor = -1, same = 0;
    struct iovec word = {&same, sizeof same};
    struct msghdr message = {.msg_iov = &word, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = NUMBER_BYTES};
    int socket_there = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(socket_there, (struct sockaddr *)&name, length) == 0 &&
        write(socket_there, &number, sizeof number) == (ssize_t)sizeof number &&
        recvmsg(socket_there, &message, MSG_CMSG_CLOEXEC) > 0 && CMSG_FIRSTHDR(&message))
        memcpy(&descriptor, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof descriptor);
    close(socket_there);
    return descriptor;
}

static void tell_descriptor(int result, int descriptor)
{
    if (!result)
        open_counter();
    if (result)
        answer(result);
    else
        printf("ok %d %d\n", (int)getpid(), descriptor);
}

static void share_physical(int id)
{
    int descriptor = -1;
    int result = CALL(cuMemExportToShareableHandle, &descriptor, held[id].value, 1, 0);
    tell_descriptor(result, descriptor);
}

static void share_pool(void)
{
    int descriptor = -1;
    int result = PLAIN(int (*)(void *, CUmemoryPool, int, unsigned long long), "cuMemPoolExportToShareableHandle", &descriptor,
                       own_pool, 1, 0);
    tell_descriptor(result, descriptor);
}

static int receive_physical(int id, int pid, int number)
{
    int descriptor = descriptor_of(pid, number);
    strcpy(held[id].kind, "physical");
    int result = CALL(cuMemImportFromShareableHandle, &held[id].value, (void *)(intptr_t)descriptor, 1);
    close(descriptor);
    return result;
}

static int receive_pool(int id, int pid, int number)
{
    int descriptor = descriptor_of(pid, number);
    strcpy(held[id].kind, "their-pool");
    int result =
        CALL(cuMemPoolImportFromShareableHandle, (CUmemoryPool *)&held[id].pointer, (void *)(intptr_t)descriptor, 1, 0);
    close(descriptor);
    return result;
}

static void share_block(int id)
{
    CUipcMemHandle data;
    int result = PLAIN(int (*)(void *, CUdeviceptr), "cuMemPoolExportPointer", &data, held[id].value);
    tell_bytes(result, &data);
}

static int receive_block(int id, int pool, const char *hex)
{
    CUipcMemHandle data = parse_handle(hex);
    strcpy(held[id].kind, "async");
    return PLAIN(int (*)(CUdeviceptr *, CUmemoryPool, void *), "cuMemPoolImportPointer", &held[id].value, held[pool].pointer,
                 &data);
}

/* Moved to and fro, managed memory takes no more. */
static int advise(int id)
{
    int result =
        PLAIN(int (*)(CUdeviceptr, size_t, int, int), "cuMemAdvise", held[id].value, held[id].bytes, 3, current_device());
    if (!result)
        result =
            PLAIN(int (*)(CUdeviceptr, size_t, int, CUstream), "cuMemPrefetchAsync", held[id].value, held[id].bytes, -1, NULL);
    if (!result)
        result = PLAIN(int (*)(CUdeviceptr, size_t, int, CUstream), "cuMemPrefetchAsync", held[id].value, held[id].bytes,
                       current_device(), NULL);
    return result;
}

/* What the current pool of the device keeps instead of releasing it back. */
static int keep(unsigned long long bytes)
{
    CUmemoryPool pool;
    int result = PLAIN(int (*)(CUmemoryPool *, int), "cuDeviceGetMemPool", &pool, current_device());
    return result ? result : CALL(cuMemPoolSetAttribute, pool, 4, &bytes);
}

static int trim_default(void)
{
    CUmemoryPool pool;
    int result = PLAIN(int (*)(CUmemoryPool *, int), "cuDeviceGetMemPool", &pool, current_device());
    return result ? result : CALL(cuMemPoolTrimTo, pool, 0);
}

/* The card whose context is current from now on; -1 for none. */
static int make_current(int ordinal)
{
    CUcontext context = NULL;
    int result = ordinal < 0 ? 0 : CALL(cuDevicePrimaryCtxRetain, &context, ordinal);
    return result ? result : PLAIN(int (*)(CUcontext), "cuCtxSetCurrent", context);
}

/* As the current context of the device that green contexts lie on; -1 back to the primary one. */
static int enter_green(int id)
{
    CUcontext context = NULL;
    int result = PLAIN(int (*)(CUcontext *, CUgreenCtx), "cuCtxFromGreenCtx", &context, held[id].pointer);
    return result ? result : PLAIN(int (*)(CUcontext), "cuCtxSetCurrent", context);
}

static int make_pitched(int id, size_t width, size_t height)
{
    size_t pitch;
    strcpy(held[id].kind, "plain");
    return CALL(cuMemAllocPitch_v2, &held[id].value, &pitch, width, height, 4);
}

static int make_array_of(int id, unsigned width, unsigned height, unsigned depth, unsigned flags)
{
    CUDA_ARRAY3D_DESCRIPTOR shape = {width, height, depth, .Format = 1, .NumChannels = 1, .Flags = flags};
    strcpy(held[id].kind, "array");
    return CALL(cuArray3DCreate_v2, (CUarray *)&held[id].pointer, &shape);
}

static void obey_all(void);

static void *obey_on(void *context)
{
    PLAIN(int (*)(CUcontext), "cuCtxSetCurrent", context);
    puts("ok");
    obey_all();
    exit(0);
}

/* The first thread ends, another goes on: the process is shown as a zombie from then on. */
static void leave_first_thread(void)
{
    pthread_t thread;
    CUcontext context = NULL;
    PLAIN(int (*)(CUcontext *), "cuCtxGetCurrent", &context);
    pthread_create(&thread, NULL, obey_on, context);
    pthread_exit(NULL);
}

static void obey(char *line)
{
    char word[32] = "", kind[160] = "";
    int id = 0;
    unsigned long long bytes = 0, more = 0;
    sscanf(line, "%31s", word);
    if (is(word, "start") && sscanf(line, "%*s %d", &id) >= 0)
        answer(start(id));
    else if (is(word, "start-unseen") && sscanf(line, "%*s %d", &id) >= 0)
        answer(start_unseen(id));
    else if (is(word, "load-unseen") && sscanf(line, "%*s %llu", &bytes) == 1)
        answer(load_unseen(bytes));
    else if (is(word, "alloc") && sscanf(line, "%*s %d %15s %llu", &id, kind, &bytes) == 3)
        answer(allocate(id, kind, bytes));
    else if (is(word, "physical-on") && sscanf(line, "%*s %llu %d %llu", &more, &id, &bytes) == 3) {
        strcpy(held[id].kind, "physical");
        answer(make_physical_on((int)more, id, bytes));
    } else if (is(word, "async-on") && sscanf(line, "%*s %llu %d %llu", &more, &id, &bytes) == 3)
        answer(allocate_on_stream_of((int)more, id, bytes));
    else if (is(word, "free") && sscanf(line, "%*s %d", &id) == 1)
        answer(release(id));
    else if (is(word, "free-array") && sscanf(line, "%*s %d", &id) == 1)
        answer(CALL(cuArrayDestroy, held[id].pointer));
    else if (is(word, "map") && sscanf(line, "%*s %d", &id) == 1)
        answer(map_physical(id, held[id].bytes));
    else if (is(word, "map-again") && sscanf(line, "%*s %d %llu", &id, &more) == 2)
        answer(map_again(id, held[more].value, held[more].bytes));
    else if (is(word, "unmap") && sscanf(line, "%*s %d", &id) == 1)
        answer(CALL(cuMemUnmap, held[id].address, held[id].bytes));
    else if (is(word, "retain") && sscanf(line, "%*s %d", &id) == 1)
        answer(CALL(cuMemRetainAllocationHandle, &held[id].value, (void *)held[id].address));
    else if (is(word, "sync"))
        answer(synchronize());
    else if (is(word, "trim"))
        answer(own_pool ? CALL(cuMemPoolTrimTo, own_pool, 0) : 0);
    else if (is(word, "drop-pool")) {
        answer(CALL(cuMemPoolDestroy, own_pool));
        own_pool = NULL;
    } else if (is(word, "reset"))
        answer(CALL(cuDevicePrimaryCtxReset_v2, current_device()));
    else if (is(word, "heap") && sscanf(line, "%*s %llu", &bytes) == 1)
        answer(CALL(cuCtxSetLimit, 2, bytes));
    else if (is(word, "info"))
        tell_info();
    else if (is(word, "total") && sscanf(line, "%*s %d", &id) == 1)
        tell_total(id);
    else if (is(word, "export") && sscanf(line, "%*s %d", &id) == 1)
        tell_handle(id);
    else if (is(word, "import") && sscanf(line, "%*s %d %128s", &id, kind) == 2)
        answer(open_handle(id, kind));
    else if (is(word, "share") && sscanf(line, "%*s %d", &id) == 1)
        share_physical(id);
    else if (is(word, "receive") && sscanf(line, "%*s %d %llu %llu", &id, &bytes, &more) == 3)
        answer(receive_physical(id, (int)bytes, (int)more));
    else if (is(word, "pitch") && sscanf(line, "%*s %d %llu %llu", &id, &bytes, &more) == 3)
        answer(make_pitched(id, bytes, more));
    else if (is(word, "take") && sscanf(line, "%*s %d %llu", &id, &bytes) == 2) /* and keep, and never import */
        tell_descriptor(0, descriptor_of(id, (int)bytes));
    else if (is(word, "share-pool"))
        share_pool();
    else if (is(word, "receive-pool") && sscanf(line, "%*s %d %llu %llu", &id, &bytes, &more) == 3)
        answer(receive_pool(id, (int)bytes, (int)more));
    else if (is(word, "share-block") && sscanf(line, "%*s %d", &id) == 1)
        share_block(id);
    else if (is(word, "receive-block") && sscanf(line, "%*s %d %llu %128s", &id, &bytes, kind) == 3)
        answer(receive_block(id, (int)bytes, kind));
    else if (is(word, "advise") && sscanf(line, "%*s %d", &id) == 1)
        answer(advise(id));
    else if (is(word, "keep") && sscanf(line, "%*s %llu", &bytes) == 1)
        answer(keep(bytes));
    else if (is(word, "trim-default"))
        answer(trim_default());
    else if (is(word, "bind") && sscanf(line, "%*s %d %llu %llu", &id, &bytes, &more) == 3)
        answer(bind_member(id, held[bytes].value, more, held[id].bytes));
    else if (is(word, "unbind") && sscanf(line, "%*s %d %llu %llu", &id, &more, &bytes) == 3)
        answer(CALL(cuMulticastUnbind, held[id].value, current_device(), more, bytes));
    else if (is(word, "close") && sscanf(line, "%*s %d", &id) == 1)
        answer(CALL(cuIpcCloseMemHandle, held[id].value));
    else if (is(word, "current") && sscanf(line, "%*s %d", &id) == 1)
        answer(make_current(id));
    else if (is(word, "enter") && sscanf(line, "%*s %d", &id) == 1)
        answer(enter_green(id));
    else if (is(word, "array") && sscanf(line, "%*s %d %llu %llu %15s", &id, &bytes, &more, kind) == 4)
        answer(make_array_of(id, (unsigned)bytes, (unsigned)more, (unsigned)atoi(kind), CUDA_ARRAY3D_LAYERED));
    else if (is(word, "shut") && sscanf(line, "%*s %d", &id) == 1)
        answer(close(id));
    else if (is(word, "leave-first-thread"))
        leave_first_thread();
    else if (is(word, "threads") && sscanf(line, "%*s %d %llu %llu %15s", &id, &more, &bytes, kind) >= 3)
        run_threads(id, (int)more, bytes, kind);
    else if (is(word, "beside"))
        begin_beside(line + strlen("beside "));
    else if (is(word, "joined")) {
        end_beside();
        puts("ok");
    } else if (is(word, "burn") && sscanf(line, "%*s %llu %d %llu %15s", &bytes, &id, &more, kind) >= 3)
        burn((double)bytes / 1000, id, (int)more, kind);
    else if (is(word, "request"))
        request();
    else if (is(word, "capture") && sscanf(line, "%*s %d", &id) == 1)
        capture_launches(id);
    else if (is(word, "launch-lazily") && sscanf(line, "%*s %llu", &bytes) == 1)
        answer(launch_lazily(bytes));
    else if (is(word, "capture-beside") && sscanf(line, "%*s %llu", &bytes) == 1)
        capture_beside(bytes);
    else if (is(word, "manners"))
        tell_manners();
    else if (is(word, "fork"))
        tell_fork();
    else if (is(word, "idle-child"))
        tell_idle_child();
    else if (is(word, "name") && sscanf(line, "%*s %127s", kind) == 1)
        tell_name(kind);
    else if (is(word, "proc") && sscanf(line, "%*s %127s %d %llu", kind, &id, &bytes) == 3)
        tell_proc(kind, id, bytes);
    else if (is(word, "exec")) {
        char *const again[] = {"/proc/self/exe", (char *)way, NULL};
        fflush(stdout);
        execv(again[0], again);
    } else
        puts("what?");
}

static void obey_all(void)
{
    char line[512];
    while (fgets(line, sizeof line, stdin))
        obey(line);
}

int main(int count, char **arguments)
{
    way = count > 1 ? arguments[1] : "dlsym";
    version = count > 2 ? atoi(arguments[2]) : version;
    driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (is(way, "deepbind")) {
        const char *path = getenv("GPUSLICE_TEST_PLUG");
        plug = path ? dlopen(path, RTLD_NOW | RTLD_DEEPBIND) : NULL;
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    puts(driver ? "ok" : "no driver");
    obey_all();
    return 0;
}
