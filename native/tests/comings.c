/* An innocent program whose streams, contexts and threads come and go while it launches:
 *
 *     comings WHAT [ROUNDS]
 *
 *     stream      streams with some launches close behind each other, then destroyed
 *     context     contexts likewise
 *     reset       the primary context, reset
 *     elsewhere   launches on a stream of another context than the current one
 *     threads     launches on the threads' own default streams; one of them works for long
 *     capture     a stream that has launched begins to record, and the program goes on launching on another
 *
 *     gate        queues launches behind a host function that ends when all of them are queued
 *
 * Says "ok" and how many launches went through, or "error N" and where. Under a driver whose destroyed handles are not to be
 * used again.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef int (*function)();

static void *driver;
static function find(const char *symbol)
{
    function found = (function)dlsym(driver, symbol);
    if (!found) {
        printf("no %s\n", symbol);
        exit(1);
    }
    return found;
}

static void check(int result, const char *where)
{
    if (result) {
        printf("error %d in %s\n", result, where);
        exit(1);
    }
}
#define DO(symbol, ...) check(find(#symbol)(__VA_ARGS__), #symbol)

static _Atomic long launched;

static void *kernel(void)
{
    static const char image[] = ".version 6.0\n.target sm_50\n.address_size 64\n.visible .entry gpusim_busy_ns() { ret; }\n";
    void *module, *made;
    DO(cuModuleLoadData, &module, image);
    DO(cuModuleGetFunction, &made, module, "gpusim_busy_ns");
    return made;
}

static void launch(void *work, uint64_t us, void *stream, const char *how)
{
    uint64_t ns = us * 1000;
    void *parameters[] = {&ns};
    check(find(how)(work, 1, 1, 1, 32, 1, 1, 0, stream, parameters, NULL), how);
    launched++;
}

/* So close behind each other that they are timed together, and the end of the last is not marked yet. */
static void launch_some(void *work, void *stream)
{
    for (int i = 0; i < 5; i++)
        launch(work, 10, stream, "cuLaunchKernel");
}

static void streams(void *work, int rounds)
{
    for (int i = 0; i < rounds; i++) {
        void *stream;
        DO(cuStreamCreate, &stream, 1);
        launch_some(work, stream);
        if (i % 2)
            DO(cuStreamSynchronize, stream);
        DO(cuStreamDestroy_v2, stream);
        launch(work, 10, NULL, "cuLaunchKernel");
        usleep(300);
    }
}

static void contexts(void *work, int rounds)
{
    void *primary, *popped;
    DO(cuCtxGetCurrent, &primary);
    for (int i = 0; i < rounds; i++) {
        void *context;
        DO(cuCtxCreate_v2, &context, 0, 0);
        launch_some(kernel(), NULL);
        if (i % 2)
            DO(cuCtxSynchronize, );
        DO(cuCtxPopCurrent_v2, &popped);
        DO(cuCtxDestroy_v2, context);
        DO(cuCtxSetCurrent, primary);
        launch(work, 10, NULL, "cuLaunchKernel");
        usleep(300);
    }
}

static void resets(int rounds)
{
    for (int i = 0; i < rounds; i++) {
        void *context;
        launch_some(kernel(), NULL);
        if (i % 2)
            DO(cuCtxSynchronize, );
        DO(cuDevicePrimaryCtxReset_v2, 0);
        DO(cuDevicePrimaryCtxRetain, &context, 0);
        DO(cuCtxSetCurrent, context);
        usleep(300);
    }
}

/* Each of so many us: nothing of it may be free, whatever is current. */
static void elsewhere(int rounds)
{
    void *other, *primary, *stream, *popped;
    DO(cuCtxGetCurrent, &primary);
    DO(cuCtxCreate_v2, &other, 0, 0);
    void *work = kernel();
    DO(cuStreamCreate, &stream, 1);
    DO(cuCtxPopCurrent_v2, &popped);
    DO(cuCtxSetCurrent, primary);
    for (int i = 0; i < rounds; i++)
        launch(work, 20000, stream, "cuLaunchKernel");
    DO(cuStreamSynchronize, stream);
}

struct thread {
    pthread_t thread;
    void *context, *work;
    uint64_t us;
    double for_s;
    long done;
};

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static void *work_on_own_stream(void *given)
{
    struct thread *at = given;
    DO(cuCtxSetCurrent, at->context);
    for (double until = seconds() + at->for_s; seconds() < until; at->done++) {
        launch(at->work, at->us, NULL, "cuLaunchKernel_ptsz");
        DO(cuStreamSynchronize_ptsz, NULL);
    }
    return NULL;
}

/* One works for a second at a time; the other's short kernels need not wait for it. */
static void threads(void *work, int rounds)
{
    struct thread both[2] = {{.work = kernel(), .us = 1000000, .for_s = rounds}, {.work = work, .us = 500, .for_s = rounds}};
    for (int i = 0; i < 2; i++) {
        DO(cuCtxGetCurrent, &both[i].context);
        pthread_create(&both[i].thread, NULL, work_on_own_stream, &both[i]);
    }
    for (int i = 0; i < 2; i++)
        pthread_join(both[i].thread, NULL);
    launched = both[1].done;
}

static void captures(void *work, int rounds)
{
    void *recording, *other, *graph;
    DO(cuStreamCreate, &recording, 1);
    DO(cuStreamCreate, &other, 1);
    for (int i = 0; i < rounds; i++) {
        launch_some(work, recording);
        DO(cuStreamBeginCapture_v2, recording, 2); /* relaxed: the program may do what it likes beside it */
        launch(work, 10, recording, "cuLaunchKernel");
        for (int j = 0; j < 3; j++) {
            usleep(300);
            launch(work, 10, other, "cuLaunchKernel");
        }
        DO(cuStreamEndCapture, recording, &graph);
        DO(cuGraphDestroy, graph);
    }
}

static _Atomic bool open_gate;

static void wait_at_gate(void *unused)
{
    (void)unused;
    while (!open_gate)
        usleep(100);
}

/* Work is queued behind a host function that the same thread lets go when all of it is queued. */
static void gate(void *work, int rounds)
{
    void *stream;
    DO(cuStreamCreate, &stream, 1);
    launch(work, 1000, stream, "cuLaunchKernel");
    DO(cuStreamSynchronize, stream);
    DO(cuLaunchHostFunc, stream, wait_at_gate, NULL);
    for (int i = 0; i < rounds; i++)
        launch(work, 1000, stream, "cuLaunchKernel");
    open_gate = true;
    DO(cuStreamSynchronize, stream);
}

int main(int count, char **arguments)
{
    const char *what = count > 1 ? arguments[1] : "";
    int rounds = count > 2 ? atoi(arguments[2]) : 20;
    void *context;
    driver = dlopen("libcuda.so.1", RTLD_NOW);
    DO(cuInit, 0);
    DO(cuDevicePrimaryCtxRetain, &context, 0);
    DO(cuCtxSetCurrent, context);
    if (strcmp(what, "reset") == 0)
        resets(rounds);
    else if (strcmp(what, "elsewhere") == 0)
        elsewhere(rounds);
    else if (strcmp(what, "stream") == 0)
        streams(kernel(), rounds);
    else if (strcmp(what, "context") == 0)
        contexts(kernel(), rounds);
    else if (strcmp(what, "threads") == 0)
        threads(kernel(), rounds);
    else if (strcmp(what, "gate") == 0)
        gate(kernel(), rounds);
    else if (strcmp(what, "capture") == 0)
        captures(kernel(), rounds);
    printf("ok %ld\n", launched);
    return 0;
}
