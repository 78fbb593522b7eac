/* Host functions: a thread runs each when its turn in its stream has come; what follows there waits until it returned.
 * One at a time, in no order between streams, as the manual of cuLaunchHostFunc allows. */
#include <stdlib.h>
#include <time.h>

#include "driver.h"

#define LOOK_NS 50000

struct task {
    uint64_t held;
    CUhostFn function;
    void *user_data;
    struct task *next;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t added = PTHREAD_COND_INITIALIZER;
static struct task *first, **last = &first;
static bool running;

static struct task *take_ready(void)
{
    struct task **link = &first;
    while (*link && !sim_engine_is_turn_of((*link)->held))
        link = &(*link)->next;
    struct task *task = *link;
    if (!task)
        return NULL;
    *link = task->next;
    if (last == &task->next)
        last = link;
    return task;
}

static struct task *wait_for_task(void)
{
    pthread_mutex_lock(&mutex);
    for (;;) {
        while (!first)
            pthread_cond_wait(&added, &mutex);
        struct task *task = take_ready();
        pthread_mutex_unlock(&mutex);
        if (task)
            return task;
        clock_nanosleep(CLOCK_MONOTONIC, 0, &(struct timespec){.tv_nsec = LOOK_NS}, NULL);
        pthread_mutex_lock(&mutex);
    }
}

static void *run(void *unused)
{
    for (;;) {
        struct task *task = wait_for_task();
        task->function(task->user_data);
        sim_engine_let_go(task->held);
        free(task);
    }
    return unused;
}

static bool start_running(void)
{
    pthread_t thread;
    pthread_mutex_lock(&mutex);
    if (!running)
        running = pthread_create(&thread, NULL, run, NULL) == 0 && pthread_detach(thread) == 0;
    pthread_mutex_unlock(&mutex);
    return running;
}

CUresult task_add(struct stream *stream, CUhostFn function, void *user_data)
{
    struct task *task = malloc(sizeof *task);
    if (!task)
        return CUDA_ERROR_OUT_OF_MEMORY;
    uint64_t held = start_running() ? stream_hold(stream) : 0;
    if (!held) {
        free(task);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *task = (struct task){held, function, user_data, NULL};
    pthread_mutex_lock(&mutex);
    *last = task;
    last = &task->next;
    pthread_cond_signal(&added);
    pthread_mutex_unlock(&mutex);
    return CUDA_SUCCESS;
}
