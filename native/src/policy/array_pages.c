/* Takes the first page with room, as the driver was seen to do. If it chooses otherwise, the count is off by a page
 * here and there, until the next measurement by the driver's figure corrects it. */
#include "policy/array_pages.h"

#include <stddef.h>

#include "system/at_fork.h"
#include "system/os.h"

#define PAGE_STEPS 32u /* 2 MiB */
#define MOST_PAGES 65536u

struct page {
    uint64_t context;
    uint64_t steps; /* in use; 0 for a free entry */
};

static struct gs_lock lock;
static struct page *pages; /* a mapping, touched only as far as it is in use */
static uint32_t pages_high;

static void forget(void)
{
    lock = (struct gs_lock){0};
    pages = NULL;
    pages_high = 0;
}
GS_AT_FORK(forget);

/* Under the lock: the index of a page with room, or of a free entry, or MOST_PAGES. */
static uint32_t find(uint64_t context, uint32_t steps)
{
    uint32_t free_entry = pages_high;
    for (uint32_t i = 0; i < pages_high; i++) {
        if (pages[i].steps && pages[i].context == context && pages[i].steps + steps <= PAGE_STEPS)
            return i;
        if (!pages[i].steps && free_entry == pages_high)
            free_entry = i;
    }
    return free_entry;
}

static struct gs_array_part take(uint64_t context, uint64_t bytes, bool may_open, bool *opened)
{
    struct gs_array_part part = {.steps = (uint32_t)(bytes / GS_ARRAY_STEP)};
    gs_lock(&lock);
    if (!pages)
        pages = gs_map_private(MOST_PAGES * sizeof *pages);
    uint32_t found = pages ? find(context, part.steps) : MOST_PAGES;
    *opened = found >= MOST_PAGES || !pages[found].steps;
    if (found < MOST_PAGES && (may_open || !*opened)) {
        pages_high = found < pages_high ? pages_high : found + 1;
        pages[found].context = context;
        pages[found].steps += part.steps;
        part.page = found + 1;
    }
    gs_unlock(&lock);
    return part;
}

struct gs_array_part gs_array_page_join(uint64_t context, uint64_t bytes)
{
    bool opened;
    return take(context, bytes, false, &opened);
}

struct gs_array_part gs_array_page_open(uint64_t context, uint64_t bytes, bool *needless)
{
    bool opened;
    struct gs_array_part part = take(context, bytes, true, &opened);
    *needless = !opened;
    return part;
}

bool gs_array_page_leave(struct gs_array_part part)
{
    if (!part.page)
        return true;
    gs_lock(&lock);
    bool last = (pages[part.page - 1].steps -= part.steps) == 0;
    gs_unlock(&lock);
    return last;
}
