/* What this process knows of its container's accounts. */
#ifndef GPUSLICE_STATE_H
#define GPUSLICE_STATE_H

#include <stdbool.h>
#include <stdint.h>

#include "accounts/exports.h"
#include "system/os.h"
#include "region.h"

#define GS_PATH_ROOM 4096
#define GS_ATTACHMENTS 256u

/* Where this process keeps its accounts: the region and its slot there. Repairing a damaged file starts a new attachment. */
struct gs_attachment {
    struct gpuslice_region *region; /* NULL if it could not be mapped: nothing may be granted then */
    struct gpuslice_slot *slot;     /* NULL before the first reservation */
    uint64_t owner;                 /* the slot's `owner` while the slot is ours */
};

#define GS_ERAS 4u                          /* of calls in flight */
enum gs_flight { GS_TAKING, GS_RELEASING }; /* whether a driver call in flight allocates or frees (accounts/in_flight.h) */

/* What the driver's figure for this process may lack, or does lack: managed memory, which belongs to nvidia-uvm, and memory that only
 * a descriptor keeps. Drivers may differ in which process they charge for what two have open. */
enum gs_unconfirmed { GS_MAY_BE_UNLISTED, GS_UNLISTED, GS_UNCONFIRMED_KINDS };

/* What this process holds of a card, in its own memory, so that nobody who overwrites the region can change it. */
struct gs_holding {
    _Atomic uint64_t gained, lost; /* totals in bytes; the lowest eight bits are the number of the current attachment */
    _Atomic uint64_t in_flight[GS_ERAS][2]; /* by enum gs_flight: the number of calls and their bytes (accounts/in_flight.c) */
    _Atomic uint32_t rests;                 /* how many threads want a moment without calls in flight (accounts/in_flight.h) */
    _Atomic uint64_t own_bytes, exported_bytes, imports, changed_ns;
    _Atomic uint64_t loan_ended_ns;                     /* when an import last ended */
    _Atomic uint64_t unconfirmed[GS_UNCONFIRMED_KINDS]; /* of what is counted (accounts/accounts.h) */
    _Atomic bool provisional;
    /* What a forked child keeps. */
    uint64_t limit_bytes, compute_percent; /* for display */
    char uuid[GPUSLICE_UUID_BYTES];        /* "" for an entry that is not a card of ours */
};

struct gs_accounts {
    struct gs_attachment *_Atomic at; /* the current one of `attachments`; NULL before the file is opened */
    struct gs_attachment attachments[GS_ATTACHMENTS];
    struct gs_holding mine[GPUSLICE_CARDS];
    struct gs_file file;
    _Atomic uint64_t looked_ns;
    _Atomic uint32_t host_pid;
    _Atomic uint32_t era; /* of the calls that begin now (accounts/in_flight.c) */
    uint32_t moves;
    struct gs_exports exports;
    char path[GS_PATH_ROOM];
};

/* In gs_holding, the totals `gained` and `lost` may wrap around; their difference stays correct. */
#define GS_ATTACHMENT_BITS 8

static inline uint64_t gs_holding_bytes(uint64_t gained, uint64_t lost)
{
    int64_t bytes =
        (int64_t)((gained >> GS_ATTACHMENT_BITS << GS_ATTACHMENT_BITS) - (lost >> GS_ATTACHMENT_BITS << GS_ATTACHMENT_BITS));
    return bytes > 0 ? (uint64_t)bytes >> GS_ATTACHMENT_BITS : 0;
}

static inline struct gs_attachment *gs_attached(const struct gs_accounts *accounts)
{
    return atomic_load_explicit(&accounts->at, memory_order_acquire);
}

/* Whether others may compare our slot with the driver's figure, to see by how much own_bytes is too high: it must contain all that
 * we count. */
static inline bool gs_is_comparable(const struct gs_holding *holding)
{
    return atomic_load(&holding->provisional) && !atomic_load(&holding->unconfirmed[GS_MAY_BE_UNLISTED]) &&
           !atomic_load(&holding->unconfirmed[GS_UNLISTED]);
}

/* How many calls are in flight. */
static inline uint16_t gs_flights(const struct gs_accounts *accounts, uint32_t card)
{
    uint64_t count = 0;
    for (uint32_t word = 0; word < 2 * GS_ERAS; word++)
        count += atomic_load(&accounts->mine[card].in_flight[word / 2][word % 2]) >> 48;
    return (uint16_t)count;
}

#endif
