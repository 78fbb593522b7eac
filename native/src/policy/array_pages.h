/* Arrays smaller than a page of the driver's share pages, as seen on an H100 (docs/results/gpu-isolation.md). */
#ifndef GPUSLICE_ARRAY_PAGES_H
#define GPUSLICE_ARRAY_PAGES_H

#include <stdbool.h>
#include <stdint.h>

#define GS_ARRAY_STEP (UINT64_C(64) << 10)

struct gs_array_part {
    uint32_t page;  /* from 1 on; 0: none, because no page can be recorded */
    uint32_t steps; /* of GS_ARRAY_STEP */
};

/* A part of a page of that context that is already open; page 0 if none has room. */
struct gs_array_part gs_array_page_join(uint64_t context, uint64_t bytes);
/* The same for a caller that has reserved a page; `needless` is set if another page has room by now. */
struct gs_array_part gs_array_page_open(uint64_t context, uint64_t bytes, bool *needless);
/* True for the last part of its page. */
bool gs_array_page_leave(struct gs_array_part part);

#endif
