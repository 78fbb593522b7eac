/* Many threads of several processes launch through throttle.c, on a card that only keeps time:
 *
 *     throttled FOLDER MILLISECONDS
 *
 * Two containers of two processes each; the second begins halfway, so that the first takes itself to be alone before. Built
 * with ThreadSanitizer where there is one. What stands for the driver synchronizes no threads: that is for throttle.c
 * to do. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "hooks/launches.h"
#include "policy/samples.h"
#include "throttle_driver.h"

#define THREADS 4
#define PROCESSES 2
#define CONTAINERS 2
#define KERNEL_NS 20000u
#define CONTEXT ((CUcontext)1)
#define SAMPLE_US 160000u

static struct gs_card card = {.share = {50, 100, false}, .uuid = "GPU-stress"};
static uint64_t began_ns, begins_ns, ends_ns;
struct gs_accounts gs_accounts;
bool gs_launch_freely;

/* ---- a driver that keeps time ---- */

struct CUevent_st {
    uint64_t at_ns;
};

static uint64_t free_ns; /* when all work of this process will have ended */

static uint64_t load(const uint64_t *word) { return __atomic_load_n(word, __ATOMIC_RELAXED); }

static int launch_on_card(void)
{
    uint64_t before = load(&free_ns), now = gs_monotonic_ns();
    while (!__atomic_compare_exchange_n(&free_ns, &before, (before > now ? before : now) + KERNEL_NS, true, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED))
        ;
    return CUDA_SUCCESS;
}

int driver_current_context(CUcontext *context)
{
    *context = CONTEXT;
    return CUDA_SUCCESS;
}

int driver_create_event(CUevent *event, unsigned int flags)
{
    (void)flags;
    *event = calloc(1, sizeof **event);
    return *event ? CUDA_SUCCESS : 2;
}

int driver_record_event(CUevent event, CUstream stream)
{
    (void)stream;
    uint64_t free_at = load(&free_ns), now = gs_monotonic_ns();
    __atomic_store_n(&event->at_ns, free_at > now ? free_at : now, __ATOMIC_RELAXED);
    return CUDA_SUCCESS;
}

int driver_query_event(CUevent event) { return load(&event->at_ns) <= gs_monotonic_ns() ? CUDA_SUCCESS : 600; }

int driver_elapsed_time(float *milliseconds, CUevent from, CUevent to)
{
    *milliseconds = (float)((double)(load(&to->at_ns) - load(&from->at_ns)) / 1e6);
    return CUDA_SUCCESS;
}

/* ---- what the library would know of the card ---- */

uint32_t gs_card_count(void) { return 1; }

struct gs_card *gs_card_at(uint32_t position)
{
    (void)position;
    return &card;
}

void gs_samples_begin(const struct gs_card *of) { (void)of; }

bool gs_sample(const struct gs_card *of, const struct gs_activity *activity, bool whole, struct gs_share_sample *sum)
{
    (void)of, (void)activity, (void)whole;
    *sum = (struct gs_share_sample){gs_realtime_us() / SAMPLE_US * SAMPLE_US, 50, 50, 2};
    return true;
}

struct gs_work gs_launch_begin(CUstream stream, bool own_stream, uint64_t key)
{
    (void)own_stream;
    struct gs_work work = {.place = {&card, CONTEXT, 0}, .stream = {.context = CONTEXT, .handle = stream}, .key = key};
    if (!gs_goes_untimed(key))
        gs_work_begin(&work);
    return work;
}

/* ---- what programs do ---- */

static uint64_t launched, untimed;

static int launch(CUstream stream, uint64_t key)
{
    if (gs_is_alone())
        __atomic_fetch_add(&untimed, 1, __ATOMIC_RELAXED);
    THROTTLE(launch_on_card(), stream, false, key)
}

static void *launches(void *number)
{
    CUstream stream = (CUstream)number;
    unsigned seed = (unsigned)(uintptr_t)number;
    if (seed == 1)
        gs_throttle_meet(&card); /* as at the creation of a context: the second container rests at first */
    do {
        gs_throttle_awaited(); /* a program may wait without ever having launched */
        usleep(1000);
    } while (gs_monotonic_ns() < begins_ns);
    while (gs_monotonic_ns() < ends_ns) {
        int what = rand_r(&seed) % 64;
        launch(stream, gs_work_key(stream, (uint64_t)what));
        __atomic_fetch_add(&launched, 1, __ATOMIC_RELAXED);
        if (what < 16)
            gs_throttle_awaited();
        else if (what == 16)
            gs_throttle_stream_ends(stream);
        else if (what == 17) {
            gs_throttle_context_ends(CONTEXT);
            gs_throttle_context_ended(CONTEXT, false);
        } else if (what == 18) {
            gs_throttle_context_ends(CONTEXT);
            gs_throttle_context_ended(CONTEXT, true);
        }
    }
    return NULL;
}

static int be_process(const char *prefix)
{
    char region[GS_PATH_ROOM];
    pthread_t threads[THREADS];
    snprintf(region, sizeof region, "%s/region", prefix);
    if (!gs_accounts_open(&gs_accounts, region))
        return 2;
    card.index = gs_accounts_card(&gs_accounts, card.uuid);
    gs_throttle_start(prefix);
    for (uintptr_t i = 0; i < THREADS; i++)
        pthread_create(&threads[i], NULL, launches, (void *)(i + 1));
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    printf("%llu launched, %llu while alone\n", (unsigned long long)launched, (unsigned long long)untimed);
    fflush(stdout);
    return launched == 0;
}

/* Where a container writes its claim and finds the others'. */
static void make_meeting(const char *folder, int number, char prefix[GS_PATH_ROOM])
{
    static const char *const below[] = {"", "/run", "/run/gpuslice", "/run/gpuslice/GPU-stress",
                                        "/run/gpuslice/GPU-stress/own"};
    char path[GS_PATH_ROOM + 64];
    snprintf(prefix, GS_PATH_ROOM, "%s/%d", folder, number);
    for (unsigned i = 0; i < sizeof below / sizeof below[0]; i++) {
        snprintf(path, sizeof path, "%s%s", prefix, below[i]);
        mkdir(path, 0755);
    }
    snprintf(path, sizeof path, "%s/run/gpuslice/GPU-stress/all", prefix);
    if (symlink("../../../../all", path))
        exit(2);
    snprintf(path, sizeof path, "%s/all", folder);
    mkdir(path, 0755);
    snprintf(path, sizeof path, "%s/all/%d", folder, number);
    char own[GS_PATH_ROOM];
    snprintf(own, sizeof own, "../%d/run/gpuslice/GPU-stress/own", number);
    if (symlink(own, path))
        exit(2);
}

int main(int count, char **arguments)
{
    static char prefixes[CONTAINERS][GS_PATH_ROOM];
    int status, failed = 0;
    if (count < 3)
        return 2;
    uint64_t whole_ns = (uint64_t)atoi(arguments[2]) * 1000000u;
    began_ns = gs_monotonic_ns();
    ends_ns = began_ns + whole_ns;
    for (int i = 0; i < CONTAINERS; i++)
        make_meeting(arguments[1], i, prefixes[i]);
    for (int i = 0; i < CONTAINERS * PROCESSES; i++)
        if (fork() == 0) {
            begins_ns = i < PROCESSES ? began_ns : began_ns + whole_ns / 2;
            return be_process(prefixes[i / PROCESSES]);
        }
    while (wait(&status) > 0)
        failed += status != 0;
    printf("failed %d\n", failed);
    return failed != 0;
}
