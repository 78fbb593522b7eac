#include "accounts/slots.h"

#include <stdbool.h>
#include <stddef.h>

#include "system/open_file_locks.h"
#include "system/os.h"

#define OWNER_PID_BITS 22
#define OWNER_START_BITS 26
#define RING 64
#define FIRST_LOCKED_BYTE (INT64_C(1) << 40) /* of slot 0; far beyond the file's content */

/* How long after a process has ended its memory may still be held: a reader of its /proc files, for example, keeps its
 * address space, and with that its mappings of the driver's devices. */
#define GONE_AFTER_NS UINT64_C(1000000000)

static void *held_byte; /* by this process */

void gs_raise_to(_Atomic uint64_t *word, uint64_t value)
{
    uint64_t before = atomic_load_explicit(word, memory_order_relaxed);
    while (before < value && !atomic_compare_exchange_weak(word, &before, value))
        ;
}

/* ---- owners ---- */

static uint64_t namespace_hash(uint64_t inode) { return (inode ^ inode >> 16 ^ inode >> 32) & 0xffff; }

static uint64_t owner_word(uint32_t pid, uint64_t start_time, uint64_t namespace)
{
    uint64_t start = start_time & ((UINT64_C(1) << OWNER_START_BITS) - 1);
    uint64_t low = (uint64_t)pid & ((UINT64_C(1) << OWNER_PID_BITS) - 1);
    return namespace_hash(namespace) << (OWNER_PID_BITS + OWNER_START_BITS) | start << OWNER_PID_BITS | low;
}

static uint32_t owner_pid(uint64_t owner) { return (uint32_t)(owner & ((UINT64_C(1) << OWNER_PID_BITS) - 1)); }

uint64_t gs_slot_owner(void) { return owner_word(gs_pid(), gs_process(gs_pid()).start_time, gs_pid_namespace()); }

uint64_t gs_slots_high(const struct gpuslice_region *region, const struct gpuslice_slot *mine)
{
    uint64_t high = gs_load(&region->slots_high);
    uint64_t own = mine ? (uint64_t)(mine - region->slots) + 1 : 0;
    high = high > own ? high : own;
    return high < GPUSLICE_SLOTS ? high : GPUSLICE_SLOTS;
}

/* Whether the fields match the owner word; if not, no process of ours wrote them. The inode of a namespace has 32 bits, so
 * a slot overwritten with ones is detected. */
static bool is_consistent(const struct gpuslice_slot *slot, uint64_t owner)
{
    uint64_t pid = gs_load(&slot->pid), namespace = gs_load(&slot->pid_namespace);
    return pid >> OWNER_PID_BITS == 0 && namespace >> 32 == 0 &&
           owner == owner_word((uint32_t)pid, gs_load(&slot->start_time), namespace);
}

static uint64_t seen_leaving(struct gpuslice_slot *slot, uint64_t now)
{
    uint64_t since = gs_load(&slot->unlocked_ns);
    if (!since)
        atomic_store(&slot->unlocked_ns, now);
    return since;
}

/* While the slot's lock is held, its owner does not count as ended, whatever /proc shows for its pid. A child of a dead
 * process may hold the lock, and with it the driver's devices; and /proc may belong to another pid namespace, or show start
 * times by the clock of another time namespace. */
static bool is_let_go(struct gpuslice_slot *slot, int64_t number, const char *path)
{
    if (!gs_load(&slot->locked) || !path || gs_byte_is_held(path, FIRST_LOCKED_BYTE + number) != GS_BYTE_HELD)
        return true;
    seen_leaving(slot, gs_coarse_ns());
    return false;
}

/* For a process that we cannot see, such as one in another pid namespace: it holds its slot's lock while it exists. */
static bool is_unlocked(struct gpuslice_slot *slot, int64_t number, const char *path)
{
    uint64_t now = gs_coarse_ns(), since;
    if (!gs_load(&slot->locked) || !path)
        return false;
    if (gs_byte_is_held(path, FIRST_LOCKED_BYTE + number) != GS_BYTE_FREE) {
        atomic_store(&slot->unlocked_ns, 0);
        return false;
    }
    since = seen_leaving(slot, now);
    return since && now - since > GONE_AFTER_NS;
}

/* Whether the program that claimed the slot is running, as far as /proc shows. */
enum presence { ABSENT, PRESENT, UNKNOWN };

/* UNKNOWN if something could not be read now or when the slot was claimed: another user's stack, or no descriptor was free. */
static enum presence presence_of(const struct gpuslice_slot *slot, uint64_t owner, uint64_t namespace)
{
    struct gs_process process = gs_process(owner_pid(owner));
    if (!process.alive)
        return ABSENT;
    if (process.start_time == 0 || gs_load(&slot->start_time) == 0)
        return UNKNOWN;
    if (owner_word(owner_pid(owner), process.start_time, namespace) != owner)
        return ABSENT;
    /* The same process, but is it still the same program? exec frees the card's memory and keeps the pid. */
    uint64_t stack = gs_load(&slot->start_stack);
    return !stack || !process.start_stack ? UNKNOWN : stack == process.start_stack ? PRESENT : ABSENT;
}

/* Whether the slot's owner is known to have ended. A slot that is just being claimed in another namespace may look
 * overwritten; its owner notices when it is taken away and claims another. */
static bool is_abandoned(struct gpuslice_region *region, struct gpuslice_slot *slot, uint64_t owner, uint64_t namespace,
                         const char *path)
{
    if (owner >> (OWNER_PID_BITS + OWNER_START_BITS) != namespace_hash(namespace))
        return !is_consistent(slot, owner) || is_unlocked(slot, slot - region->slots, path);
    enum presence presence = presence_of(slot, owner, namespace);
    return presence == ABSENT    ? is_let_go(slot, slot - region->slots, path)
           : presence == UNKNOWN ? is_unlocked(slot, slot - region->slots, path)
                                 : false;
}

/* ---- emptying ---- */

static void empty(struct gpuslice_region *region, struct gpuslice_slot *slot)
{
    for (uint32_t card = 0; card < GPUSLICE_CARDS; card++) {
        struct gpuslice_usage *usage = &slot->usage[card];
        /* Counted as orphaned before it is removed here: in between it counts twice, rather than not at all. */
        uint64_t exported = gs_bounded(&usage->exported_bytes);
        if (exported)
            atomic_fetch_add(&region->cards[card].orphaned_bytes, exported);
        atomic_store(&usage->exported_bytes, 0);
        atomic_store(&usage->pending_bytes, 0);
        atomic_store(&usage->used_bytes, 0);
        atomic_store(&usage->own_bytes, 0);
        atomic_store(&usage->imports, 0);
        atomic_store(&usage->in_flight_ns, 0);
        atomic_store(&slot->in_flight[card], 0);
    }
    atomic_store(&slot->host_pid, 0);
    atomic_store(&slot->start_stack, 0);
    atomic_store(&slot->locked, 0);
    atomic_store(&slot->unlocked_ns, 0);
    atomic_store(&slot->provisional, 0);
}

uint32_t gs_slots_sweep(struct gpuslice_region *region, const struct gpuslice_slot *mine, const char *path)
{
    uint32_t swept = 0;
    uint64_t namespace = gs_pid_namespace(), high = gs_slots_high(region, mine), me = gs_slot_owner();
    for (uint64_t i = 0; i < high; i++) {
        struct gpuslice_slot *slot = &region->slots[i];
        uint64_t owner = gs_load(&slot->owner);
        if (!owner || slot == mine || !is_abandoned(region, slot, owner, namespace, path))
            continue;
        /* Taken over first: otherwise a second sweeper could empty it again when it already has a new owner. If we die
         * here, the slot belongs to another dead process and is swept later. */
        if (owner != me && !atomic_compare_exchange_strong(&slot->owner, &owner, me))
            continue;
        empty(region, slot);
        atomic_store(&slot->owner, 0);
        swept++;
    }
    if (swept)
        atomic_fetch_add(&region->swept, swept);
    atomic_store(&region->swept_ns, gs_coarse_ns());
    return swept;
}

uint64_t gs_slots_leaving(struct gpuslice_region *region, uint32_t card)
{
    uint64_t bytes = 0, now = gs_coarse_ns();
    GS_FOR_EACH_SLOT(slot, region, NULL)
        bytes += now - gs_load(&slot->unlocked_ns) <= GONE_AFTER_NS ? gs_bounded(&slot->usage[card].used_bytes) : 0;
    return bytes;
}

/* ---- claiming ---- */

static void take_over(struct gpuslice_region *region, struct gpuslice_slot *slot)
{
    struct gs_process self = gs_process(gs_pid());
    empty(region, slot);
    atomic_store(&slot->pid, gs_pid());
    atomic_store(&slot->pid_namespace, gs_pid_namespace());
    atomic_store(&slot->start_time, self.start_time);
    atomic_store(&slot->start_stack, gs_stack_is_random() ? self.start_stack : 0);
}

/* The n-th slot to try. After damage the slots following the last one come first, in a ring: a thread that was suspended for
 * long while it wrote to a former slot of ours must not find that slot ours again. */
static uint64_t nth_after(uint64_t last, uint64_t n) { return n < RING && last < RING ? (last + 1 + n) % RING : n; }

struct gpuslice_slot *gs_slot_claim(struct gpuslice_region *region, uint64_t last)
{
    uint64_t me = gs_slot_owner();
    for (uint64_t n = 0; n < GPUSLICE_SLOTS; n++) {
        uint64_t i = nth_after(last, n);
        struct gpuslice_slot *slot = &region->slots[i];
        uint64_t owner = gs_load(&slot->owner);
        if (i == last)
            continue;
        /* A slot with our own owner word that we do not know of is from before exec; what it held is gone. */
        if (owner == me || (owner == 0 && atomic_compare_exchange_strong(&slot->owner, &owner, me))) {
            gs_raise_to(&region->slots_high, i + 1);
            take_over(region, slot);
            return slot;
        }
    }
    return NULL;
}

void gs_slot_lock(struct gpuslice_region *region, struct gpuslice_slot *slot, const char *path)
{
    if (held_byte)
        gs_unmap(held_byte, 1);
    held_byte = gs_hold_byte(path, FIRST_LOCKED_BYTE + (slot - region->slots));
    atomic_store(&slot->locked, held_byte != NULL);
}

void gs_slots_forget_lock(void) { held_byte = NULL; }
