/* Host functions: one thread runs them in order, each when the work before it on the card is finished. */
#include <stdlib.h>

#include "driver.h"

struct task {
    uint32_t card;
    uint64_t mark, number;
    CUhostFn function;
    void *user_data;
    struct task *next;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct task *first, **last = &first;
static uint64_t added, finished;
static bool running;

static struct task *wait_for_task(void)
{
    pthread_mutex_lock(&mutex);
    while (!first)
        pthread_cond_wait(&changed, &mutex);
    struct task *task = first;
    pthread_mutex_unlock(&mutex);
    return task;
}

static void finish(struct task *task)
{
    pthread_mutex_lock(&mutex);
    first = task->next;
    if (!first)
        last = &first;
    finished = task->number;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&mutex);
    free(task);
}

static void *run(void *unused)
{
    for (;;) {
        struct task *task = wait_for_task();
        sim_engine_wait(task->card, task->mark);
        task->function(task->user_data);
        finish(task);
    }
    return unused;
}

static bool start_running(void)
{
    pthread_t thread;
    if (!running)
        running = pthread_create(&thread, NULL, run, NULL) == 0 && pthread_detach(thread) == 0;
    return running;
}

uint64_t task_add(uint32_t card, uint64_t mark, CUhostFn function, void *user_data)
{
    struct task *task = malloc(sizeof *task);
    uint64_t number = 0;
    if (!task)
        return 0;
    pthread_mutex_lock(&mutex);
    if (start_running()) {
        number = ++added;
        *task = (struct task){card, mark, number, function, user_data, NULL};
        *last = task;
        last = &task->next;
        pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&mutex);
    if (!number)
        free(task);
    return number;
}

bool task_done(uint64_t number)
{
    pthread_mutex_lock(&mutex);
    bool done = finished >= number;
    pthread_mutex_unlock(&mutex);
    return done;
}

void task_wait(uint64_t number)
{
    if (!number)
        return;
    pthread_mutex_lock(&mutex);
    while (finished < number)
        pthread_cond_wait(&changed, &mutex);
    pthread_mutex_unlock(&mutex);
}
