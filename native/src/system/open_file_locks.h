/* Open file description locks (fcntl's F_OFD_SETLK). The kernel keeps such a lock while the open file has a descriptor or a
 * mapping in any process or namespace, or a descriptor in flight in a socket, and releases it when the last one is gone. */
#ifndef GPUSLICE_OPEN_FILE_LOCKS_H
#define GPUSLICE_OPEN_FILE_LOCKS_H

#include <stdbool.h>
#include <stdint.h>

struct gs_bytes {
    int64_t first, count;
};

/* Locks these bytes of the descriptor's file, shared or exclusively. False if another open file has a conflicting lock. */
bool gs_lock_bytes(int descriptor, struct gs_bytes bytes, bool shared);

enum gs_held_byte { GS_BYTE_UNKNOWN, GS_BYTE_FREE, GS_BYTE_HELD };
/* Whether another open file has locked any of these bytes; `found` is the range of that lock. */
enum gs_held_byte gs_find_lock(int descriptor, struct gs_bytes within, struct gs_bytes *found);

/* Locks a byte of a file and keeps the lock by a mapping, so that the lock is released with this program's address space:
 * when the process ends for whatever reason, or at exec. A descriptor would not do, since some programs close all
 * descriptors that they do not know. A forked child that does not exec keeps the lock too, as it keeps the driver's devices
 * open. Returns the mapping; NULL if the byte cannot be locked this way, as on overlayfs. */
void *gs_hold_byte(const char *path, int64_t byte);
enum gs_held_byte gs_byte_is_held(const char *path, int64_t byte);

#endif
