/* Where a call can be held up in its midst, or takes its time there. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "driver.h"

static const char *folder;
static unsigned long linger_us;

static void read_environment(void)
{
    const char *linger = getenv("GPUSLICE_SIM_LINGER_US");
    folder = getenv("GPUSLICE_SIM_GATES");
    linger_us = linger ? strtoul(linger, NULL, 10) : 0;
}

static void sleep_us(unsigned long us)
{
    clock_nanosleep(CLOCK_MONOTONIC, 0,
                    &(struct timespec){.tv_sec = (time_t)(us / 1000000), .tv_nsec = (long)(us % 1000000) * 1000}, NULL);
}

static void wait_at(const char *name)
{
    char path[4096], reached[4096];
    int saved = errno;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    snprintf(reached, sizeof reached, "%s/%s.reached", folder, name);
    if (access(path, F_OK) == 0) {
        FILE *file = fopen(reached, "w");
        if (file)
            fclose(file);
    }
    while (access(path, F_OK) == 0)
        sleep_us(1000);
    errno = saved;
}

/* Of libgpuslice, where a process has it: how many of its locks the calling thread holds. */
extern unsigned gpuslice_locks_held(void) __attribute__((weak));

void may_wait(const char *call)
{
    if (!gpuslice_locks_held || !gpuslice_locks_held())
        return;
    fprintf(stderr, "%s may wait, and was called by a thread that holds %u locks of libgpuslice\n", call,
            gpuslice_locks_held());
    abort();
}

void gate_pass(const char *name)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    static _Thread_local unsigned dice SIM_NEAR;
    pthread_once(&once, read_environment);
    if (folder)
        wait_at(name);
    if (!linger_us)
        return;
    dice = dice ? dice : (unsigned)(uintptr_t)&dice ^ (unsigned)sim_monotonic_ns();
    dice = dice * 1664525u + 1013904223u;
    if (dice >> 30) /* three of four */
        sleep_us((dice >> 8) % linger_us);
}
