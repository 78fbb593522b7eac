#include "policy/descriptors.h"

#include "policy/held.h"
#include "policy/process_usage.h"
#include "policy/unconfirmed.h"
#include "system/at_fork.h"

struct export {
    struct export *next;
    uint64_t object;
    bool kept;      /* the object is gone; a descriptor keeps its memory */
    bool untracked; /* cannot be followed, and so counts as open */
    uint32_t card;
    uint64_t bytes;
    struct gs_bytes locked;
};
#define EXPORTS_AT_ONCE 32 /* in a mapping of their own, which is kept */

static struct gs_lock exports_lock;
static struct export *exports, *unused_exports;
static _Atomic uint32_t lingering; /* objects that are gone while their memory is not */

static void forget(void)
{
    exports_lock = (struct gs_lock){0};
    exports = unused_exports = NULL;
    lingering = 0;
}
GS_AT_FORK(forget);

static struct export *export_of(uint64_t object)
{
    struct export *it = exports;
    while (it && it->object != object)
        it = it->next;
    return it;
}

static struct export *new_export(uint64_t object, uint32_t card, uint64_t bytes)
{
    if (!unused_exports) {
        struct export *more = gs_map_private(EXPORTS_AT_ONCE * sizeof *more);
        for (int i = 0; more && i < EXPORTS_AT_ONCE; i++) {
            more[i].next = unused_exports;
            unused_exports = &more[i];
        }
    }
    struct export *made = unused_exports;
    if (!made)
        return NULL;
    unused_exports = made->next;
    *made = (struct export){.next = exports, .object = object, .card = card, .bytes = bytes};
    return exports = made;
}

void gs_descriptor_made(uint64_t object, uint32_t card, uint64_t bytes, int descriptor)
{
    gs_lock(&exports_lock);
    struct export *made = export_of(object);
    if (!made)
        made = new_export(object, card, bytes);
    struct gs_attachment at = gs_accounts_at(&gs_accounts);
    if (made && !gs_export_made(&gs_accounts.exports, at.region, at.slot, &made->locked, card, bytes, descriptor))
        made->untracked = true;
    gs_unlock(&exports_lock);
}

static bool is_open(const struct export *it) { return it->untracked || gs_export_is_open(&gs_accounts.exports, it->locked); }

/* Removes entries that have no open descriptor: those of one object, or (0) all whose object is gone, and whose memory
 * is therefore gone as well. */
static void forget_closed(uint64_t object)
{
    for (struct export **at = &exports, *it; (it = *at);) {
        if ((object ? it->object != object : !it->kept) || is_open(it)) {
            at = &it->next;
            continue;
        }
        *at = it->next;
        it->next = unused_exports;
        unused_exports = it;
        if (!it->kept)
            continue;
        gs_unconfirmed_add(it->card, GS_UNLISTED, -(int64_t)it->bytes); /* first: what the figure lacks must be counted */
        struct gs_entry gone = {.bytes = it->bytes, .kind = GS_LINEAR | GS_EXPORTED, .card = it->card};
        gs_release_entry(&gone);
        atomic_fetch_sub(&lingering, 1);
    }
}

bool gs_descriptors_keep(uint64_t object)
{
    gs_lock(&exports_lock);
    forget_closed(object);
    struct export *kept = export_of(object);
    if (kept) { /* its bytes are in nobody's figure, or in an importer's */
        gs_unconfirmed_add(kept->card, GS_UNLISTED, (int64_t)kept->bytes);
        kept->kept = true;
        atomic_fetch_add(&lingering, 1);
    }
    gs_unlock(&exports_lock);
    return kept != NULL;
}

bool gs_descriptors_settle(void)
{
    uint32_t before = atomic_load(&lingering);
    if (gs_likely(!before))
        return false;
    gs_lock(&exports_lock);
    forget_closed(0);
    gs_unlock(&exports_lock);
    return atomic_load(&lingering) < before;
}
