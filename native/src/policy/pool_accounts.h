/* Pools of stream-ordered memory, and graphs' memory: the driver reserves and releases memory as it sees fit, and
 * reports how much it has reserved. That is what is charged. */
#ifndef GPUSLICE_POOL_ACCOUNTS_H
#define GPUSLICE_POOL_ACCOUNTS_H

#include "policy/cards.h"
#include "policy/held.h"
#include "policy/pool_givers.h"

extern bool gs_pools_exist;

#define GS_POOL_STEP (UINT64_C(32) << 20) /* pools grow in steps of this */

/* Asks the driver again what it has reserved for this process, for pools that may have shrunk. */
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

/* The stream that gave most recently, of those that will give so much; its bytes are taken. The pool, its streams and events
 * are not destroyed before gs_pool_used(). */
bool gs_pool_giver(CUmemoryPool pool, uint64_t bytes, struct gs_giver *found);
void gs_pool_used(CUmemoryPool pool);
/* This stream is about to be destroyed; NULL: any may be, with its context. */
void gs_pools_stream_ends(CUstream stream);

/* A block is asked for, and counts as used from now on. Whether the pool has room that is paid for: some, but other streams are
 * still to give it back; enough for this stream. */
enum gs_pool_room { GS_POOL_FULL, GS_POOL_PENDING, GS_POOL_IDLE };
enum gs_pool_room gs_pool_take(CUmemoryPool pool, uint64_t bytes, const struct gs_giver *on);
void gs_pool_not_taken(CUmemoryPool pool, uint64_t bytes);
/* `bytes` are reserved for growth in progress. gs_pool_settle() ends that, and returns by how much more the pool has grown, through
 * this call or another, which no thread may count on until it is decided whether that stays. */
void gs_pool_promise(CUmemoryPool pool, uint64_t bytes);
uint64_t gs_pool_settle(CUmemoryPool pool, struct gs_card *card, uint64_t reserved);
void gs_pool_decided(CUmemoryPool pool, bool stays);

/* A pool without a card that is not managed is not ours to count: it is on the host, or another process's. */
void gs_pool_made(CUmemoryPool pool, struct gs_card *card, bool managed);
/* Memory of an imported pool is open here, on this card. */
void gs_pool_opened(CUmemoryPool pool, struct gs_card *card);
/* Other processes may open this block from now on: it then counts as its whole chunk. */
void gs_pool_block_lent(struct gs_entry *entry);
void gs_pool_threshold(CUmemoryPool pool, uint64_t bytes);
/* Before and after it is destroyed, or has not been. */
void gs_pool_ends(CUmemoryPool pool);
void gs_pool_destroyed(CUmemoryPool pool, bool destroyed);
bool gs_pool_is_destroyed(uint64_t owner); /* `owner`: of a block */
/* A block was freed, whose pool may be gone already; when that stream gets there, or at once. */
void gs_pool_block_freed(const struct gs_entry *entry, const struct gs_giver *on);

/* Graphs' memory nodes: one account per device. */
void gs_graph_memory_seen(CUdevice device, struct gs_card *card);
bool gs_graph_memory_exists(void);
bool gs_ask_graph_memory(CUdevice device, int attribute, uint64_t *value);
/* Brings the accounts to the device's reserved bytes; `reserved` of them are already counted. */
void gs_graph_settle(CUdevice device, struct gs_card *card, uint64_t reserved);

#endif
