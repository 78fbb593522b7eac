/* The books of the container: reserve, settle, sum. The only code that writes the shared region. */
#ifndef GPUSLICE_BOOKS_H
#define GPUSLICE_BOOKS_H

#include <stdbool.h>
#include <stdint.h>

#include "region.h"

struct gs_books {
    struct gpuslice_region *region; /* NULL: could not be mapped, nothing may be granted */
    struct gpuslice_slot *slot;     /* this process's, NULL before its first reservation */
};

/* Maps the file; made if it is not there. False leaves books that refuse everything. */
bool gs_books_open(struct gs_books *books, const char *path);
/* In a forked child: the parent's slot is not ours. */
void gs_books_forget(struct gs_books *books);

/* The entry for this uuid, taken if there is none; GPUSLICE_CARDS when all are taken by others. */
uint32_t gs_books_card(struct gs_books *books, const char *uuid);

/* Room for these bytes under the limit, taken in one step against every process of the container. */
bool gs_books_reserve(struct gs_books *books, uint32_t card, uint64_t bytes, uint64_t limit);
/* Counts bytes that are taken already, whatever the limit. False only without a slot. */
bool gs_books_add(struct gs_books *books, uint32_t card, uint64_t bytes);
void gs_books_return(struct gs_books *books, uint32_t card, uint64_t bytes);
void gs_books_count_refusal(struct gs_books *books, uint32_t card);

/* What the container holds of a card; cheap enough for every cuMemGetInfo. */
uint64_t gs_books_used(const struct gs_books *books, uint32_t card);
/* What this process holds of a card. */
uint64_t gs_books_mine(const struct gs_books *books, uint32_t card);
/* Empties the slots of processes that are no more; how many. */
uint32_t gs_books_sweep(struct gs_books *books);

/* Memory that other processes may have opened, and theirs opened here: freed by us, it may live on. */
void gs_books_exported(struct gs_books *books, uint32_t card, int64_t bytes);
void gs_books_imported(struct gs_books *books, uint32_t card, int count);
/* Returns bytes that were exported: kept as orphaned while anybody else has imports open. */
void gs_books_return_exported(struct gs_books *books, uint32_t card, uint64_t bytes);

#endif
