/* A neighbour that begins is seen a few milliseconds later, and what was launched untimed until then is not charged.
 * Therefore it is little, even if nobody waits for it. */
#include "policy/alone.h"

#define ALONE_FOR_NS 4000000u
#define UNTIMED_NS 2000000                 /* as much as may be in flight beside an interactive container */
#define PUBLISHED_FOR_NS (GS_RESTS_NS / 2) /* how long a published launch shows others that this container is at work */

bool gs_alone_may_begin(const struct gs_alone *alone, const struct gs_queue *queue, const struct gs_neighbourhood *beside,
                        uint64_t now_ns)
{
    bool published = now_ns - alone->timed_ns < PUBLISHED_FOR_NS;
    bool kept_up = now_ns + ALONE_FOR_NS >= alone->until_ns + UNTIMED_NS; /* on all streams, if it took what was expected */
    return kept_up && !queue->count && (!beside->count || (published && gs_all_rest(beside, now_ns)));
}

void gs_alone_begin(struct gs_alone *alone, const struct gs_neighbourhood *beside, uint64_t now_ns)
{
    alone->timed_ns = 0;
    __atomic_store_n(&alone->left_ns, beside->count ? UNTIMED_NS : GS_NOT_COUNTED, __ATOMIC_RELAXED);
    __atomic_store_n(&alone->until_ns, now_ns + ALONE_FOR_NS, __ATOMIC_RELEASE);
}

bool gs_alone_affords(struct gs_alone *alone, const struct gs_queue *queue, uint64_t key)
{
    int64_t left = __atomic_load_n(&alone->left_ns, __ATOMIC_RELAXED), known = gs_queue_known_ns(queue, key);
    if (left == GS_NOT_COUNTED)
        return true;
    return known && known <= left && __atomic_fetch_sub(&alone->left_ns, known, __ATOMIC_RELAXED) >= known;
}
