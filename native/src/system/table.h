/* A hash table, by address or handle, of what the driver gave this process: O(1), for many threads at once. Its memory
 * comes directly from the kernel: the host's malloc may be any implementation, and may be what called us. */
#ifndef GPUSLICE_TABLE_H
#define GPUSLICE_TABLE_H

#include <stdbool.h>
#include <stdint.h>

#define GS_SHARDS 64u

struct gs_entry {
    uint64_t key;   /* never 0 */
    uint64_t bytes; /* charged */
    uint64_t owner; /* a context, a pool or an object, depending on `kind` */
    uint32_t kind;
    uint32_t card;
};

struct gs_shard {
    _Alignas(64) _Atomic bool taken;
    uint32_t count;
    uint32_t room; /* a power of two, or 0 */
    struct gs_entry *entries;
};

struct gs_table {
    struct gs_shard shards[GS_SHARDS];
};

/* Empty in a forked child: the linker gathers these tables in a section. */
#define GS_TABLE_PER_PROCESS __attribute__((section("gs_tables")))

static inline uint64_t gs_key(const void *of) { return (uint64_t)(uintptr_t)of; }
/* False if there is no memory for the entry. An entry with the same key is replaced. */
bool gs_table_put(struct gs_table *table, const struct gs_entry *entry);
bool gs_table_get(struct gs_table *table, uint64_t key, struct gs_entry *entry);
bool gs_table_take(struct gs_table *table, uint64_t key, struct gs_entry *entry);
/* Removes the entry if it has this owner. */
void gs_table_take_of(struct gs_table *table, uint64_t key, uint64_t owner);
/* Adds to the entry's `bytes`, starting from 0 if there is no entry, and removes the entry when it reaches 0. Returns the
 * value before. */
uint64_t gs_table_count(struct gs_table *table, uint64_t key, int64_t by);
/* Removes the entries for which the callback returns true. The callback must not use the table. */
void gs_table_sift(struct gs_table *table, bool (*drop)(struct gs_entry *entry, void *context), void *context);

#endif
