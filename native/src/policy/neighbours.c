#define _GNU_SOURCE
#include "policy/neighbours.h"

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "system/os.h"
#include "system/text.h"

#define LIST_BYTES 2048
#define HIGH_DESCRIPTOR 400 /* out of the way of programs that expect certain descriptors */

struct entry { /* of a directory, as the kernel lists it */
    uint64_t inode, offset;
    uint16_t length;
    uint8_t type;
    char name[];
};

static uint64_t check_of(const struct gpuslice_claim *claim)
{
    size_t from = offsetof(struct gpuslice_claim, virtual_ns);
    return gs_hash((const char *)claim + from, sizeof *claim - from);
}

static int open_claim(const char *path, int flags, struct stat *found)
{
    int file = (int)syscall(SYS_openat, AT_FDCWD, path, flags | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0644);
    int high = file >= 0 ? (int)syscall(SYS_fcntl, file, F_DUPFD_CLOEXEC, HIGH_DESCRIPTOR) : -1;
    if (high >= 0) {
        syscall(SYS_close, file);
        file = high;
    }
    if (file > 2 && syscall(SYS_fstat, file, found) == 0 && S_ISREG(found->st_mode))
        return file;
    if (file >= 0)
        syscall(SYS_close, file);
    return -1;
}

void gs_neighbours_start(struct gs_neighbours *neighbours, const char *prefix, const char *uuid)
{
    char path[sizeof neighbours->folder + 16];
    struct stat found;
    GS_KEEP_ERRNO;
    memset(neighbours, 0, sizeof *neighbours);
    if (!strchr(uuid, '/') && gs_text_join(neighbours->folder, sizeof neighbours->folder, prefix, "/run/gpuslice/", uuid) &&
        gs_text_join(path, sizeof path, neighbours->folder, "/own", "/claim")) {
        int file = gs_may_write(sizeof(struct gpuslice_claim)) ? open_claim(path, O_RDWR | O_CREAT, &found) : -1;
        if (file > 0) {
            syscall(SYS_fchmod, file, 0666); /* other users of the container write it, too, whatever our umask is */
            neighbours->own = file;
            neighbours->own_device = found.st_dev;
            neighbours->own_inode = found.st_ino;
        }
    }
    if (!neighbours->own)
        *neighbours->folder = 0;
}

/* Whether the descriptor is still ours, or the program has closed and reused it: writing into another file would be
 * worse than publishing nothing. */
static bool is_still(int file, uint64_t device, uint64_t inode, struct stat *found)
{
    return syscall(SYS_fstat, file, found) == 0 && found->st_dev == device && found->st_ino == inode;
}

void gs_neighbours_tell(struct gs_neighbours *neighbours, struct gpuslice_claim *claim)
{
    GS_KEEP_ERRNO;
    struct stat found;
    if (neighbours->own && !is_still(neighbours->own, neighbours->own_device, neighbours->own_inode, &found))
        neighbours->own = 0;
    claim->check = check_of(claim);
    if (neighbours->own && gs_may_write(sizeof *claim))
        syscall(SYS_pwrite64, neighbours->own, claim, sizeof *claim, (long)0);
}

/* ---- finding the others' claims ---- */

static struct gs_neighbour_file *known(struct gs_neighbours *neighbours, uint64_t name)
{
    for (uint32_t i = 0; i < neighbours->count; i++)
        if (neighbours->files[i].name == name)
            return &neighbours->files[i];
    return NULL;
}

static void meet(struct gs_neighbours *neighbours, const char *name)
{
    char folder[sizeof neighbours->folder + 8], path[sizeof folder + 256];
    struct stat now;
    uint64_t hashed = gs_hash(name, strlen(name));
    struct gs_neighbour_file *file = known(neighbours, hashed);
    if (file && is_still(file->descriptor, file->device, file->inode, &now) && now.st_nlink)
        file->seen = true;
    if (file || neighbours->count == GS_NEIGHBOURS || !gs_text_join(folder, sizeof folder, neighbours->folder, "/all", "/") ||
        !gs_text_join(path, sizeof path, folder, name, "/claim"))
        return;
    int descriptor = open_claim(path, O_RDONLY, &now);
    if (descriptor < 0)
        return;
    if (now.st_dev == neighbours->own_device && now.st_ino == neighbours->own_inode) {
        syscall(SYS_close, descriptor);
        return;
    }
    neighbours->files[neighbours->count++] = (struct gs_neighbour_file){
        .descriptor = descriptor, .seen = true, .name = hashed, .device = now.st_dev, .inode = now.st_ino};
}

static void forget_unseen(struct gs_neighbours *neighbours)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < neighbours->count; i++) {
        struct gs_neighbour_file *file = &neighbours->files[i];
        struct stat found;
        if (file->seen)
            neighbours->files[kept++] = *file;
        else if (is_still(file->descriptor, file->device, file->inode, &found))
            syscall(SYS_close, file->descriptor);
    }
    neighbours->count = kept;
}

static void list(struct gs_neighbours *neighbours)
{
    _Alignas(8) char entries[LIST_BYTES], path[sizeof neighbours->folder + 8];
    if (!gs_text_join(path, sizeof path, neighbours->folder, "/all", ""))
        return;
    int folder = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder < 0)
        return;
    for (uint32_t i = 0; i < neighbours->count; i++)
        neighbours->files[i].seen = false;
    for (long bytes; (bytes = syscall(SYS_getdents64, folder, entries, sizeof entries)) > 0;)
        for (long at = 0; at < bytes; at += ((struct entry *)(void *)(entries + at))->length) {
            const char *name = ((struct entry *)(void *)(entries + at))->name;
            if (*name != '.')
                meet(neighbours, name);
        }
    syscall(SYS_close, folder);
    forget_unseen(neighbours);
}

/* ---- reading ---- */

/* A claim that is being written is read again next time; until then the previous one is valid. */
static bool read_claim(struct gs_neighbour_file *file)
{
    struct gpuslice_claim claim;
    if (syscall(SYS_pread64, file->descriptor, &claim, sizeof claim, (long)0) == (long)sizeof claim &&
        claim.magic == GPUSLICE_CLAIM_MAGIC && claim.check == check_of(&claim))
        file->claim = claim;
    return file->claim.magic != 0;
}

uint32_t gs_neighbours_read(struct gs_neighbours *neighbours, uint64_t now_ns, uint64_t list_every_ns,
                            struct gs_neighbour found[GS_NEIGHBOURS])
{
    uint32_t count = 0;
    GS_KEEP_ERRNO;
    if (!*neighbours->folder)
        return 0;
    if (now_ns - neighbours->listed_ns >= list_every_ns) {
        neighbours->listed_ns = now_ns;
        list(neighbours);
    }
    for (uint32_t i = 0; i < neighbours->count; i++)
        if (read_claim(&neighbours->files[i])) {
            found[count] = gs_heard(&neighbours->files[i].claim, now_ns);
            found[count++].name = neighbours->files[i].name;
        }
    return count;
}
