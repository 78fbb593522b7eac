/* How many driver calls go through in a given time, through whatever is preloaded: by 1 or more threads, beside other
 * processes that do the same at the same time.
 *
 *     interposer THREADS ROUNDS PROCESSES MEETING MILLISECONDS
 *
 * prints one line per call and round: name, calls of all threads, nanoseconds that they took. MEETING is a file of zeros
 * that all processes map, to begin each round together. A round lasts so long that the scheduler lets everybody run.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

typedef unsigned long long address_t;
static int (*mem_alloc)(address_t *, size_t);
static int (*mem_free)(address_t);
static int (*mem_alloc_async)(address_t *, size_t, void *);
static int (*mem_free_async)(address_t, void *);
static int (*mem_info)(size_t *, size_t *);
static int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
static int (*synchronize)(void);
static int (*set_current)(void *);
static void *context, *kernel;

enum { LIVE = 2000 };
static address_t live[LIVE];

static uint64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

static void check(int result, const char *what)
{
    if (result) {
        fprintf(stderr, "%s: error %d\n", what, result);
        exit(1);
    }
}

static void do_launch(int calls)
{
    for (int i = 0; i < calls; i++)
        check(launch(kernel, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL), "cuLaunchKernel");
}

static void do_info(int calls)
{
    size_t free_bytes, total;
    for (int i = 0; i < calls; i++)
        check(mem_info(&free_bytes, &total), "cuMemGetInfo");
}

static void do_alloc_free(int calls)
{
    address_t address;
    for (int i = 0; i < calls; i++) {
        check(mem_alloc(&address, 1 << 20), "cuMemAlloc");
        check(mem_free(address), "cuMemFree");
    }
}

static void do_alloc_free_async(int calls)
{
    address_t address;
    for (int i = 0; i < calls; i++) {
        check(mem_alloc_async(&address, 1 << 20, NULL), "cuMemAllocAsync");
        check(mem_free_async(address, NULL), "cuMemFreeAsync");
    }
}

enum { AT_ONCE = 64 }; /* calls between two looks at the clock */

struct job {
    pthread_t thread;
    pthread_barrier_t *start;
    void (*work)(int);
    uint64_t for_ns, took_ns, calls;
};

static void *run(void *argument)
{
    struct job *job = argument;
    check(set_current(context), "cuCtxSetCurrent");
    pthread_barrier_wait(job->start);
    uint64_t began = now();
    do {
        job->work(AT_ONCE);
        job->calls += AT_ONCE;
        job->took_ns = now() - began;
    } while (job->took_ns < job->for_ns);
    return NULL;
}

static void once(const char *name, void (*work)(int), int threads, uint64_t for_ns)
{
    struct job jobs[64];
    pthread_barrier_t start;
    uint64_t longest = 0, calls = 0;
    pthread_barrier_init(&start, NULL, (unsigned)threads);
    for (int i = 0; i < threads; i++) {
        jobs[i] = (struct job){.start = &start, .work = work, .for_ns = for_ns};
        pthread_create(&jobs[i].thread, NULL, run, &jobs[i]);
    }
    for (int i = 0; i < threads; i++) {
        pthread_join(jobs[i].thread, NULL);
        longest = jobs[i].took_ns > longest ? jobs[i].took_ns : longest;
        calls += jobs[i].calls;
    }
    pthread_barrier_destroy(&start);
    printf("%s %llu %llu\n", name, (unsigned long long)calls, (unsigned long long)longest);
}

static _Atomic uint64_t *arrived;
static uint64_t processes = 1, meetings;

static void meet(void)
{
    if (!arrived)
        return;
    meetings++;
    atomic_fetch_add(arrived, 1);
    while (atomic_load(arrived) < meetings * processes)
        sched_yield();
}

static void open_meeting(const char *path, int count)
{
    int file = open(path, O_RDWR);
    void *mapped = mmap(NULL, sizeof *arrived, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    check(mapped == MAP_FAILED, "mmap");
    arrived = mapped;
    processes = (uint64_t)count;
}

static int threads = 1, rounds = 1;
static uint64_t for_ns = 50000000;

static void measure(const char *name, void (*work)(int))
{
    for (int i = 0; i < rounds; i++) {
        meet();
        once(name, work, threads, for_ns);
        synchronize();
    }
}

static void *find(void *driver, const char *name)
{
    void *found = dlsym(driver, name);
    if (!found) {
        fprintf(stderr, "the driver has no %s\n", name);
        exit(1);
    }
    return found;
}

static void *make_kernel(void *driver)
{
    static const char image[] = ".version 6.0\n.target sm_50\n.address_size 64\n.visible .entry work() { ret; }\n";
    void *module, *function;
    check(((int (*)(void **, const void *))find(driver, "cuModuleLoadData"))(&module, image), "cuModuleLoadData");
    check(((int (*)(void **, void *, const char *))find(driver, "cuModuleGetFunction"))(&function, module, "work"), "cuModuleGetFunction");
    return function;
}

int main(int count, char **arguments)
{
    if (count != 6)
        return fprintf(stderr, "interposer THREADS ROUNDS PROCESSES MEETING MILLISECONDS\n"), 2;
    threads = atoi(arguments[1]);
    rounds = atoi(arguments[2]);
    open_meeting(arguments[4], atoi(arguments[3]));
    for_ns = (uint64_t)atoi(arguments[5]) * 1000000;
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    int device;
    if (!driver)
        return fprintf(stderr, "%s\n", dlerror()), 1;
    check(((int (*)(unsigned))find(driver, "cuInit"))(0), "cuInit");
    check(((int (*)(int *, int))find(driver, "cuDeviceGet"))(&device, 0), "cuDeviceGet");
    check(((int (*)(void **, int))find(driver, "cuDevicePrimaryCtxRetain"))(&context, device), "cuDevicePrimaryCtxRetain");
    *(void **)&set_current = find(driver, "cuCtxSetCurrent");
    check(set_current(context), "cuCtxSetCurrent");
    *(void **)&mem_alloc = find(driver, "cuMemAlloc_v2");
    *(void **)&mem_free = find(driver, "cuMemFree_v2");
    *(void **)&mem_alloc_async = find(driver, "cuMemAllocAsync");
    *(void **)&mem_free_async = find(driver, "cuMemFreeAsync");
    *(void **)&mem_info = find(driver, "cuMemGetInfo_v2");
    *(void **)&launch = find(driver, "cuLaunchKernel");
    *(void **)&synchronize = find(driver, "cuCtxSynchronize");
    kernel = make_kernel(driver);
    measure("launch", do_launch);
    measure("memgetinfo", do_info);
    measure("alloc_free", do_alloc_free);
    measure("alloc_free_async", do_alloc_free_async);
    for (int i = 0; i < LIVE; i++)
        check(mem_alloc(&live[i], 1 << 20), "cuMemAlloc");
    measure("alloc_free_2000_live", do_alloc_free);
    return 0;
}
