/* The accounts of the container: reserve, settle, sum. The only code that writes the shared region. */
#ifndef GPUSLICE_ACCOUNTS_H
#define GPUSLICE_ACCOUNTS_H

#include <stdbool.h>
#include <stdint.h>

#include "accounts/exports.h"
#include "system/os.h"
#include "region.h"

#define GS_PATH_ROOM 4096
#define GS_ATTACHMENTS 256u

/* Where this process's numbers stand: in which region, in which slot. Another one follows when the file is mended. */
struct gs_attachment {
    struct gpuslice_region *region; /* NULL: could not be mapped, nothing may be granted */
    struct gpuslice_slot *slot;     /* NULL before the first reservation */
    uint64_t owner;                 /* the word that slot bears while it is ours */
};

enum gs_flight { GS_TAKING, GS_GIVING }; /* what a call between the account and the driver does (accounts/in_flight.h) */

/* What this process holds of a card, as it knows itself, whatever anybody writes over the region. */
struct gs_holding {
    _Atomic uint64_t gained, lost; /* ever, in bytes; in the lowest eight bits the attachment that they stand in */
    _Atomic uint64_t in_flight[2]; /* by what they do: how many calls, and above that how much */
    _Atomic uint32_t rests;        /* who wants a moment in which none is (accounts/in_flight.h) */
    _Atomic uint64_t own_bytes, exported_bytes, imports, changed_ns;
    _Atomic bool provisional;
    uint64_t limit_bytes, compute_percent; /* for display */
    char uuid[GPUSLICE_UUID_BYTES];      /* "" for a card that is not ours */
};

struct gs_accounts {
    struct gs_attachment *_Atomic at; /* one of the attachments; NULL before the file was opened */
    struct gs_attachment attachments[GS_ATTACHMENTS];
    struct gs_holding mine[GPUSLICE_CARDS];
    struct gs_file file;
    _Atomic uint64_t looked_ns;
    _Atomic uint32_t host_pid;
    uint32_t moves;
    struct gs_exports exports;
    char path[GS_PATH_ROOM];
};

/* Maps the file; made if it is not there. False leaves accounts that refuse everything. */
bool gs_accounts_open(struct gs_accounts *accounts, const char *path);
/* In a forked child: the parent's slot is not ours. */
void gs_accounts_forget(struct gs_accounts *accounts);

/* The region and this process's slot in it at this moment; either may be NULL. */
struct gs_attachment gs_accounts_at(const struct gs_accounts *accounts);
/* Once in a while: whether the file is still there, whole, and our slot ours. If not, it is mended: our own numbers
 * are written again. Also done by used, and where a change is marked. The time (gs_coarse_ns). */
uint64_t gs_accounts_look(struct gs_accounts *accounts);

/* The entry for this uuid, taken if there is none; GPUSLICE_CARDS when all are taken by others. */
uint32_t gs_accounts_card(struct gs_accounts *accounts, const char *uuid);
void gs_accounts_show_limit(struct gs_accounts *accounts, uint32_t card, uint64_t limit_bytes, uint32_t compute_percent);

/* What we hold changes, or the driver has just done what it was asked for: said before it does, and where a call is in
 * flight, which says more, at its end. The three that follow do not say it themselves. */
void gs_accounts_changed(struct gs_accounts *accounts, uint32_t card);
/* Room for these bytes under the limit, taken in one step against every process of the container. */
bool gs_accounts_reserve_at_once(struct gs_accounts *accounts, uint32_t card, uint64_t bytes, uint64_t limit);
/* The same, and where it depends on what others are just about, after waiting for them. */
bool gs_accounts_reserve(struct gs_accounts *accounts, uint32_t card, uint64_t bytes, uint64_t limit);
/* Counts bytes that are taken already, whatever the limit. False only without a slot. */
bool gs_accounts_add(struct gs_accounts *accounts, uint32_t card, uint64_t bytes);
void gs_accounts_return(struct gs_accounts *accounts, uint32_t card, uint64_t bytes);
void gs_accounts_count_refusal(struct gs_accounts *accounts, uint32_t card);
/* Which part of what we hold is the driver's own. */
void gs_accounts_set_own(struct gs_accounts *accounts, uint32_t card, uint64_t bytes);
/* That part may be too much: until the driver's figure has been heard. */
void gs_accounts_set_provisional(struct gs_accounts *accounts, uint32_t card, bool provisional);
void gs_accounts_set_host_pid(struct gs_accounts *accounts, uint32_t pid);

/* What the container holds of a card; cheap enough for every cuMemGetInfo. */
uint64_t gs_accounts_used(struct gs_accounts *accounts, uint32_t card);
/* What this process holds of a card. */
uint64_t gs_accounts_mine(const struct gs_accounts *accounts, uint32_t card);
/* Empties the slots of processes that are no more, and forgets what nobody keeps; whether less is counted. */
bool gs_accounts_sweep(struct gs_accounts *accounts);

/* Memory that other processes may have opened, and theirs opened here: freed by us, it may live on. */
void gs_accounts_exported(struct gs_accounts *accounts, uint32_t card, int64_t bytes);
void gs_accounts_imported(struct gs_accounts *accounts, uint32_t card, int count);
/* Returns bytes that were exported: kept as orphaned while anybody else has them open. */
void gs_accounts_return_exported(struct gs_accounts *accounts, uint32_t card, uint64_t bytes);

#endif
