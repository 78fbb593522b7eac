#include "policy/descriptors.h"

#include "policy/driver_overhead.h"
#include "policy/held.h"
#include "system/at_fork.h"
#include "system/open_file_locks.h"

struct export {
    struct export *next;
    uint64_t object;
    bool kept; /* the object is gone, the descriptor is what keeps its memory */
    uint32_t card;
    uint64_t bytes;
    struct gs_watch watch;
};
#define EXPORTS_AT_ONCE 32 /* in a mapping of their own, which is kept */

static struct gs_lock exports_lock;
static struct export *exports, *unused_exports;
static _Atomic uint32_t lingering; /* objects that are gone and not their memory */

static void forget(void)
{
    exports_lock = (struct gs_lock){0};
    exports = unused_exports = NULL;
    lingering = 0;
}
GS_AT_FORK(forget);

static struct export *new_export(void)
{
    if (!unused_exports) {
        struct export *more = gs_map_private(EXPORTS_AT_ONCE * sizeof *more);
        for (int i = 0; more && i < EXPORTS_AT_ONCE; i++) {
            more[i].next = unused_exports;
            unused_exports = &more[i];
        }
    }
    struct export *made = unused_exports;
    if (made)
        unused_exports = made->next;
    return made;
}

void gs_descriptor_made(uint64_t object, uint32_t card, uint64_t bytes, int descriptor)
{
    gs_lock(&exports_lock);
    struct export *made = new_export();
    if (made) {
        made->object = object;
        made->kept = false;
        made->card = card;
        made->bytes = bytes;
        bool watched = gs_watch_begin(&made->watch, descriptor);
        made->next = watched ? exports : unused_exports;
        *(watched ? &exports : &unused_exports) = made;
    }
    gs_unlock(&exports_lock);
}

static bool has_export(uint64_t object)
{
    for (const struct export *it = exports; it; it = it->next)
        if (it->object == object)
            return true;
    return false;
}

/* Takes those out of the list that were closed meanwhile: an object's, or (0) all whose object is gone. With the last of
 * these the memory is gone too. */
static void forget_closed(uint64_t object)
{
    for (struct export **at = &exports, *it; (it = *at);) {
        if ((object ? it->object != object : !it->kept) || gs_watch_is_open(&it->watch)) {
            at = &it->next;
            continue;
        }
        *at = it->next;
        it->next = unused_exports;
        unused_exports = it;
        if (!it->kept || has_export(it->object))
            continue;
        gs_doubt(it->card, GS_UNLISTED, -(int64_t)it->bytes); /* before it is returned, as below */
        struct gs_entry gone = {.bytes = it->bytes, .kind = GS_LINEAR | GS_EXPORTED, .card = it->card};
        gs_release_entry(&gone);
        atomic_fetch_sub(&lingering, 1);
    }
}

bool gs_descriptors_keep(uint64_t object)
{
    gs_lock(&exports_lock);
    forget_closed(object);
    bool kept = false;
    for (struct export *it = exports; it; it = it->next) {
        if (it->object != object)
            continue;
        if (!kept) /* in nobody's figure, or an importer's */
            gs_doubt(it->card, GS_UNLISTED, (int64_t)it->bytes);
        kept = it->kept = true;
    }
    atomic_fetch_add(&lingering, kept);
    gs_unlock(&exports_lock);
    return kept;
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
