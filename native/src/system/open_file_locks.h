/* Locks of an open file (fcntl's F_OFD_SETLK): the kernel keeps one as long as the open file has a descriptor or a mapping
 * anywhere, in whatever process or namespace, and lets go of it when the last is gone. */
#ifndef GPUSLICE_OPEN_FILE_LOCKS_H
#define GPUSLICE_OPEN_FILE_LOCKS_H

#include <stdbool.h>
#include <stdint.h>

#define GS_WATCH_PATH_ROOM 232

/* Whether a descriptor that this process handed out is open anywhere, under whatever number: a byte of its file, far behind
 * anything that anybody reads, is locked through it, and asked after through the file's name. */
struct gs_watch {
    uint64_t device, inode; /* of the file */
    int64_t byte;
    char path[GS_WATCH_PATH_ROOM];
};

bool gs_watch_begin(struct gs_watch *watch, int descriptor); /* false: it cannot be watched */
/* What cannot be found out is taken for open: no descriptor is left to ask with, the name is out of sight (chroot). */
bool gs_watch_is_open(const struct gs_watch *watch);

/* A byte of a file held by a mapping, so that it is let go when this program's memory is: at its end, however it comes, or
 * at exec. No descriptor stays open, which programs that tidy up would close. A forked child that does not exec holds it
 * too, as it holds the driver's devices. NULL where it cannot be had, as on overlayfs. */
void *gs_hold_byte(const char *path, int64_t byte);
enum gs_held_byte { GS_BYTE_UNKNOWN, GS_BYTE_FREE, GS_BYTE_HELD };
enum gs_held_byte gs_byte_is_held(const char *path, int64_t byte);

#endif
