/* What we count and the driver's figure for this process does not show, or shows later. */
#ifndef GPUSLICE_UNCONFIRMED_H
#define GPUSLICE_UNCONFIRMED_H

#include "policy/cards.h"

/* The figure may lack some memory, or does lack it: managed memory, which belongs to nvidia-uvm, and memory that only a descriptor
 * keeps. */
enum gs_unconfirmed { GS_MAY_BE_UNLISTED, GS_UNLISTED, GS_UNCONFIRMED_KINDS };
void gs_unconfirmed_add(uint32_t card, enum gs_unconfirmed kind, int64_t bytes);
uint64_t gs_unconfirmed(uint32_t card, enum gs_unconfirmed kind);

/* Whether the driver's own use is charged by difference, and not confirmed by a figure yet. */
void gs_set_provisional(uint32_t card, bool provisional);
bool gs_is_provisional(uint32_t card);

/* When the driver's own use is measured next, while a program allocates: kernels are loaded onto the card when they are first
 * launched, and with them the local memory that they need. 0: not planned. */
extern uint64_t gs_measurement_due_ns[GPUSLICE_CARDS];
#define GS_MEASURE_EVERY_NS UINT64_C(1000000000)
/* Memory of another process is no longer open here; a measurement soon shows how much of it was in our figure. */
void gs_loan_ended(uint32_t card);

#endif
