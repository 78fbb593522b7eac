/* Device addresses. One range of the process's own address space is set aside and handed out in steps of 2 MiB, so
 * that no device address is ever a host allocation, contents have a place to be, and an address leads to its
 * allocation by one look into a table. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "driver.h"

#define STEP (2 * MIB)
#define LARGE_BYTES (64 * MIB) /* a fill of more than that leaves zeros or, with another value, what was there */

#define CLASSES 64

struct span {
    uint64_t page, pages;
    struct span *next;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static uint64_t base, page_count, next_page;
static struct allocation **owners; /* by page */
static struct allocation *all, *spare_allocations;
static struct span *spans[CLASSES + 1]; /* free ranges of exactly n pages; [0] holds all longer ones */
static struct span *spare_spans;
static uint64_t last_id;

void memory_lock(void) { pthread_mutex_lock(&mutex); }
void memory_unlock(void) { pthread_mutex_unlock(&mutex); }

static void *reserve(uint64_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

/* As much as this process may have: sanitizers and ulimits leave less. */
static bool open_range(void)
{
    for (uint64_t bytes = UINT64_C(1) << 41; !base && bytes >= 64 * STEP; bytes /= 2) {
        uint64_t memory = (uint64_t)(uintptr_t)reserve(bytes);
        if (!memory)
            continue;
        base = (memory + STEP - 1) / STEP * STEP;
        page_count = (memory + bytes - base) / STEP;
        owners = reserve(page_count * sizeof *owners);
    }
    return base && owners;
}

static struct span **list_for(uint64_t pages) { return &spans[pages <= CLASSES ? pages : 0]; }

static void keep_span(uint64_t page, uint64_t pages)
{
    struct span *span = spare_spans;
    if (span)
        spare_spans = span->next;
    else
        span = malloc(sizeof *span);
    if (!span)
        return; /* the addresses are lost, nothing else */
    *span = (struct span){page, pages, *list_for(pages)};
    *list_for(pages) = span;
}

/* A free range of the pages or more, taken off its list; what is left over goes back. */
static bool reuse_span(uint64_t pages, uint64_t *page)
{
    for (struct span **link = list_for(pages); *link; link = &(*link)->next) {
        struct span *span = *link;
        if (span->pages < pages)
            continue;
        *link = span->next;
        *page = span->page;
        uint64_t left = span->pages - pages;
        span->next = spare_spans;
        spare_spans = span;
        if (left)
            keep_span(*page + pages, left);
        return true;
    }
    return false;
}

static bool take_pages(uint64_t pages, uint64_t *page)
{
    if (!base && !open_range())
        return false;
    if (reuse_span(pages, page))
        return true;
    if (pages > page_count - next_page)
        return false;
    *page = next_page;
    next_page += pages;
    return true;
}

static void set_owner(const struct allocation *at, struct allocation *owner)
{
    uint64_t page = (at->address - base) / STEP;
    for (uint64_t i = 0; i < at->pages_bytes / STEP; i++)
        owners[page + i] = owner;
}

static void link_allocation(struct allocation *allocation)
{
    allocation->next = all;
    allocation->previous = NULL;
    if (all)
        all->previous = allocation;
    all = allocation;
}

static void unlink_allocation(struct allocation *allocation)
{
    if (allocation->next)
        allocation->next->previous = allocation->previous;
    if (allocation->previous)
        allocation->previous->next = allocation->next;
    else
        all = allocation->next;
}

static struct allocation *blank_allocation(void)
{
    struct allocation *allocation = spare_allocations;
    if (allocation)
        spare_allocations = allocation->next;
    else
        allocation = malloc(sizeof *allocation);
    return allocation;
}

struct allocation *allocation_first(void) { return all; }

struct allocation *allocation_new(uint64_t bytes, enum allocation_kind kind, struct context *context)
{
    uint64_t pages = (bytes + STEP - 1) / STEP;
    uint64_t page;
    struct allocation *allocation = blank_allocation();
    if (!allocation)
        return NULL;
    if (!take_pages(pages, &page)) {
        allocation->next = spare_allocations;
        spare_allocations = allocation;
        return NULL;
    }
    *allocation = (struct allocation){.address = base + page * STEP,
                                      .bytes = bytes,
                                      .pages_bytes = pages * STEP,
                                      .kind = kind,
                                      .context = context ? context->memory : NULL,
                                      .id = ++last_id,
                                      .device = context ? context->device : NULL};
    set_owner(allocation, allocation);
    link_allocation(allocation);
    return allocation;
}

struct allocation *allocation_at(uint64_t address)
{
    if (!base || address < base || (address - base) / STEP >= page_count)
        return NULL;
    return owners[(address - base) / STEP];
}

void allocation_drop(struct allocation *allocation)
{
    sim_release(allocation->record);
    set_owner(allocation, NULL);
    unlink_allocation(allocation);
    if (allocation->touched)
        madvise((void *)(uintptr_t)allocation->address, allocation->pages_bytes, MADV_DONTNEED);
    keep_span((allocation->address - base) / STEP, allocation->pages_bytes / STEP);
    allocation->next = spare_allocations;
    spare_allocations = allocation;
}

/* ------------------------------------------------------------------------------------------ contents */

/* Host memory is its own content; device memory has one where it is allocated. */
static bool has_content(uint64_t address, size_t bytes, bool writing)
{
    if (!base || address < base || address >= base + page_count * STEP)
        return true;
    memory_lock();
    struct allocation *allocation = allocation_at(address);
    bool inside = allocation && address + bytes <= allocation->address + allocation->pages_bytes;
    if (inside && writing)
        allocation->touched = true;
    memory_unlock();
    return inside;
}

static bool is_on_device(uint64_t address) { return base && address >= base && address < base + page_count * STEP; }

static bool is_resident(uint64_t from, size_t bytes)
{
    unsigned char pages[STEP / 4096 + 1];
    uint64_t start = from / 4096 * 4096;
    size_t count = (from + bytes - start + 4095) / 4096;
    if (mincore((void *)(uintptr_t)start, from + bytes - start, pages) != 0)
        return true;
    while (count && !(pages[count - 1] & 1))
        count--;
    return count != 0;
}

/* Between two places of the card: what nobody ever wrote stays so, and takes no memory of the host. */
static void move_large(uint64_t to, uint64_t from, size_t bytes)
{
    for (size_t done = 0, part; done < bytes; done += part) {
        part = bytes - done < STEP ? bytes - done : STEP;
        if (is_resident(from + done, part) || is_resident(to + done, part))
            memmove((void *)(uintptr_t)(to + done), (const void *)(uintptr_t)(from + done), part);
    }
}

/* On the card, where nobody ever wrote. */
static bool is_blank(uint64_t address)
{
    memory_lock();
    const struct allocation *allocation = allocation_at(address);
    bool blank = allocation && !allocation->touched;
    memory_unlock();
    return blank;
}

void bytes_move(uint64_t to, uint64_t from, size_t bytes)
{
    if (!bytes || (is_blank(from) && is_blank(to)) || !has_content(from, bytes, false) || !has_content(to, bytes, true))
        return;
    bool apart = to + bytes <= from || from + bytes <= to;
    if (bytes > LARGE_BYTES && apart && is_on_device(to) && is_on_device(from))
        move_large(to, from, bytes);
    else
        memmove((void *)(uintptr_t)to, (const void *)(uintptr_t)from, bytes);
}

void bytes_fill(uint64_t to, const void *pattern, size_t pattern_bytes, size_t count)
{
    static const char zeros[16];
    size_t bytes = pattern_bytes * count;
    bool large = bytes > LARGE_BYTES && is_on_device(to);
    if (!count || (large && (is_blank(to) || memcmp(pattern, zeros, pattern_bytes) != 0)) || !has_content(to, bytes, true))
        return;
    char *out = (char *)(uintptr_t)to;
    if (large) {
        uint64_t first = (to + STEP - 1) / STEP * STEP, end = (to + bytes) / STEP * STEP;
        memset(out, 0, first - to);
        madvise((void *)(uintptr_t)first, end - first, MADV_DONTNEED);
        memset((void *)(uintptr_t)end, 0, to + bytes - end);
        return;
    }
    for (size_t i = 0; i < count; i++)
        memcpy(out + i * pattern_bytes, pattern, pattern_bytes);
}
