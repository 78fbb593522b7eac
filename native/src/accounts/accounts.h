/* The accounts of the container: reserve, settle, sum. Only this folder writes the memory accounts in the shared region. */
#ifndef GPUSLICE_ACCOUNTS_H
#define GPUSLICE_ACCOUNTS_H

#include "accounts/attach.h"

/* In a forked child: gives up the slot, which is the parent's. */
void gs_accounts_forget(struct gs_accounts *accounts);

/* Reserves these bytes if they fit under the limit, atomically with respect to all processes of the container. */
bool gs_accounts_reserve_at_once(struct gs_accounts *accounts, uint32_t card, uint64_t bytes, uint64_t limit);
/* The same; if the answer depends on calls of others that are in flight, it waits for them first. */
bool gs_accounts_reserve(struct gs_accounts *accounts, uint32_t card, uint64_t bytes, uint64_t limit);
/* Counts bytes that are already allocated, whatever the limit. False only if there is no slot. */
bool gs_accounts_add(struct gs_accounts *accounts, uint32_t card, uint64_t bytes);
void gs_accounts_return(struct gs_accounts *accounts, uint32_t card, uint64_t bytes);
void gs_accounts_count_refusal(struct gs_accounts *accounts, uint32_t card);
/* How much of what we hold the driver uses for itself. */
void gs_accounts_set_own(struct gs_accounts *accounts, uint32_t card, uint64_t bytes);
/* Whether that part may be too high, because the driver's own figure is not known yet. */
void gs_accounts_set_provisional(struct gs_accounts *accounts, uint32_t card, bool provisional);
/* So much more, or less, of what we hold is missing in that figure. */
void gs_accounts_unconfirmed(struct gs_accounts *accounts, uint32_t card, enum gs_unconfirmed kind, int64_t bytes);
void gs_accounts_set_host_pid(struct gs_accounts *accounts, uint32_t pid);

/* What the container holds of a card. Cheap enough for each cuMemGetInfo. */
uint64_t gs_accounts_used(struct gs_accounts *accounts, uint32_t card);
/* What this process holds of a card. */
uint64_t gs_accounts_mine(const struct gs_accounts *accounts, uint32_t card);
/* Memory of ours that other processes may have opened, which stays allocated after we have freed it; and memory of theirs
 * that is open here. */
void gs_accounts_exported(struct gs_accounts *accounts, uint32_t card, int64_t bytes);
void gs_accounts_imported(struct gs_accounts *accounts, uint32_t card, int count);
/* Returns exported bytes, which count as orphaned while another process may have them open. */
void gs_accounts_return_exported(struct gs_accounts *accounts, uint32_t card, uint64_t bytes);

#endif
