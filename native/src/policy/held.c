#include "policy/held.h"

#include "accounts/in_flight.h"
#include "accounts/slots.h"
#include "policy/pool_accounts.h"
#include "system/at_fork.h"

static struct gs_table pages GS_TABLE_PER_PROCESS;

/* The driver allocates pages of 2 MiB. A large block has its own; small ones share a page, which the address shows: the
 * page is charged with its first block and returned with its last. */
static bool has_own_pages(CUdeviceptr address, uint64_t bytes)
{
    return address % GS_PAGE_BYTES == 0 && bytes > GS_PAGE_BYTES / 2;
}

static uint64_t count_pages(CUdeviceptr address, uint64_t bytes, int by)
{
    uint64_t charged = 0;
    for (uint64_t page = address / GS_PAGE_BYTES; page <= (address + bytes - 1) / GS_PAGE_BYTES; page++) {
        uint64_t before = gs_table_count(&pages, page + 1, by);
        charged += before == (by > 0 ? 0u : 1u) ? GS_PAGE_BYTES : 0;
    }
    return charged;
}

void gs_hold(struct gs_place place, CUdeviceptr address, uint64_t bytes, uint64_t reserved, uint32_t managed)
{
    bool own = has_own_pages(address, bytes);
    uint64_t charge = gs_round_up(bytes, GS_PAGE_BYTES);
    struct gs_entry entry = {.key = address,
                             .bytes = own ? charge : bytes,
                             .owner = (uint64_t)(uintptr_t)place.context,
                             .kind = (own ? GS_LINEAR : GS_SMALL) | managed,
                             .card = place.card->index};
    if (!gs_table_put(&gs_held, &entry)) { /* stays charged, as it cannot be recognised when it is freed */
        gs_settle(place.card, reserved, reserved);
        return;
    }
    charge = own ? charge : count_pages(address, bytes, 1);
    if (managed)
        gs_accounts_unconfirmed(&gs_accounts, entry.card, GS_UNLISTED, (int64_t)charge);
    gs_settle(place.card, reserved, charge);
}

/* ---- arrays smaller than a page, which share pages ---- */

/* As seen on an H100 (docs/results/gpu-isolation.md): each takes the first page with room. If a driver chooses otherwise, the count is
 * off by a page here and there, until the next measurement by the driver's figure corrects it. */
#define PAGE_STEPS 32u /* 2 MiB */
#define MOST_PAGES 65536u

struct array_page {
    uint64_t context;
    uint64_t steps; /* in use; 0 for a free entry */
};

static struct gs_lock array_lock GS_PER_PROCESS;
static struct array_page *array_pages GS_PER_PROCESS; /* a mapping, touched only as far as it is in use */
static uint32_t array_pages_high GS_PER_PROCESS;

/* Under the lock: the index of a page with room, or of a free entry, or MOST_PAGES. */
static uint32_t find_array_page(uint64_t context, uint32_t steps)
{
    uint32_t free_entry = array_pages_high;
    for (uint32_t i = 0; i < array_pages_high; i++) {
        if (array_pages[i].steps && array_pages[i].context == context && array_pages[i].steps + steps <= PAGE_STEPS)
            return i;
        if (!array_pages[i].steps && free_entry == array_pages_high)
            free_entry = i;
    }
    return free_entry;
}

static struct gs_array_part take_part(uint64_t context, uint64_t bytes, bool may_open, bool *opened)
{
    struct gs_array_part part = {.steps = (uint32_t)(bytes / GS_ARRAY_STEP)};
    GS_GUARD(&array_lock);
    if (!array_pages)
        array_pages = gs_map_private(MOST_PAGES * sizeof *array_pages);
    uint32_t found = array_pages ? find_array_page(context, part.steps) : MOST_PAGES;
    *opened = found >= MOST_PAGES || !array_pages[found].steps;
    if (found < MOST_PAGES && (may_open || !*opened)) {
        array_pages_high = found < array_pages_high ? array_pages_high : found + 1;
        array_pages[found].context = context;
        array_pages[found].steps += part.steps;
        part.page = found + 1;
    }
    return part;
}

struct gs_array_part gs_array_page_join(uint64_t context, uint64_t bytes)
{
    bool opened;
    return take_part(context, bytes, false, &opened);
}

struct gs_array_part gs_array_page_open(uint64_t context, uint64_t bytes, bool *needless)
{
    bool opened;
    struct gs_array_part part = take_part(context, bytes, true, &opened);
    *needless = !opened;
    return part;
}

bool gs_array_page_leave(struct gs_array_part part)
{
    if (!part.page)
        return true;
    GS_GUARD(&array_lock);
    return (array_pages[part.page - 1].steps -= part.steps) == 0;
}

/* ---- releasing ---- */

static uint64_t release(struct gs_entry *entry, const struct gs_giver *on)
{
    uint64_t bytes = 0;
    switch (entry->kind & 0xff) {
    case GS_LINEAR:
    case GS_ARRAY:
    case GS_EXTERNAL: bytes = entry->bytes; break;
    case GS_SMALL_ARRAY:
        bytes =
            gs_array_page_leave((struct gs_array_part){(uint32_t)(entry->bytes >> 8), entry->bytes & 0xff}) ? GS_PAGE_BYTES : 0;
        break;
    case GS_SMALL: bytes = count_pages(entry->key, entry->bytes, -1); break;
    case GS_STREAM_ORDERED: gs_pool_block_freed(entry, on); break;
    case GS_OPENED: gs_accounts_imported(&gs_accounts, entry->card, -1); break;
    case GS_IMPORT:
        gs_accounts_imported(&gs_accounts, entry->card, -1);
        bytes = entry->kind & GS_EXPORTED ? entry->bytes : 0;
        break;
    }
    if (entry->kind & GS_MANAGED) /* before the return: what the figure lacks must be counted */
        gs_accounts_unconfirmed(&gs_accounts, entry->card, GS_UNLISTED, -(int64_t)bytes);
    if (entry->kind & GS_EXPORTED)
        gs_accounts_return_exported(&gs_accounts, entry->card, bytes);
    else
        gs_accounts_return(&gs_accounts, entry->card, bytes);
    if (entry->kind & GS_EXPORTED) /* after the return: what is counted and may be missing must be in doubt */
        gs_accounts_unconfirmed(&gs_accounts, entry->card, GS_MAY_BE_UNLISTED, -(int64_t)entry->bytes);
    return bytes;
}

uint64_t gs_release_entry(struct gs_entry *entry)
{
    gs_accounts_changed(&gs_accounts, entry->card);
    return release(entry, NULL);
}

/* The most that is still counted of what the driver has freed. */
static uint64_t most_of(const struct gs_entry *entry)
{
    switch (entry->kind & 0xff) {
    case GS_LINEAR:
    case GS_ARRAY:
    case GS_EXTERNAL: return entry->bytes;
    case GS_SMALL_ARRAY: return GS_PAGE_BYTES;
    case GS_SMALL: return gs_round_up(entry->bytes, GS_PAGE_BYTES) + GS_PAGE_BYTES;
    case GS_IMPORT: return entry->kind & GS_EXPORTED ? entry->bytes : 0;
    case GS_STREAM_ORDERED: /* a living pool itself reports what it keeps */
        return gs_pool_is_destroyed(entry->owner) || entry->kind & GS_LENT ? GS_MOST_BYTES : 0;
    default: return 0;
    }
}

struct gs_releasing gs_release_begins(uint64_t key)
{
    struct gs_releasing releasing = {0};
    releasing.known = gs_table_take(&gs_held, key, &releasing.entry);
    if (releasing.known) {
        releasing.bytes = most_of(&releasing.entry);
        gs_flight_begins(&gs_accounts, releasing.entry.card, GS_RELEASING, releasing.bytes);
    }
    return releasing;
}

int gs_released_on(struct gs_releasing *releasing, int result, const struct gs_giver *on)
{
    if (!releasing->known)
        return result;
    uint32_t card = releasing->entry.card;
    if (result == CUDA_SUCCESS)
        release(&releasing->entry, on);
    else
        gs_table_put(&gs_held, &releasing->entry);
    gs_flight_ends(&gs_accounts, card, GS_RELEASING, releasing->bytes);
    return result;
}

int gs_released(struct gs_releasing *releasing, int result) { return gs_released_on(releasing, result, NULL); }

/* ---- destroyed contexts ---- */

static bool drop_with_context(struct gs_entry *entry, void *context)
{
    if (entry->owner != (uint64_t)(uintptr_t)context)
        return false;
    gs_release_entry(entry);
    return true;
}

void gs_drop_context(CUcontext context) { gs_table_sift(&gs_held, drop_with_context, context); }
