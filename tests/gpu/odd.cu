// Programs that use a card in other ways than by plain launches: `odd KIND`. Says "ok" when it can begin; then reads lines
//
//     work SETTLE_S SECONDS ROUNDS       and answers: ok UNITS, what was done in SECONDS after SETTLE_S
//
// Kernels count themselves, whoever launches them; of copies and memsets each MiB counts.
#include <atomic>
#include <cooperative_groups.h>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda_runtime.h>
#include <thread>
#include <unistd.h>

typedef unsigned long long u64;

#define CHECK(call)                                                                                                    \
    do {                                                                                                               \
        cudaError_t code = (call);                                                                                     \
        if (code != cudaSuccess) {                                                                                     \
            printf("error %s in %s\n", cudaGetErrorName(code), #call);                                                 \
            fflush(stdout);                                                                                            \
            _exit(1);                                                                                                  \
        }                                                                                                              \
    } while (0)

static int blocks;
static const int threads = 1024; // a multiprocessor is full with one block
static u64 *counter;             // pinned: kernels write it, the host reads it
static volatile int *stop;       // pinned: the host writes it
static std::atomic<u64> done_by_host{0};
static std::atomic<bool> over{false};
static u64 rounds;

__device__ void compute(u64 rounds, u64 *counter)
{
    float a = 1.0000001f, b = 0.9999999f;
#pragma unroll 1
    for (u64 i = 0; i < rounds; i++)
        a = fmaf(a, b, b);
    if (a == 3.0f)
        *counter = 0; // never
    __syncthreads();
    if (blockIdx.x == 0 && threadIdx.x == 0)
        atomicAdd_system(counter, 1);
}

__global__ void plain(u64 rounds, u64 *counter) { compute(rounds, counter); }

__global__ void together(u64 rounds, u64 *counter)
{
    compute(rounds / 2, counter);
    cooperative_groups::this_grid().sync();
    compute(rounds / 2, counter);
}

__global__ void early(u64 rounds, u64 *counter)
{
    cudaTriggerProgrammaticLaunchCompletion(); // the next kernel may start beside this one
    compute(rounds, counter);
    cudaGridDependencySynchronize();
}

__global__ void persistent(u64 for_ns, u64 *counter, volatile int *stop)
{
    u64 began, now;
    bool ends;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(began));
    do {
        compute(1000, counter);
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
        ends = threadIdx.x == 0 && (now - began >= for_ns || *stop);
    } while (!__syncthreads_or(ends));
}

__global__ void parent(u64 rounds, u64 *counter, int blocks, int children)
{
    for (int i = 0; i < children; i++)
        plain<<<blocks, 1024, 0, cudaStreamFireAndForget>>>(rounds, counter);
}

__global__ void generation(u64 rounds, u64 *counter, int left)
{
    compute(rounds, counter);
    if (left > 0 && blockIdx.x == 0 && threadIdx.x == 0)
        generation<<<gridDim.x, 1024, 0, cudaStreamTailLaunch>>>(rounds, counter, left - 1);
}

__device__ int graph_left;
__global__ void graph_again(u64 rounds, u64 *counter)
{
    compute(rounds, counter);
    if (blockIdx.x == 0 && threadIdx.x == 0 && graph_left-- > 0)
        cudaGraphLaunch(cudaGetCurrentGraphExec(), cudaStreamGraphTailLaunch);
}
static const int many = 50; // a graph that runs cannot be launched again
__device__ cudaGraphExec_t others[many];
__global__ void graph_starts()
{
    for (cudaGraphExec_t other : others)
        cudaGraphLaunch(other, cudaStreamGraphFireAndForget);
}

// ---- graphs

static cudaStream_t stream;

static cudaGraphExec_t recorded(void (*body)(), unsigned long long flags)
{
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    body();
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&exec, graph, flags));
    CHECK(cudaGraphUpload(exec, stream));
    CHECK(cudaStreamSynchronize(stream));
    return exec;
}

static void thousand()
{
    for (int i = 0; i < 1000; i++)
        plain<<<blocks, threads, 0, stream>>>(rounds / 10, counter);
}
static void again() { graph_again<<<blocks, threads, 0, stream>>>(rounds, counter); }
static void one() { plain<<<blocks, threads, 0, stream>>>(rounds, counter); }

static const size_t many_bytes = (size_t)256 << 20;
static char *device_memory, *more_device_memory, *host_memory;
static void memsets()
{
    for (int i = 0; i < 16; i++)
        CHECK(cudaMemsetAsync(device_memory, i, many_bytes, stream));
}

// ---- kinds: each is one round of work; what is launched is waited for, or not beyond a few milliseconds' worth

static const char *kind;
static bool is(const char *name) { return strcmp(kind, name) == 0; }
static cudaEvent_t events[8];
static int turn;

// Queues, at most eight rounds ahead.
static void ahead()
{
    CHECK(cudaEventRecord(events[turn % 8], stream));
    turn++;
    if (turn >= 8)
        CHECK(cudaEventSynchronize(events[turn % 8]));
}

static void attribute_launch(void (*kernel)(u64, u64 *), cudaLaunchAttributeID id)
{
    cudaLaunchAttribute attribute = {};
    cudaLaunchConfig_t config = {};
    attribute.id = id;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(threads);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    CHECK(cudaLaunchKernelEx(&config, kernel, rounds, counter));
}

static void sleeps(void *) { usleep(1000); }

static void work_once()
{
    static cudaGraphExec_t exec, inner[many];
    static int left = 499;
    if (is("graph of 1,000 kernels")) {
        exec = exec ? exec : recorded(thousand, 0);
        CHECK(cudaGraphLaunch(exec, stream));
        CHECK(cudaStreamSynchronize(stream));
    } else if (is("graph that launches itself")) {
        exec = exec ? exec : recorded(again, cudaGraphInstantiateFlagDeviceLaunch);
        CHECK(cudaMemcpyToSymbol(graph_left, &left, sizeof left));
        CHECK(cudaGraphLaunch(exec, stream));
        CHECK(cudaStreamSynchronize(stream));
    } else if (is("graph that launches others")) {
        if (!exec) {
            for (cudaGraphExec_t &each : inner)
                each = recorded(one, cudaGraphInstantiateFlagDeviceLaunch);
            CHECK(cudaMemcpyToSymbol(others, inner, sizeof inner));
            exec = recorded([] { graph_starts<<<1, 1, 0, stream>>>(); }, cudaGraphInstantiateFlagDeviceLaunch);
        }
        CHECK(cudaGraphLaunch(exec, stream));
        CHECK(cudaStreamSynchronize(stream));
    } else if (is("kernels that launch kernels")) {
        parent<<<1, 1, 0, stream>>>(rounds, counter, blocks, 100);
        CHECK(cudaStreamSynchronize(stream));
    } else if (is("kernels that launch their successors")) {
        generation<<<blocks, threads, 0, stream>>>(rounds, counter, 499);
        CHECK(cudaStreamSynchronize(stream));
    } else if (is("kernel that stays for 5 s")) {
        persistent<<<blocks, threads, 0, stream>>>(5000000000ull, counter, stop);
        CHECK(cudaStreamSynchronize(stream));
    } else if (is("cooperative launches")) {
        void *arguments[] = {&rounds, &counter};
        CHECK(cudaLaunchCooperativeKernel((void *)together, dim3(blocks), dim3(threads), arguments, 0, stream));
        ahead();
    } else if (is("programmatic dependent launches")) {
        attribute_launch(early, cudaLaunchAttributeProgrammaticStreamSerialization);
        ahead();
    } else if (is("kernels, then host functions of 1 ms")) {
        for (int i = 0; i < 5; i++)
            plain<<<blocks, threads, 0, stream>>>(rounds, counter);
        CHECK(cudaLaunchHostFunc(stream, sleeps, nullptr));
        ahead();
    } else if (is("a stream of high priority")) {
        plain<<<blocks, threads, 0, stream>>>(rounds, counter);
        ahead();
    } else if (is("copies to the card")) {
        CHECK(cudaMemcpyAsync(device_memory, host_memory, many_bytes / 8, cudaMemcpyHostToDevice, stream));
        done_by_host += many_bytes / 8 >> 20;
        ahead();
    } else if (is("copies within the card")) {
        CHECK(cudaMemcpyAsync(more_device_memory, device_memory, many_bytes, cudaMemcpyDeviceToDevice, stream));
        done_by_host += many_bytes >> 20;
        ahead();
    } else if (is("memsets")) {
        CHECK(cudaMemsetAsync(device_memory, 1, many_bytes, stream));
        done_by_host += many_bytes >> 20;
        ahead();
    } else if (is("graphs of memsets")) {
        exec = exec ? exec : recorded(memsets, 0);
        CHECK(cudaGraphLaunch(exec, stream));
        done_by_host += 16 * (many_bytes >> 20);
        ahead();
    } else {
        printf("unknown: %s\n", kind);
        exit(2);
    }
}

static u64 done() { return done_by_host + *(volatile u64 *)counter; }

static void prepare()
{
    int least, greatest;
    CHECK(cudaDeviceGetAttribute(&blocks, cudaDevAttrMultiProcessorCount, 0));
    CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    CHECK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, is("a stream of high priority") ? greatest : least));
    CHECK(cudaHostAlloc(&counter, sizeof *counter, cudaHostAllocDefault));
    CHECK(cudaHostAlloc((void **)&stop, sizeof *stop, cudaHostAllocDefault));
    CHECK(cudaHostAlloc(&host_memory, many_bytes / 8, cudaHostAllocDefault));
    CHECK(cudaMalloc(&device_memory, many_bytes));
    CHECK(cudaMalloc(&more_device_memory, many_bytes));
    for (cudaEvent_t &event : events)
        CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventBlockingSync));
    *counter = 0;
    *stop = 0;
}

int main(int, char **arguments)
{
    char line[256];
    double settle_s, seconds;
    kind = arguments[1];
    prepare();
    puts("ok");
    fflush(stdout);
    if (!fgets(line, sizeof line, stdin) || sscanf(line, "work %lf %lf %llu", &settle_s, &seconds, &rounds) != 3)
        return 2;
    std::thread clock([&] {
        usleep((useconds_t)(settle_s * 1e6));
        u64 before = done();
        usleep((useconds_t)(seconds * 1e6));
        printf("ok %llu\n", done() - before);
        fflush(stdout);
        over = true;
        *stop = 1;
    });
    while (!over)
        work_once();
    clock.join();
    _exit(0); // without waiting for what is queued
}
