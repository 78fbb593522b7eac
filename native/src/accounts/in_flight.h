/* Calls between our account and the driver. What a call takes is counted before the driver makes it, what it gives back is
 * counted until after the driver has let it go: meanwhile the driver may hold less than we count. */
#ifndef GPUSLICE_IN_FLIGHT_H
#define GPUSLICE_IN_FLIGHT_H

#include "accounts/accounts.h"

/* Before the bytes are reserved, or the driver is asked to free them. At most so many. */
void gs_flight_begins(struct gs_accounts *accounts, uint32_t card, enum gs_flight flight, uint64_t bytes);
/* When account and driver say the same again. */
void gs_flight_ends(struct gs_accounts *accounts, uint32_t card, enum gs_flight flight, uint64_t bytes);
uint16_t gs_flights(const struct gs_accounts *accounts, uint32_t card); /* how many */

/* A moment without flights, in which no new one of this process begins: what is asked of the driver in it is exact. Where a
 * call stays with the driver, behind a kernel perhaps, it goes on without. No thread is held up for longer than that. */
void gs_rest_begins(struct gs_accounts *accounts, uint32_t card);
void gs_rest_ends(struct gs_accounts *accounts, uint32_t card);

/* A question to the driver takes time, in which other threads go on. What of our account it held at whatever moment in
 * between, at the least and at the most: as far apart as what was in flight then, and no farther. */
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
