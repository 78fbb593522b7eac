#include "policy/reserve.h"

#include "policy/descriptors.h"
#include "policy/pool_accounts.h"
#include "policy/process_usage.h"
#include "policy/provisional.h"

bool gs_reserve_quietly(struct gs_card *card, uint64_t bytes)
{
    if (gs_take_room(card, bytes, card->limit_bytes))
        return true;
    /* As the driver does before it gives up: reclaim memory that pools keep and nobody uses. */
    bool settled = gs_descriptors_settle(), trimmed = gs_pools_trim();
    return ((settled || trimmed) && gs_take_room(card, bytes, card->limit_bytes)) || gs_reserve_by_figures(card, bytes);
}

bool gs_reserve(struct gs_card *card, uint64_t bytes)
{
    gs_measure_sometimes(card);
    bool reserved = gs_reserve_quietly(card, bytes);
    if (!reserved)
        gs_refuse(card);
    return reserved;
}
