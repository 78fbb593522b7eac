/* A program whose kernels note when they began and ended by the card's timer, which is the same for all processes. Reads
 * commands and answers each with one line, as worker.c does.
 *
 *     calibrate                                                   ok ROUNDS, how often a kernel's loop runs in a millisecond
 *     work SECONDS ROUNDS KERNEL_US STREAMS ONE_BY_ONE PAUSE_US STALL_US EVERY_US FILE     ok LAUNCHES
 *     price TIMES                                                 ok PICOSECONDS a launch, the best of so many times 64
 *
 * `work` launches kernels of ROUNDS, round robin on STREAMS; waits for each if ONE_BY_ONE and then computes for PAUSE_US,
 * or until EVERY_US have passed; and stops for STALL_US within each launch, where the driver reads the parameters. FILE
 * gets four numbers of 64 bits a launch: begin and end by the card's timer, and by the host's clock when it was asked for
 * and when it had been waited for, in ns. The simulated driver's kernels note nothing. */
#include <dlfcn.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define MOST_LAUNCHES (1u << 18)
#define MOST_STREAMS 64u
#define THREADS 1024u
#define AHEAD_US 10000.0         /* as much work as is queued: a program that ends is not to leave seconds behind */
#define NO_CLOCK_ROUNDS 1000000u /* the simulated driver takes rounds for nanoseconds */
enum { MULTIPROCESSORS = 16, NON_BLOCKING = 1 };

typedef void *handle;
static void *driver;
static handle context, kernel, nothing, streams[MOST_STREAMS];
static int blocks;
static volatile uint64_t (*noted)[2]; /* pinned: the card writes it */
static uint64_t asked[MOST_LAUNCHES], waited[MOST_LAUNCHES];

/* Each warp computes, so that a multiprocessor is full with one block: kernels on several streams share it. */
static const char ptx[] = ".version 7.0\n.target sm_70\n.address_size 64\n"
                          ".visible .entry clocked_gpusim_busy_ns(.param .u64 rounds, .param .u64 place)\n{\n"
                          "  .reg .u64 %left, %place, %now;\n  .reg .u32 %thread, %block, %who;\n  .reg .f32 %a, %b;\n"
                          "  .reg .pred %again, %never, %first, %last;\n"
                          "  ld.param.u64 %left, [rounds];\n  ld.param.u64 %place, [place];\n"
                          "  mov.u32 %thread, %tid.x;\n  mov.u32 %block, %ctaid.x;\n  or.b32 %who, %thread, %block;\n"
                          "  setp.eq.u32 %first, %who, 0;\n"
                          "  @%first mov.u64 %now, %globaltimer;\n  @%first st.volatile.global.u64 [%place], %now;\n"
                          "  mov.f32 %a, 0f3F800001;\n  mov.f32 %b, 0f3F7FFFFE;\n"
                          "AGAIN:\n  fma.rn.f32 %a, %a, %b, %b;\n  sub.u64 %left, %left, 1;\n"
                          "  setp.ne.u64 %again, %left, 0;\n  @%again bra AGAIN;\n"
                          "  setp.eq.f32 %never, %a, 0f7F7FFFFF;\n  @%never st.global.f32 [%place], %a;\n  bar.sync 0;\n"
                          "  setp.eq.and.u64 %last, %left, 0, %first;\n"
                          "  @%last mov.u64 %now, %globaltimer;\n  @%last st.volatile.global.u64 [%place+8], %now;\n  ret;\n}\n"
                          ".visible .entry nothing()\n{\n  ret;\n}\n";

static int (*launch_kernel)(handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, handle, void **,
                            void **);
static int (*synchronize_stream)(handle), (*synchronize)(void);

static void check(const char *what, int code)
{
    if (!code)
        return;
    printf("error %d in %s\n", code, what);
    exit(1);
}

#define CALL(name, ...)                                                                                                        \
    do {                                                                                                                       \
        int (*call)() = (int (*)())dlsym(driver, name);                                                                        \
        check(name, call ? call(__VA_ARGS__) : -1);                                                                            \
    } while (0)

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void compute_until(uint64_t ns)
{
    while (now_ns() < ns)
        ;
}

/* ---- stopping within a launch: the driver reads the parameters from a page that may not be read at first ---- */

static struct guarded {
    void *parameters[2];
    uint64_t rounds, place;
} *guarded;
static unsigned stall_us;

static void stall(int number)
{
    (void)number;
    usleep(stall_us);
    mprotect(guarded, 4096, PROT_READ | PROT_WRITE);
}

static void open_driver(void)
{
    int device = 0;
    void *pinned = NULL;
    driver = dlopen("libcuda.so.1", RTLD_NOW);
    check("dlopen", !driver);
    CALL("cuInit", 0);
    CALL("cuDeviceGet", &device, 0);
    CALL("cuDevicePrimaryCtxRetain", &context, device);
    CALL("cuCtxSetCurrent", context);
    CALL("cuDeviceGetAttribute", &blocks, MULTIPROCESSORS, device);
    handle module = NULL;
    CALL("cuModuleLoadData", &module, ptx);
    CALL("cuModuleGetFunction", &kernel, module, "clocked_gpusim_busy_ns");
    CALL("cuModuleGetFunction", &nothing, module, "nothing");
    CALL("cuMemHostAlloc", &pinned, (size_t)MOST_LAUNCHES * sizeof *noted, 0);
    noted = pinned;
    for (unsigned i = 0; i < MOST_STREAMS; i++)
        CALL("cuStreamCreate", &streams[i], NON_BLOCKING);
    *(void **)&launch_kernel = dlsym(driver, "cuLaunchKernel");
    *(void **)&synchronize_stream = dlsym(driver, "cuStreamSynchronize");
    *(void **)&synchronize = dlsym(driver, "cuCtxSynchronize");
    guarded = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    signal(SIGSEGV, stall);
}

static void launch(uint64_t rounds, uint32_t number, handle stream)
{
    guarded->rounds = rounds;
    guarded->place = (uint64_t)(uintptr_t)noted[number];
    guarded->parameters[0] = &guarded->rounds;
    guarded->parameters[1] = &guarded->place;
    void **parameters = guarded->parameters;
    if (stall_us)
        mprotect(guarded, 4096, PROT_NONE);
    check("cuLaunchKernel", launch_kernel(kernel, (unsigned)blocks, 1, 1, THREADS, 1, 1, 0, stream, parameters, NULL));
}

static double took_ns(uint64_t rounds, int times)
{
    double least = 1e18;
    for (int i = 0; i < times; i++) {
        launch(rounds, 0, streams[0]);
        check("cuStreamSynchronize", synchronize_stream(streams[0]));
        double ns = (double)(noted[0][1] - noted[0][0]);
        least = ns < least ? ns : least;
    }
    return least;
}

/* By the difference of two lengths, which the beginning and the end of a kernel are no part of. */
static void calibrate(void)
{
    uint64_t until = now_ns() + 300000000u;
    uint64_t few = 20000, many = 200000;
    noted[0][0] = noted[0][1] = 0;
    took_ns(few, 1);
    bool clocked = noted[0][1] > 0;
    while (clocked && now_ns() < until) /* until the card's clock rate has risen */
        took_ns(many, 1);
    double difference = clocked ? took_ns(many, 9) - took_ns(few, 9) : 0;
    printf("ok %llu\n", difference > 0 ? (unsigned long long)((double)(many - few) * 1e6 / difference) : NO_CLOCK_ROUNDS);
}

struct plan {
    double seconds, kernel_us;
    unsigned long long rounds;
    unsigned streams, one_by_one, pause_us, stall_us, every_us;
    char file[512];
};

static uint32_t work(const struct plan *plan)
{
    double each_us = AHEAD_US / plan->kernel_us / plan->streams;
    uint32_t ahead = (each_us < 3 ? 3 : (uint32_t)each_us) * plan->streams, count = 0;
    uint64_t begin = now_ns(), until = begin + (uint64_t)(plan->seconds * 1e9), next = begin;
    uint32_t random = 1;
    memset((void *)noted, 0, (size_t)MOST_LAUNCHES * sizeof *noted);
    for (; count < MOST_LAUNCHES && now_ns() < until; count++) {
        handle stream = streams[count % plan->streams];
        asked[count] = now_ns();
        launch(plan->rounds, count, stream);
        if (plan->one_by_one) {
            check("cuStreamSynchronize", synchronize_stream(stream));
            waited[count] = now_ns();
            compute_until(waited[count] + plan->pause_us * 1000u);
        } else if (plan->rounds == (unsigned long long)(plan->kernel_us * 1000)) { /* no clock: nothing is noted */
            if (count % ahead == ahead - 1)
                check("cuCtxSynchronize", synchronize());
        } else
            while (count >= ahead && !noted[count - ahead][1] && now_ns() < until)
                usleep(20);
        if (plan->every_us) { /* 0.8 to 1.2 of it: not in step with anything */
            random = random * 1103515245u + 12345u;
            next += plan->every_us * (800u + (random >> 16) % 401u);
            int64_t left = (int64_t)(next - now_ns());
            if (left > 0)
                usleep((useconds_t)(left / 1000));
        }
    }
    check("cuCtxSynchronize", synchronize());
    return count;
}

static void write_noted(const char *name, uint32_t count)
{
    FILE *file = fopen(name, "w");
    check("fopen", !file);
    for (uint32_t i = 0; i < count; i++) {
        uint64_t record[4] = {noted[i][0], noted[i][1], asked[i], waited[i]};
        check("fwrite", fwrite(record, sizeof record, 1, file) != 1);
    }
    check("fclose", fclose(file));
}

/* Into an empty queue. */
static uint64_t price(int times)
{
    enum { LAUNCHES = 64 };
    uint64_t least = UINT64_MAX;
    for (int i = 0; i < times; i++) {
        uint64_t began = now_ns();
        for (int j = 0; j < LAUNCHES; j++)
            launch_kernel(nothing, 1, 1, 1, 32, 1, 1, 0, streams[0], NULL, NULL);
        uint64_t took = now_ns() - began;
        least = took < least ? took : least;
        check("cuStreamSynchronize", synchronize_stream(streams[0]));
    }
    return least * 1000 / LAUNCHES;
}

static void obey(const char *line)
{
    struct plan plan;
    int times;
    if (strcmp(line, "calibrate\n") == 0)
        calibrate();
    else if (sscanf(line, "price %d", &times) == 1)
        printf("ok %llu\n", (unsigned long long)price(times));
    else if (sscanf(line, "work %lf %llu %lf %u %u %u %u %u %511s", &plan.seconds, &plan.rounds, &plan.kernel_us, &plan.streams,
                    &plan.one_by_one, &plan.pause_us, &plan.stall_us, &plan.every_us, plan.file) == 9) {
        stall_us = plan.stall_us;
        uint32_t count = work(&plan);
        write_noted(plan.file, count);
        printf("ok %u\n", count);
    } else
        puts("what?");
}

int main(void)
{
    char line[1024];
    setvbuf(stdout, NULL, _IOLBF, 0);
    open_driver();
    puts("ok");
    while (fgets(line, sizeof line, stdin))
        obey(line);
    return 0;
}
