/* Pools of stream-ordered memory, and graphs' memory: the driver reserves and releases memory as it sees fit, and
 * reports how much it has reserved. That is what is charged. */
#ifndef GPUSLICE_POOL_ACCOUNTS_H
#define GPUSLICE_POOL_ACCOUNTS_H

#include "policy/cards.h"
#include "policy/held.h"

extern bool gs_pools_exist;

#define GS_POOL_STEP (UINT64_C(32) << 20) /* pools grow in steps of this */

/* Asks the driver again what it has reserved for this process. */
void gs_pools_refresh(void);
/* Lets the driver release what it keeps and nobody uses; returns whether there was anything to release from. */
bool gs_pools_trim(void);

/* To be called after anything that may have let pools shrink. */
static inline void gs_pools_changed(void)
{
    if (gs_unlikely(__atomic_load_n(&gs_pools_exist, __ATOMIC_RELAXED)))
        gs_pools_refresh();
}

/* The device's current pool. */
bool gs_pool_of_device(CUmemoryPool *pool, CUdevice device);
/* Whose memory a pool allocates. A pool of ours that has no card yet gets `*card`; otherwise `*card` becomes the
 * pool's. */
enum gs_pool_owner { GS_POOL_OURS, GS_POOL_ELSEWHERE, GS_POOL_UNKNOWN };
enum gs_pool_owner gs_pool_owner(CUmemoryPool pool, struct gs_card **card);
/* What it keeps and nobody uses, in bytes. */
uint64_t gs_pool_idle_bytes(CUmemoryPool pool);
/* `bytes` are reserved for growth in progress. gs_pool_settle() ends that, and returns whether the pool grew by
 * more. */
void gs_pool_promise(CUmemoryPool pool, uint64_t bytes);
bool gs_pool_settle(CUmemoryPool pool, struct gs_card *card, uint64_t reserved);

/* A pool without a card that is not managed is not ours to count: it is on the host, or another process's. */
void gs_pool_made(CUmemoryPool pool, struct gs_card *card, bool managed);
/* Memory of an imported pool is open here, on this card. */
void gs_pool_opened(CUmemoryPool pool, struct gs_card *card);
/* Other processes may open this block from now on: it then counts as its whole chunk. */
void gs_pool_block_lent(struct gs_entry *entry);
void gs_pool_destroyed(CUmemoryPool pool);
bool gs_pool_is_destroyed(uint64_t owner); /* `owner`: of a block */
/* A block was freed, whose pool may be gone already. */
void gs_pool_block_freed(const struct gs_entry *entry);

/* Graphs' memory nodes: one account per device. */
void gs_graph_memory_seen(CUdevice device, struct gs_card *card);
bool gs_graph_memory_exists(void);
bool gs_ask_graph_memory(CUdevice device, int attribute, uint64_t *value);
/* Brings the accounts to the device's reserved bytes; `reserved` of them are already counted. */
void gs_graph_settle(CUdevice device, struct gs_card *card, uint64_t reserved);

#endif
