/* Claims: the containers on a card publish what they use, so that unused compute can be lent. Each writes its own claim
 * and reads the others'. The agent mounts two folders for each card: <prefix>/run/gpuslice/<uuid>/own, where this
 * container writes, and …/all, read-only, which contains each container's own folder under some name.
 *
 * Files are read, never mapped: a file that its owner truncates is not a claim, and harms nobody. */
#ifndef GPUSLICE_NEIGHBOURS_H
#define GPUSLICE_NEIGHBOURS_H

#include <stdbool.h>

#include "policy/fairness.h"

struct gs_neighbour_file {
    int descriptor; /* of the claim; only read from, so that no harm is done if the program has closed and reused it */
    bool seen;
    uint64_t name; /* hash of the folder's name */
    uint64_t device, inode;
    struct gpuslice_claim claim; /* as last read */
};

/* Zeros: none. */
struct gs_neighbours {
    char folder[256]; /* <prefix>/run/gpuslice/<uuid>; empty: no claims are exchanged here */
    int own;          /* descriptor of our claim, 0 if it could not be made */
    uint64_t own_device, own_inode;
    uint64_t listed_ns;
    struct gs_neighbour_file files[GS_NEIGHBOURS];
    uint32_t count;
};

void gs_neighbours_start(struct gs_neighbours *neighbours, const char *prefix, const char *uuid);
void gs_neighbours_tell(struct gs_neighbours *neighbours, struct gpuslice_claim *claim);
/* Reads the others' claims into `found` and returns how many there are. Looks for new neighbours every
 * `list_every_ns`. */
uint32_t gs_neighbours_read(struct gs_neighbours *neighbours, uint64_t now_ns, uint64_t list_every_ns,
                            struct gs_neighbour found[GS_NEIGHBOURS]);

#endif
