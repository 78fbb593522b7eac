/* Nanoseconds a driver call takes, through whatever is preloaded: best of several rounds, 1 or more threads, beside
 * other processes that do the same at the same time.
 *
 *     interposer THREADS ROUNDS PROCESSES MEETING    prints one line per call: name and nanoseconds
 *
 * MEETING is a file of zeros that all processes map, to begin each round together.
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

struct job {
    pthread_t thread;
    pthread_barrier_t *start;
    void (*work)(int);
    int calls;
    uint64_t took;
};

static void *run(void *argument)
{
    struct job *job = argument;
    check(set_current(context), "cuCtxSetCurrent");
    pthread_barrier_wait(job->start);
    uint64_t began = now();
    job->work(job->calls);
    job->took = now() - began;
    return NULL;
}

static double once(void (*work)(int), int calls, int threads)
{
    struct job jobs[64];
    pthread_barrier_t start;
    uint64_t longest = 0;
    pthread_barrier_init(&start, NULL, (unsigned)threads);
    for (int i = 0; i < threads; i++) {
        jobs[i] = (struct job){.start = &start, .work = work, .calls = calls};
        pthread_create(&jobs[i].thread, NULL, run, &jobs[i]);
    }
    for (int i = 0; i < threads; i++) {
        pthread_join(jobs[i].thread, NULL);
        longest = jobs[i].took > longest ? jobs[i].took : longest;
    }
    pthread_barrier_destroy(&start);
    return (double)longest / calls;
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

static void measure(const char *name, void (*work)(int), int calls, int threads, int rounds)
{
    double best = 1e18;
    for (int i = 0; i < rounds; i++) {
        meet();
        double took = once(work, calls, threads);
        best = took < best ? took : best;
        synchronize();
    }
    printf("%s %.2f\n", name, best);
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
    int threads = count > 1 ? atoi(arguments[1]) : 1, rounds = count > 2 ? atoi(arguments[2]) : 7;
    if (count > 4)
        open_meeting(arguments[4], atoi(arguments[3]));
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
    *(void **)&mem_info = find(driver, "cuMemGetInfo_v2");
    *(void **)&launch = find(driver, "cuLaunchKernel");
    *(void **)&synchronize = find(driver, "cuCtxSynchronize");
    kernel = make_kernel(driver);
    measure("launch", do_launch, 200000, threads, rounds);
    measure("memgetinfo", do_info, 200000, threads, rounds);
    measure("alloc_free", do_alloc_free, 50000, threads, rounds);
    for (int i = 0; i < LIVE; i++)
        check(mem_alloc(&live[i], 1 << 20), "cuMemAlloc");
    measure("alloc_free_2000_live", do_alloc_free, 50000, threads, rounds);
    return 0;
}
