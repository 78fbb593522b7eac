/* Locks of an open file (fcntl's F_OFD_SETLK): the kernel keeps one as long as the open file has a descriptor or a mapping
 * anywhere, in whatever process or namespace, or on its way in a socket, and lets go of it when the last is gone. */
#ifndef GPUSLICE_OPEN_FILE_LOCKS_H
#define GPUSLICE_OPEN_FILE_LOCKS_H

#include <stdbool.h>
#include <stdint.h>

struct gs_bytes {
    int64_t first, count;
};

/* Locks these bytes of a descriptor's file. Shared: others may share the same bytes. False where others have them. */
bool gs_lock_bytes(int descriptor, struct gs_bytes bytes, bool shared);

enum gs_held_byte { GS_BYTE_UNKNOWN, GS_BYTE_FREE, GS_BYTE_HELD };
/* Whether any of these bytes is locked by another open file; `found` is what that has locked there. */
enum gs_held_byte gs_find_lock(int descriptor, struct gs_bytes within, struct gs_bytes *found);

/* A byte of a file held by a mapping, so that it is let go when this program's memory is: at its end, however it comes, or
 * at exec. No descriptor stays open, which programs that tidy up would close. A forked child that does not exec holds it
 * too, as it holds the driver's devices. NULL where it cannot be had, as on overlayfs. */
void *gs_hold_byte(const char *path, int64_t byte);
enum gs_held_byte gs_byte_is_held(const char *path, int64_t byte);

#endif
