/* Keeping the accounts attached to a file that the tenant may truncate, overwrite, replace or remove. */
#ifndef GPUSLICE_ATTACH_H
#define GPUSLICE_ATTACH_H

#include "accounts/accounts.h"

/* In gs_holding, the totals `gained` and `lost` may wrap around; their difference stays correct. */
#define GS_ATTACHMENT_BITS 8

static inline uint64_t gs_holding_bytes(uint64_t gained, uint64_t lost)
{
    int64_t bytes = (int64_t)((gained >> GS_ATTACHMENT_BITS << GS_ATTACHMENT_BITS) - (lost >> GS_ATTACHMENT_BITS << GS_ATTACHMENT_BITS));
    return bytes > 0 ? (uint64_t)bytes >> GS_ATTACHMENT_BITS : 0;
}

static inline struct gs_attachment *gs_attached(const struct gs_accounts *accounts)
{
    return atomic_load_explicit(&accounts->at, memory_order_acquire);
}

/* The key of a card in the region and for the agent: a hash of its uuid, never 0. */
uint64_t gs_card_key(const char *uuid);
/* Claims a slot if we have none. The current attachment; NULL without a region or a free slot. */
struct gs_attachment *gs_attach_claiming(struct gs_accounts *accounts);
static inline struct gs_attachment *gs_attach_with_slot(struct gs_accounts *accounts)
{
    struct gs_attachment *at = gs_attached(accounts);
    return at && __atomic_load_n(&at->slot, __ATOMIC_ACQUIRE) ? at : gs_attach_claiming(accounts);
}
/* The attachment whose number is in this word of a holding, after waiting for a repair in progress. */
struct gs_attachment *gs_attachment_of(struct gs_accounts *accounts, uint64_t word);
/* Repairs an attachment whose slot no longer has our owner word, because somebody overwrote it. */
void gs_attach_anew(struct gs_accounts *accounts, const struct gs_attachment *broken);
void gs_attach_forget(struct gs_accounts *accounts);

#endif
