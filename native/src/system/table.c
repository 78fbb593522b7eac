#include "system/table.h"

#include <string.h>

#include "system/at_fork.h"
#include "system/os.h"

#define FIRST_ROOM 64u
#define YIELDS 64u
#define NAP_NS UINT64_C(20000)

static uint64_t hash_of(uint64_t key)
{
    key = (key ^ key >> 32) * UINT64_C(0x9e3779b97f4a7c15);
    return key ^ key >> 29;
}

/* The shard is held only while one entry is changed, so a waiting thread polls. To know whether a thread must be woken,
 * releasing the shard would cost as much as taking it. */
static void enter(struct gs_shard *shard)
{
    for (uint32_t round = 0; atomic_exchange_explicit(&shard->taken, true, memory_order_acquire); round++)
        if (round < YIELDS)
            gs_yield();
        else
            gs_sleep_ns(NAP_NS);
}

static void leave(struct gs_shard *shard) { atomic_store_explicit(&shard->taken, false, memory_order_release); }

static struct gs_shard *shard_of(struct gs_table *table, uint64_t hash) { return &table->shards[hash >> 58]; }

/* The index of the key, or the free index where it would be stored. */
static uint32_t place_of(const struct gs_shard *shard, uint64_t key)
{
    uint32_t at = (uint32_t)hash_of(key) & (shard->room - 1);
    while (shard->entries[at].key && shard->entries[at].key != key)
        at = (at + 1) & (shard->room - 1);
    return at;
}

static bool grow(struct gs_shard *shard)
{
    struct gs_shard larger = {.room = shard->room ? shard->room * 2 : FIRST_ROOM};
    larger.entries = gs_map_private(larger.room * sizeof *larger.entries);
    if (!larger.entries)
        return false;
    for (uint32_t i = 0; i < shard->room; i++)
        if (shard->entries[i].key)
            larger.entries[place_of(&larger, shard->entries[i].key)] = shard->entries[i];
    /* In this order: a child that is forked in between must not find entries that are no longer mapped. */
    struct gs_shard old = {.entries = shard->entries, .room = shard->room};
    shard->entries = larger.entries;
    shard->room = larger.room;
    if (old.entries)
        gs_unmap(old.entries, old.room * sizeof *old.entries);
    return true;
}

static bool put(struct gs_shard *shard, const struct gs_entry *entry)
{
    if ((shard->count + 1) * 4 > shard->room * 3 && !grow(shard))
        return false;
    struct gs_entry *place = &shard->entries[place_of(shard, entry->key)];
    shard->count += place->key == 0;
    *place = *entry;
    return true;
}

/* Moves later entries into the gap, so that no search stops before it reaches an entry, without tombstones. */
static void remove_at(struct gs_shard *shard, uint32_t gap)
{
    uint32_t mask = shard->room - 1;
    for (uint32_t at = (gap + 1) & mask; shard->entries[at].key; at = (at + 1) & mask) {
        uint32_t home = (uint32_t)hash_of(shard->entries[at].key) & mask;
        if (((at - home) & mask) >= ((at - gap) & mask)) {
            shard->entries[gap] = shard->entries[at];
            gap = at;
        }
    }
    shard->entries[gap].key = 0;
    shard->count--;
}

static struct gs_entry *find(struct gs_shard *shard, uint64_t key)
{
    if (!shard->room)
        return NULL;
    struct gs_entry *place = &shard->entries[place_of(shard, key)];
    return place->key ? place : NULL;
}

bool gs_table_put(struct gs_table *table, const struct gs_entry *entry)
{
    struct gs_shard *shard = shard_of(table, hash_of(entry->key));
    enter(shard);
    bool done = put(shard, entry);
    leave(shard);
    return done;
}

static bool look(struct gs_table *table, uint64_t key, struct gs_entry *entry, bool remove)
{
    struct gs_shard *shard = shard_of(table, hash_of(key));
    if (!key)
        return false;
    enter(shard);
    struct gs_entry *found = find(shard, key);
    bool has = found != NULL;
    if (has)
        *entry = *found;
    if (has && remove)
        remove_at(shard, (uint32_t)(found - shard->entries));
    leave(shard);
    return has;
}

bool gs_table_get(struct gs_table *table, uint64_t key, struct gs_entry *entry) { return look(table, key, entry, false); }
bool gs_table_take(struct gs_table *table, uint64_t key, struct gs_entry *entry) { return look(table, key, entry, true); }

void gs_table_take_of(struct gs_table *table, uint64_t key, uint64_t owner)
{
    struct gs_shard *shard = shard_of(table, hash_of(key));
    enter(shard);
    struct gs_entry *found = find(shard, key);
    if (found && found->owner == owner)
        remove_at(shard, (uint32_t)(found - shard->entries));
    leave(shard);
}

uint64_t gs_table_count(struct gs_table *table, uint64_t key, int64_t by)
{
    struct gs_shard *shard = shard_of(table, hash_of(key));
    enter(shard);
    struct gs_entry *found = find(shard, key);
    uint64_t before = found ? found->bytes : 0;
    uint64_t after = by < 0 && before < (uint64_t)-by ? 0 : before + (uint64_t)by;
    if (found && after)
        found->bytes = after;
    else if (found)
        remove_at(shard, (uint32_t)(found - shard->entries));
    else if (after)
        put(shard, &(struct gs_entry){.key = key, .bytes = after});
    leave(shard);
    return before;
}

static void sift(struct gs_shard *shard, bool (*drop)(struct gs_entry *, void *), void *context)
{
    uint32_t at = 0;
    while (at < shard->room)
        if (shard->entries[at].key && drop(&shard->entries[at], context))
            remove_at(shard, at); /* another entry may have moved here: look at this index again */
        else
            at++;
}

void gs_table_sift(struct gs_table *table, bool (*drop)(struct gs_entry *, void *), void *context)
{
    for (uint32_t i = 0; i < GS_SHARDS; i++) {
        enter(&table->shards[i]);
        sift(&table->shards[i], drop, context);
        leave(&table->shards[i]);
    }
}

/* The linker defines these symbols as the start and the end of the section, if there is one. */
extern struct gs_table __start_gs_tables[] __attribute__((visibility("hidden"), weak));
extern struct gs_table __stop_gs_tables[] __attribute__((visibility("hidden"), weak));

/* Everything, locks included. */
static void forget(void)
{
    for (struct gs_table *table = __start_gs_tables; table < __stop_gs_tables; table++)
        for (struct gs_shard *shard = table->shards; shard < table->shards + GS_SHARDS; shard++) {
            if (shard->entries)
                gs_unmap(shard->entries, shard->room * sizeof *shard->entries);
            memset(shard, 0, sizeof *shard);
        }
}
GS_AT_FORK(forget);
