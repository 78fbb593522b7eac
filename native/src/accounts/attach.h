/* Keeping the accounts attached to a file that the tenant may cut short, overwrite, replace or remove. */
#ifndef GPUSLICE_ATTACH_H
#define GPUSLICE_ATTACH_H

#include "accounts/accounts.h"

/* Of gs_holding: what it gained and lost may pass all that the words can hold. Their difference does not. */
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

/* By which a card is known in the region and to the agent: a hash of its uuid, never 0. */
uint64_t gs_card_key(const char *uuid);
/* The attachment, with a slot that is ours; NULL without. */
struct gs_attachment *gs_attach_claiming(struct gs_accounts *accounts);
static inline struct gs_attachment *gs_attach_with_slot(struct gs_accounts *accounts)
{
    struct gs_attachment *at = gs_attached(accounts);
    return at && __atomic_load_n(&at->slot, __ATOMIC_ACQUIRE) ? at : gs_attach_claiming(accounts);
}
/* The attachment in which a holding's word stands, once its writer is done. */
struct gs_attachment *gs_attachment_of(struct gs_accounts *accounts, uint64_t word);
/* Our slot bears another word than ours: somebody wrote over it. */
void gs_attach_anew(struct gs_accounts *accounts, const struct gs_attachment *broken);
void gs_attach_forget(struct gs_accounts *accounts);

#endif
