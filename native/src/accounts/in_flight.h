/* Driver calls in flight. An allocation is counted before the driver makes it, and freed memory is counted until after the
 * driver has released it. During the call the driver may hold less than we count. */
#ifndef GPUSLICE_IN_FLIGHT_H
#define GPUSLICE_IN_FLIGHT_H

#include "accounts/accounts.h"

/* To be called before the bytes are reserved, or before the driver is asked to free them. `bytes` is an upper bound. */
void gs_flight_begins(struct gs_accounts *accounts, uint32_t card, enum gs_flight flight, uint64_t bytes);
/* To be called when the account and the driver agree again. */
void gs_flight_ends(struct gs_accounts *accounts, uint32_t card, enum gs_flight flight, uint64_t bytes);
uint16_t gs_flights(const struct gs_accounts *accounts, uint32_t card); /* their number */

/* A rest: a moment in which this process has no calls in flight and starts none, so that the driver's figure matches the
 * account. If an allocation takes longer than 20 ms, or a free longer than 1 ms because it waits for a kernel, the rest begins
 * without waiting for it, and so do all later ones. No thread is delayed for longer than that either. */
void gs_rest_begins(struct gs_accounts *accounts, uint32_t card);
void gs_rest_ends(struct gs_accounts *accounts, uint32_t card);

/* A query to the driver takes time, during which other threads keep allocating. A span gives the least and the most of our
 * account that the driver can have held at any moment of the query. They differ by no more than what was in flight. */
struct gs_span {
    uint64_t lost, gained, taking;
};
struct gs_bounds {
    uint64_t least, most;
};
static inline uint64_t gs_less(uint64_t from, uint64_t bytes) { return from > bytes ? from - bytes : 0; }
void gs_span_begin(const struct gs_accounts *accounts, uint32_t card, struct gs_span *span);
struct gs_bounds gs_span_end(const struct gs_accounts *accounts, uint32_t card, const struct gs_span *span);

#endif
