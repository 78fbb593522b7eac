/* Keeping the accounts attached to a file that the tenant may truncate, overwrite, replace or remove. */
#ifndef GPUSLICE_ATTACH_H
#define GPUSLICE_ATTACH_H

#include "accounts/state.h"

/* Maps the file, creating it if necessary. After false the accounts refuse every reservation. */
bool gs_accounts_open(struct gs_accounts *accounts, const char *path);
/* The current region and this process's slot in it; either may be NULL. */
struct gs_attachment gs_accounts_at(const struct gs_accounts *accounts);
/* Checks, at most every 10 ms, that the file still exists and is complete and that our slot is still ours; if not, repairs
 * it and writes our own accounts again. gs_accounts_used() and gs_accounts_changed() do this too. Returns the time
 * (gs_coarse_ns). */
uint64_t gs_accounts_look(struct gs_accounts *accounts);

/* The index of the card's entry, which is created if necessary; GPUSLICE_CARDS if all entries are other cards'. */
uint32_t gs_accounts_card(struct gs_accounts *accounts, const char *uuid);
void gs_accounts_show_limit(struct gs_accounts *accounts, uint32_t card, uint64_t limit_bytes, uint32_t compute_percent);

/* Records the time of a change to what we hold: called before the change, or at the end of a driver call in flight. What
 * counts bytes (accounts/accounts.h) does not call it. */
void gs_accounts_changed(struct gs_accounts *accounts, uint32_t card);
/* Empties the slots of processes that have ended, and drops orphaned memory that nothing keeps any more. True if less is
 * counted than before. */
bool gs_accounts_sweep(struct gs_accounts *accounts);

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
