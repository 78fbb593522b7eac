#include "policy/descriptors.h"

#include "policy/cards.h"
#include "system/at_fork.h"

enum {
    KEPT = 1,      /* the object is gone; a descriptor keeps its memory */
    UNTRACKED = 2, /* cannot be followed, and so counts as open */
};

/* Object → its bytes, the first byte of its locks in `owner`, and the above. */
static struct gs_table exports GS_TABLE_PER_PROCESS;
static struct gs_lock exports_lock GS_PER_PROCESS;
static _Atomic uint32_t lingering GS_PER_PROCESS; /* objects that are gone while their memory is not */

void gs_descriptor_made(uint64_t object, uint32_t card, uint64_t bytes, int descriptor)
{
    struct gs_entry made = {.key = object, .card = card, .bytes = bytes};
    GS_GUARD(&exports_lock);
    gs_table_get(&exports, object, &made);
    struct gs_attachment at = gs_accounts_at(&gs_accounts);
    if (!gs_export_made(&gs_accounts.exports, at.region, at.slot, &made.owner, card, bytes, descriptor))
        made.kind |= UNTRACKED;
    gs_table_put(&exports, &made);
}

static bool is_open(const struct gs_entry *export)
{
    return export->kind & UNTRACKED || gs_export_is_open(&gs_accounts.exports, export->owner, export->bytes);
}

bool gs_descriptors_keep(uint64_t object)
{
    struct gs_entry kept;
    GS_GUARD(&exports_lock);
    bool open = gs_table_take(&exports, object, &kept) && is_open(&kept);
    if (open) { /* its bytes are in nobody's figure, or in an importer's */
        kept.kind |= KEPT;
        gs_table_put(&exports, &kept);
        gs_accounts_unconfirmed(&gs_accounts, kept.card, GS_UNLISTED, (int64_t)kept.bytes);
        atomic_fetch_add(&lingering, 1);
    }
    return open;
}

static bool is_over(struct gs_entry *export, void *unused)
{
    (void)unused;
    if (!(export->kind & KEPT) || is_open(export))
        return false;
    gs_accounts_unconfirmed(&gs_accounts, export->card, GS_UNLISTED, -(int64_t)export->bytes); /* the order is release()'s */
    gs_accounts_return_exported(&gs_accounts, export->card, export->bytes);
    gs_accounts_unconfirmed(&gs_accounts, export->card, GS_MAY_BE_UNLISTED, -(int64_t)export->bytes);
    atomic_fetch_sub(&lingering, 1);
    return true;
}

bool gs_descriptors_settle(void)
{
    uint32_t before = atomic_load(&lingering);
    if (gs_likely(!before))
        return false;
    GS_GUARD(&exports_lock);
    gs_table_sift(&exports, is_over, NULL);
    return atomic_load(&lingering) < before;
}
