#define _GNU_SOURCE
#include "accounts/exports.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "accounts/slots.h"
#include "system/at_fork.h"
#include "system/os.h"
#include "system/text.h"

/* An offset in the file, from the highest bit: 01, container, card, maker, place among the maker's own. */
#define CONTAINER_BITS 20
#define CARD_BITS 4
#define MAKER_BITS 14
#define PLACE_BITS 23
#define MAKER_SHIFT PLACE_BITS
#define CARD_SHIFT (MAKER_SHIFT + MAKER_BITS)
#define CONTAINER_SHIFT (CARD_SHIFT + CARD_BITS)
#define FIRST_BYTE (INT64_C(1) << (CONTAINER_SHIFT + CONTAINER_BITS))
_Static_assert(GPUSLICE_CARDS == 1u << CARD_BITS && CONTAINER_SHIFT + CONTAINER_BITS == 61, "the place of a lock");

#define PAGE_SHIFT 21 /* 2 MiB */
#define ATTEMPTS 64
#define MOST_LOCKS 4096
#define NOT_KNOWN 1 /* instead of an inode: there were several files */

static int64_t next_place GS_PER_PROCESS; /* protected by the caller's lock */

static uint64_t mixed(uint64_t one, uint64_t other)
{
    uint64_t hash = (one ^ (other << 32 | other >> 32)) * UINT64_C(0x9e3779b97f4a7c15);
    return (hash ^ hash >> 29) * UINT64_C(0xbf58476d1ce4e5b9) >> 20;
}

static uint32_t maker_of(const struct gpuslice_slot *slot)
{
    return (uint32_t)mixed(gs_load(&slot->owner), gs_load(&slot->start_stack)) & ((1u << MAKER_BITS) - 1);
}

void gs_exports_are_of(struct gs_exports *exports, const char *folder)
{
    struct stat found;
    if (syscall(SYS_newfstatat, AT_FDCWD, folder, &found, 0) == 0)
        exports->container = (uint32_t)mixed(found.st_dev, found.st_ino) & ((1u << CONTAINER_BITS) - 1);
}

/* ---- the driver's file ---- */

static bool find_path(char path[GPUSLICE_DRIVER_PATH_BYTES], int descriptor)
{
    char link[40] = "/proc/thread-self/fd/"; /* /proc/self shows no descriptors once the main thread has ended */
    gs_append_number(link + sizeof "/proc/thread-self/fd/" - 1, (uint32_t)descriptor);
    long length = syscall(SYS_readlinkat, AT_FDCWD, link, path, GPUSLICE_DRIVER_PATH_BYTES - 1);
    if (length <= 0 || length >= GPUSLICE_DRIVER_PATH_BYTES - 1)
        return false;
    path[length] = 0;
    return path[0] == '/';
}

static uint64_t check_of(const struct gpuslice_driver_file *file)
{
    uint64_t check = mixed(gs_load(&file->inode), gs_load(&file->device));
    for (size_t i = 0; i < sizeof file->path && file->path[i]; i++)
        check = (check ^ (unsigned char)file->path[i]) * UINT64_C(1099511628211);
    return check;
}

/* False for zeros, and if somebody overwrote it. */
static bool is_written(const struct gpuslice_driver_file *file)
{
    return gs_load(&file->inode) && gs_load(&file->check) == check_of(file);
}

/* Descriptors are of several files only if root in the container arranged that. What such a container leaves open stays
 * counted. */
void gs_exports_show(const struct gs_exports *exports, struct gpuslice_region *region)
{
    const struct gpuslice_driver_file *own = &exports->driver_file;
    struct gpuslice_driver_file *known = &region->driver_file;
    uint64_t inode = gs_load(&own->inode);
    if (!inode || (is_written(known) && gs_load(&known->inode) == inode && gs_load(&known->device) == gs_load(&own->device)))
        return;
    if (is_written(known))
        inode = NOT_KNOWN;
    else
        memmove(known->path, own->path, sizeof known->path);
    atomic_store(&known->device, gs_load(&own->device));
    atomic_store(&known->inode, inode);
    atomic_store(&known->check, check_of(known));
}

static bool is_the_file(struct gs_exports *exports, int descriptor)
{
    struct gpuslice_driver_file *own = &exports->driver_file;
    char path[GPUSLICE_DRIVER_PATH_BYTES] = "";
    struct stat file, named;
    if (syscall(SYS_fstat, descriptor, &file) != 0 || !find_path(path, descriptor) ||
        syscall(SYS_newfstatat, AT_FDCWD, path, &named, 0) != 0 || named.st_dev != file.st_dev || named.st_ino != file.st_ino)
        return false;
    if (!gs_load(&own->inode)) {
        memmove(own->path, path, sizeof own->path);
        atomic_store(&own->device, file.st_dev);
        atomic_store(&own->inode, file.st_ino);
    }
    return gs_load(&own->inode) == file.st_ino && gs_load(&own->device) == file.st_dev;
}

/* -1 if it cannot be opened or is another file by now. */
static int open_driver_file(const struct gpuslice_driver_file *file)
{
    char path[GPUSLICE_DRIVER_PATH_BYTES];
    struct stat found;
    memmove(path, file->path, sizeof path);
    path[sizeof path - 1] = 0;
    uint64_t inode = gs_load(&file->inode);
    if (inode <= NOT_KNOWN || syscall(SYS_newfstatat, AT_FDCWD, path, &found, 0) != 0 || found.st_ino != inode ||
        found.st_dev != gs_load(&file->device) || !(S_ISREG(found.st_mode) || S_ISCHR(found.st_mode)))
        return -1;
    return (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY, 0);
}

/* ---- one descriptor ---- */

/* Finds bytes that nobody has locked by locking them exclusively, then makes the lock a shared one. */
static bool lock_anew(uint64_t *first, int64_t base, int64_t pages, int descriptor)
{
    struct gs_bytes other, bytes;
    for (int attempt = 0; attempt < ATTEMPTS; attempt++) {
        if (next_place + pages > INT64_C(1) << PLACE_BITS)
            next_place = 0;
        bytes = (struct gs_bytes){base + next_place, pages};
        next_place += pages;
        *first = (uint64_t)bytes.first;
        if (gs_lock_bytes(descriptor, bytes, false))
            return gs_lock_bytes(descriptor, bytes, true);
        if (gs_find_lock(descriptor, bytes, &other) == GS_BYTE_HELD && other.count > 0)
            next_place = other.first + other.count - base;
    }
    return false;
}

static int64_t pages_of(uint64_t size) { return (int64_t)((size + (UINT64_C(1) << PAGE_SHIFT) - 1) >> PAGE_SHIFT); }

bool gs_export_made(struct gs_exports *exports, struct gpuslice_region *region, const struct gpuslice_slot *mine,
                    uint64_t *first, uint32_t card, uint64_t size, int descriptor)
{
    GS_KEEP_ERRNO;
    int64_t pages = pages_of(size);
    bool made = mine && pages > 0 && pages < INT64_C(1) << PLACE_BITS && is_the_file(exports, descriptor);
    if (made)
        gs_exports_show(exports, region);
    if (made && *first)
        made = gs_lock_bytes(descriptor, (struct gs_bytes){(int64_t)*first, pages}, true);
    else if (made) {
        int64_t base = FIRST_BYTE | (int64_t)exports->container << CONTAINER_SHIFT | (int64_t)card << CARD_SHIFT |
                       (int64_t)maker_of(mine) << MAKER_SHIFT;
        made = lock_anew(first, base, pages, descriptor);
    }
    return made;
}

/* Only /proc shows which locks a descriptor itself holds: "lock:\t1: OFDLCK ADVISORY  READ -1 00:06:123 FIRST LAST". */
uint64_t gs_export_size(int descriptor)
{
    char path[48] = "/proc/thread-self/fdinfo/", text[2048];
    const char *at = text;
    gs_append_number(path + sizeof "/proc/thread-self/fdinfo/" - 1, (uint32_t)descriptor);
    long length = gs_read_file(path, text, sizeof text - 1);
    text[length > 0 ? length : 0] = 0;
    while ((at = strstr(at, "OFDLCK"))) {
        uint64_t numbers[2] = {0, 0}; /* the last two numbers of the line */
        for (; *at && *at != '\n'; at++)
            if (*at == ' ' && at[1] >= '0' && at[1] <= '9') {
                const char *digits = at + 1;
                numbers[0] = numbers[1];
                numbers[1] = gs_text_number(&digits);
            }
        if (numbers[0] >> 61 == 1 && numbers[1] >= numbers[0])
            return (numbers[1] - numbers[0] + 1) << PAGE_SHIFT;
    }
    return 0;
}

bool gs_export_is_open(const struct gs_exports *exports, uint64_t first, uint64_t size)
{
    GS_KEEP_ERRNO;
    struct gs_bytes found, bytes = {(int64_t)first, pages_of(size)};
    int file GS_CLOSED = open_driver_file(&exports->driver_file);
    return file < 0 || gs_find_lock(file, bytes, &found) != GS_BYTE_FREE;
}

/* ---- descriptors left open by dead processes ---- */

#define WORDS ((1u << MAKER_BITS) / 64)

static void note_the_living(uint64_t living[WORDS], struct gpuslice_region *region, const struct gpuslice_slot *mine)
{
    memset(living, 0, WORDS * sizeof *living);
    GS_FOR_EACH_SLOT(slot, region, mine)
        living[maker_of(slot) / 64] |= UINT64_C(1) << maker_of(slot) % 64;
}

/* The kernel reports any one lock in the queried range, not necessarily the first, so the bytes on both sides of it are
 * queried in turn. */
static bool add_up(int file, uint32_t container, const uint64_t living[WORDS], uint64_t bytes[GPUSLICE_CARDS])
{
    struct gs_bytes left[64] = {{FIRST_BYTE | (int64_t)container << CONTAINER_SHIFT, INT64_C(1) << CONTAINER_SHIFT}}, lock;
    int asked = 0;
    for (uint32_t count = 1; count;) {
        struct gs_bytes within = left[--count];
        int64_t end = within.first + within.count;
        enum gs_held_byte held = within.count > 0 ? gs_find_lock(file, within, &lock) : GS_BYTE_FREE;
        if (held == GS_BYTE_UNKNOWN || ++asked > MOST_LOCKS)
            return false;
        if (held == GS_BYTE_FREE)
            continue;
        if (lock.first < within.first || lock.count <= 0 || lock.first + lock.count > end || count + 2 > 64)
            return false; /* not a lock of ours */
        uint32_t maker = (uint32_t)(lock.first >> MAKER_SHIFT) & ((1u << MAKER_BITS) - 1);
        if (!(living[maker / 64] >> maker % 64 & 1))
            bytes[lock.first >> CARD_SHIFT & (GPUSLICE_CARDS - 1)] += (uint64_t)lock.count << PAGE_SHIFT;
        left[count++] = (struct gs_bytes){lock.first + lock.count, end - lock.first - lock.count};
        left[count++] = (struct gs_bytes){within.first, lock.first - within.first};
    }
    return true;
}

/* In bytes per card. False if it cannot be found out. */
static bool left_by_the_dead(uint32_t container, struct gpuslice_region *region, const struct gpuslice_slot *mine,
                             uint64_t bytes[GPUSLICE_CARDS])
{
    GS_KEEP_ERRNO;
    uint64_t living[WORDS];
    memset(bytes, 0, GPUSLICE_CARDS * sizeof *bytes);
    if (!is_written(&region->driver_file))
        return true; /* no descriptor was ever exported, or the whole region was overwritten */
    note_the_living(living, region, mine);
    int file GS_CLOSED = open_driver_file(&region->driver_file);
    return file >= 0 && add_up(file, container, living, bytes);
}

static uint64_t imports_of(struct gpuslice_region *region, const struct gpuslice_slot *mine, uint32_t card)
{
    uint64_t imports = 0;
    GS_FOR_EACH_SLOT(slot, region, mine)
        imports += gs_bounded(&slot->usage[card].imports);
    return imports;
}

/* The orphaned bytes are read before the slots, and a process that empties a slot takes it over before it adds to them, so
 * orphaned bytes never belong to a living process. Locks only lower the count and never raise it: where the driver's file is
 * the host's own, another container could place locks too. */
bool gs_orphans_settle(const struct gs_exports *exports, struct gpuslice_region *region, const struct gpuslice_slot *mine)
{
    uint64_t orphaned[GPUSLICE_CARDS], kept[GPUSLICE_CARDS];
    bool any = false, less = false;
    for (uint32_t card = 0; card < GPUSLICE_CARDS; card++) {
        orphaned[card] = gs_load(&region->cards[card].orphaned_bytes);
        any |= orphaned[card] && !imports_of(region, mine, card);
    }
    if (!any || !left_by_the_dead(exports->container, region, mine, kept))
        return false;
    for (uint32_t card = 0; card < GPUSLICE_CARDS; card++)
        if (kept[card] < orphaned[card] && !imports_of(region, mine, card))
            less |= atomic_compare_exchange_strong(&region->cards[card].orphaned_bytes, &orphaned[card], kept[card]);
    return less;
}
