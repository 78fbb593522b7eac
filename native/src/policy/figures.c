/* The agent writes the file in place, so a read may overlap a write: a file with a wrong checksum is read again next
 * time. */
#include "policy/figures.h"

#include <stddef.h>
#include <string.h>

#include "accounts/attach.h"
#include "accounts/slots.h"
#include "system/at_fork.h"

#define READ_EVERY_NS UINT64_C(20000000)
#define STALE_NS UINT64_C(5000000000) /* the agent writes ten times in this period */
#define COARSE_NS UINT64_C(10000000)  /* by how much the times of changes may lag */
#define HEAD_BYTES offsetof(struct gpuslice_figures, of)

static char path[GS_PATH_ROOM];            /* "" before the start */
static struct gpuslice_figures buffers[2]; /* the last complete one, and the one that is read next */
static uint32_t current;
static uint64_t read_ns;
static struct gs_lock lock;

static void forget(void) { lock = (struct gs_lock){0}; }
GS_AT_FORK(forget);

void gs_figures_start(const char *prefix)
{
    static const char name[] = "/etc/gpuslice/figures";
    size_t length = strlen(prefix);
    if (length + sizeof name > sizeof path)
        return;
    memmove(path, prefix, length); /* memcpy() has newer versions than the oldest glibc */
    memmove(path + length, name, sizeof name);
}

static uint64_t check_of(const struct gpuslice_figures *of, size_t bytes)
{
    uint64_t value = UINT64_C(14695981039346656037);
    for (size_t i = offsetof(struct gpuslice_figures, at_ns); i < bytes; i++)
        value = (value ^ ((const unsigned char *)of)[i]) * UINT64_C(1099511628211);
    return value;
}

static bool is_whole(const struct gpuslice_figures *of, long bytes)
{
    if (bytes < (long)HEAD_BYTES || of->magic != GPUSLICE_FIGURES_MAGIC || of->count > GPUSLICE_FIGURES)
        return false;
    size_t expected = HEAD_BYTES + of->count * sizeof of->of[0];
    return (size_t)bytes >= expected && of->check == check_of(of, expected);
}

/* Under the lock. Times of another clock, as after a reboot, are stale or in the future. */
static bool are_fresh(void)
{
    uint64_t now = gs_monotonic_ns();
    if (*path && now - read_ns >= READ_EVERY_NS) {
        read_ns = now;
        struct gpuslice_figures *next = &buffers[!current];
        if (is_whole(next, gs_read_file(path, (char *)next, sizeof *next)))
            current = !current;
    }
    uint64_t at_ns = buffers[current].at_ns;
    return at_ns && at_ns <= now && now - at_ns < STALE_NS;
}

uint64_t gs_figures_at(void)
{
    gs_lock(&lock);
    uint64_t at_ns = are_fresh() ? buffers[current].at_ns : 0;
    gs_unlock(&lock);
    return at_ns;
}

/* Two processes in nested namespaces may have the same PID and start time: then neither is known. */
static uint32_t find(const struct gs_card *card, uint64_t pid, uint64_t start_time, struct gs_figure *figure)
{
    uint32_t found = 0;
    uint64_t key = gs_card_key(card->uuid);
    const struct gpuslice_figures *figures = &buffers[current];
    for (uint64_t i = 0; i < figures->count; i++) {
        const struct gpuslice_figure *of = &figures->of[i];
        if (of->card != key || of->pid != pid || of->start_time != start_time || of->bytes >= GS_MOST_BYTES)
            continue;
        *figure = (struct gs_figure){figures->at_ns, of->bytes};
        found++;
    }
    return found;
}

bool gs_figure_of(const struct gs_card *card, uint64_t pid, uint64_t start_time, struct gs_figure *figure)
{
    gs_lock(&lock);
    bool known = are_fresh() && find(card, pid, start_time, figure) == 1;
    gs_unlock(&lock);
    return known;
}

bool gs_figures_are_after(uint64_t at_ns, uint64_t changed_ns) { return at_ns > changed_ns + COARSE_NS; }
