/* Pools of stream-ordered memory, and graphs' memory: the driver reserves and gives back as it sees fit, and tells
 * how much it has reserved. That is what is charged. */
#ifndef GPUSLICE_POOLS_H
#define GPUSLICE_POOLS_H

#include "policy/core.h"

extern bool gs_pools_exist;

/* Asks the driver again what it has reserved for this process. */
void gs_pools_refresh(void);
/* Lets the driver give back what it keeps and nobody uses; whether there was anything to ask. */
bool gs_pools_trim(void);
void gs_pools_forget(void);
/* A block is gone whose pool may be gone already. */
void gs_pool_block_freed(const struct gs_entry *entry);

/* After anything that may have let pools shrink. */
static inline void gs_pools_changed(void)
{
    if (gs_unlikely(__atomic_load_n(&gs_pools_exist, __ATOMIC_RELAXED)))
        gs_pools_refresh();
}

/* Graphs' memory nodes: one account per device. */
void gs_graph_memory_seen(CUdevice device, struct gs_card *card);
bool gs_graph_memory_exists(void);
bool gs_ask_graph_memory(CUdevice device, int attribute, uint64_t *value);
/* Takes the device's reserved bytes into the accounts, in which `reserved` are counted already. */
void gs_graph_settle(CUdevice device, struct gs_card *card, uint64_t reserved);

#endif
