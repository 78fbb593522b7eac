/* What a process's contexts take and release beside the memory a program asks for. */
#ifndef GPUSLICE_DRIVER_OVERHEAD_H
#define GPUSLICE_DRIVER_OVERHEAD_H

#include "policy/core.h"

/* Gives back what an entry was charged. It must be out of the table of entries. */
uint64_t gs_release_entry(struct gs_entry *entry);
void gs_drop_context(CUcontext context);
void gs_forget_pages(void);
void gs_forget_own(void);
void gs_forget_physical(void);
void gs_forget_holders(void);
/* Gives back what only a descriptor kept that is closed by now; whether there was any. */
bool gs_physical_settle_descriptors(void);
void gs_unpin(uint64_t holder); /* whatever was mapped into it or bound to it */
void gs_forget_graphs(void);
void gs_forget_imports(void);
void gs_imports_drop_context(CUcontext context);

/* Compares the driver's own figure for this process with ours and takes the difference into the accounts. False where the
 * driver has no such figure. */
bool gs_measure(struct gs_card *card);
/* The same once in a while, for what came unseen. */
void gs_measure_sometimes(struct gs_card *card);

/* A context is current that we did not see being made: it is taken into the accounts. */
void gs_context_noticed(struct gs_card *card, CUdevice device, CUcontext context);
bool gs_has_context(struct gs_card *card);

/* Bytes that we count and the driver's figure for this process may lack, and such as it may hold beside what we count. */
enum gs_doubt { GS_PERHAPS_MISSING, GS_PERHAPS_MORE, GS_DOUBTS };
void gs_doubt(uint32_t card, enum gs_doubt doubt, int64_t bytes);

#endif
