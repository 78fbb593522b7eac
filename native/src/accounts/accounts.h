/* The accounts of the container: reserve, settle, sum. Only this folder writes the memory accounts in the shared region. */
#ifndef GPUSLICE_ACCOUNTS_H
#define GPUSLICE_ACCOUNTS_H

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

#define GS_ERAS 4u /* of calls in flight */
enum gs_flight { GS_TAKING, GS_GIVING }; /* whether a driver call in flight allocates or frees (accounts/in_flight.h) */

/* What this process holds of a card, in its own memory, so that nobody who overwrites the region can change it. */
struct gs_holding {
    _Atomic uint64_t gained, lost; /* totals in bytes; the lowest eight bits are the number of the current attachment */
    _Atomic uint64_t in_flight[GS_ERAS][2]; /* by era and enum gs_flight: the number of calls and their bytes (accounts/in_flight.c) */
    _Atomic uint32_t rests;        /* how many threads want a moment without calls in flight (accounts/in_flight.h) */
    _Atomic uint64_t own_bytes, exported_bytes, imports, changed_ns;
    _Atomic bool provisional;
    uint64_t limit_bytes, compute_percent; /* for display */
    char uuid[GPUSLICE_UUID_BYTES];      /* "" for an entry that is not a card of ours */
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

/* Maps the file, creating it if necessary. After false the accounts refuse every reservation. */
bool gs_accounts_open(struct gs_accounts *accounts, const char *path);
/* In a forked child: gives up the slot, which is the parent's. */
void gs_accounts_forget(struct gs_accounts *accounts);

/* The current region and this process's slot in it; either may be NULL. */
struct gs_attachment gs_accounts_at(const struct gs_accounts *accounts);
/* Checks, at most every 10 ms, that the file still exists and is complete and that our slot is still ours; if not, repairs
 * it and writes our own accounts again. gs_accounts_used() and gs_accounts_changed() do this too. Returns the time
 * (gs_coarse_ns). */
uint64_t gs_accounts_look(struct gs_accounts *accounts);

/* The index of the card's entry, which is created if necessary; GPUSLICE_CARDS if all entries are other cards'. */
uint32_t gs_accounts_card(struct gs_accounts *accounts, const char *uuid);
void gs_accounts_show_limit(struct gs_accounts *accounts, uint32_t card, uint64_t limit_bytes, uint32_t compute_percent);

/* Records the time of a change to what we hold: called before the change, or at the end of a driver call in flight. The
 * three functions that follow do not call it themselves. */
void gs_accounts_changed(struct gs_accounts *accounts, uint32_t card);
/* Reserves these bytes if they fit under the limit, atomically with respect to all processes of the container. */
bool gs_accounts_reserve_at_once(struct gs_accounts *accounts, uint32_t card, uint64_t bytes, uint64_t limit);
/* The same; if the answer depends on calls of others that are in flight, it waits for them first. */
bool gs_accounts_reserve(struct gs_accounts *accounts, uint32_t card, uint64_t bytes, uint64_t limit);
/* Counts bytes that are already allocated, whatever the limit. False only if there is no slot. */
bool gs_accounts_add(struct gs_accounts *accounts, uint32_t card, uint64_t bytes);
void gs_accounts_return(struct gs_accounts *accounts, uint32_t card, uint64_t bytes);
void gs_accounts_count_refusal(struct gs_accounts *accounts, uint32_t card);
/* How much of what we hold the driver uses for itself. */
void gs_accounts_set_own(struct gs_accounts *accounts, uint32_t card, uint64_t bytes);
/* Whether that part may be too high, because the driver's own figure is not known yet. */
void gs_accounts_set_provisional(struct gs_accounts *accounts, uint32_t card, bool provisional);
void gs_accounts_set_host_pid(struct gs_accounts *accounts, uint32_t pid);

/* What the container holds of a card. Cheap enough for each cuMemGetInfo. */
uint64_t gs_accounts_used(struct gs_accounts *accounts, uint32_t card);
/* What this process holds of a card. */
uint64_t gs_accounts_mine(const struct gs_accounts *accounts, uint32_t card);
/* Empties the slots of processes that have ended, and drops orphaned memory that nothing keeps any more. True if less is
 * counted than before. */
bool gs_accounts_sweep(struct gs_accounts *accounts);

/* Memory of ours that other processes may have opened, which stays allocated after we have freed it; and memory of theirs
 * that is open here. */
void gs_accounts_exported(struct gs_accounts *accounts, uint32_t card, int64_t bytes);
void gs_accounts_imported(struct gs_accounts *accounts, uint32_t card, int count);
/* Returns exported bytes, which count as orphaned while another process may have them open. */
void gs_accounts_return_exported(struct gs_accounts *accounts, uint32_t card, uint64_t bytes);

#endif
