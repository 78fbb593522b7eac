/* What a process's contexts take and release beside the memory a program asks for. */
#ifndef GPUSLICE_OWN_H
#define GPUSLICE_OWN_H

#include "core.h"

/* Gives back what an entry was charged. It must be out of the table of entries. */
uint64_t gs_release_entry(struct gs_entry *entry);
void gs_drop_context(CUcontext context);
void gs_forget_pages(void);
void gs_forget_own(void);
void gs_forget_physical(void);
void gs_forget_holders(void);
void gs_unpin(uint64_t holder); /* whatever was mapped into it or bound to it */
void gs_forget_graphs(void);
void gs_forget_imports(void);

/* Compares the driver's own figure for this process with ours and takes the difference into the books. False where the
 * driver has no such figure. */
bool gs_measure(struct gs_card *card);

#endif
