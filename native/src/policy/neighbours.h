/* What the containers on a card tell each other, so that what nobody uses can be lent: each writes a claim of its own and
 * reads the others'. The agent mounts two folders for each card: <prefix>/run/gpuslice/<uuid>/own, where this container
 * writes, and …/all, read-only, in which each container's own folder is found under some name.
 *
 * Files are read, never mapped: one that its owner cuts short is no claim, and harms nobody. */
#ifndef GPUSLICE_NEIGHBOURS_H
#define GPUSLICE_NEIGHBOURS_H

#include <stdbool.h>

#include "policy/fairness.h"

struct gs_neighbour_file {
    int descriptor; /* of the claim; used for reading alone, so that one the program closed does no harm */
    bool seen;
    uint64_t name; /* a hash of the folder's */
    uint64_t device, inode;
    struct gpuslice_claim claim; /* as last read */
};

/* Zeros are none. */
struct gs_neighbours {
    char folder[256]; /* <prefix>/run/gpuslice/<uuid>; empty: nobody tells anything here */
    int own;          /* descriptor of our claim, 0 if it could not be made */
    uint64_t own_device, own_inode;
    uint64_t listed_ns;
    struct gs_neighbour_file files[GS_NEIGHBOURS];
    uint32_t count;
};

void gs_neighbours_start(struct gs_neighbours *neighbours, const char *prefix, const char *uuid);
void gs_neighbours_tell(struct gs_neighbours *neighbours, struct gpuslice_claim *claim);
/* Reads the others' claims; how many there have ever been. Looks for new ones once in a while, or at once. */
uint32_t gs_neighbours_read(struct gs_neighbours *neighbours, uint64_t now_ns, uint64_t list_every_ns,
                            struct gs_neighbour found[GS_NEIGHBOURS]);

#endif
