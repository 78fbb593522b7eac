/* Arrays of less than a page of the driver's share pages, as an H100 showed (docs/results/gpu-isolation.md). */
#ifndef GPUSLICE_ARRAY_PAGES_H
#define GPUSLICE_ARRAY_PAGES_H

#include <stdbool.h>
#include <stdint.h>

#define GS_ARRAY_STEP (UINT64_C(64) << 10)

struct gs_array_part {
    uint32_t page;  /* from 1 on; 0 for none: no page can be written down */
    uint32_t steps; /* of GS_ARRAY_STEP */
};

/* A part of a page of that context's that is open already; page 0 where none has room. */
struct gs_array_part gs_array_page_join(uint64_t context, uint64_t bytes);
/* The same for whom a page has been reserved; `needless` where another has room by now. */
struct gs_array_part gs_array_page_open(uint64_t context, uint64_t bytes, bool *needless);
/* True with the last part of its page. */
bool gs_array_page_leave(struct gs_array_part part);

#endif
