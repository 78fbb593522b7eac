/* The limits file: what the agent allows this container. Read-only for the tenant.
 *
 *     gpuslice 1
 *     GPU-5f3a0c1e-77aa-4b1c-9d5e-0f6f2f1f9a01 memory=4509925376 share=30 cap=100
 *     end 1
 *
 * One line per card: its uuid as NVML spells it, the bytes of device memory ("-" for no limit) and the percentage of
 * compute ("-" for no limit). The other fields are optional: cap=, the most compute that the container may use while others
 * leave it some, a percentage not below the share, which is the default; class=interactive, if it goes before others;
 * request=, the bytes that are its own, where it borrows the rest or others borrow from it; and shown=request, if programs
 * are to see no more than that.
 * The last line counts the cards, so that a truncated file is recognised. Anything else makes the whole file corrupt.
 */
#ifndef GPUSLICE_LIMITS_H
#define GPUSLICE_LIMITS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "region.h"

#define GS_LIMITS_FILE_BYTES 8192u
#define GS_NO_LIMIT UINT64_MAX

struct gs_limit {
    char uuid[GPUSLICE_UUID_BYTES];
    uint64_t memory_bytes;    /* GS_NO_LIMIT for none */
    uint64_t request_bytes;   /* of them, or more, its own */
    uint64_t shown_bytes;     /* what programs see as the size of the card */
    uint32_t compute_percent; /* 0 for none */
    uint32_t cap_percent;     /* equal to compute_percent if the file has no cap */
    bool interactive;
};

struct gs_limits {
    uint32_t count;
    struct gs_limit cards[GPUSLICE_CARDS];
};

/* Parses a limits file. If the text is not one, returns false and leaves *limits empty. */
bool gs_limits_parse(const char *text, size_t bytes, struct gs_limits *limits);

enum gs_limits_state { GS_LIMITS_ABSENT, GS_LIMITS_READ, GS_LIMITS_CORRUPT };
enum gs_limits_state gs_limits_read(const char *path, struct gs_limits *limits);

#endif
