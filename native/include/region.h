/* The shared memory in which all processes of one container keep their accounts.
 *
 * One file per container, mapped by each process that uses a card. src/gpuslice/adapters/region/layout.py mirrors
 * these structures; a test compares the two field by field, so a change here needs the same change there and a new
 * GPUSLICE_REGION_VERSION.
 *
 * There is no lock and no sum that could be left half done. What a container holds of a card is the sum over the
 * slots, and only the owner of a slot writes its numbers. A process that dies leaves a slot whose owner is no more;
 * any process that meets it may empty it. A file of zeros is an empty region.
 *
 * The tenant can write here, so nobody outside may take these numbers for more than a display: the limit itself is
 * in the limits file, which the tenant cannot write. Each process also keeps to itself what it holds, and writes it
 * again where it finds the file damaged (src/accounts/attach.c).
 */
#ifndef GPUSLICE_REGION_H
#define GPUSLICE_REGION_H

#include <stdatomic.h>
#include <stdint.h>

#define GPUSLICE_REGION_MAGIC UINT64_C(0x4c53555047000000) /* "GPUSL" in the high bytes, the version in the low */
#define GPUSLICE_REGION_VERSION UINT64_C(4)
#define GPUSLICE_CARDS 16u
#define GPUSLICE_SLOTS 1024u
#define GPUSLICE_UUID_BYTES 96u
#define GPUSLICE_DRIVER_PATH_BYTES 232u

/* Time that grows at some rate and is used up by work. */
struct gpuslice_credit {
    _Alignas(64) _Atomic int64_t ns;
    _Atomic uint64_t at_ns; /* monotonic time up to which it was given */
};

/* One card of the container. Cards are found by uuid: an index means nothing outside this file. */
struct gpuslice_card {
    _Atomic uint64_t key; /* of the uuid; 0 for an unused entry */
    char uuid[GPUSLICE_UUID_BYTES];
    _Atomic uint64_t limit_bytes;   /* as read from the limits file, for display; UINT64_MAX for none */
    _Atomic uint64_t compute_percent; /* of the card's compute, for display; 0 for no limit */
    _Atomic uint64_t peak_bytes;    /* the most that was ever in use at once */
    _Atomic uint64_t refused;       /* allocations that got CUDA_ERROR_OUT_OF_MEMORY from us */
    _Atomic uint64_t throttled_ns;  /* how long launches were made to wait */
    _Atomic uint64_t orphaned_bytes; /* let go by their exporter, or left by its end, while others may have them open */
    _Atomic uint64_t context_bytes; /* what a context took when last measured */
    /* The share of compute: one account for all processes of the container (src/policy/share.c). */
    _Atomic uint64_t asked_at_ns;  /* monotonic time of the last question to NVML */
    _Atomic uint64_t sampled_us;   /* NVML's time of the newest sample seen */
    _Atomic uint64_t unsettled_ns; /* sampled as ours, of work whose event has not come yet */
    struct gpuslice_credit cap;    /* what the container may use at the most */
    struct gpuslice_credit due;    /* what it gets at the least, whatever neighbours say */
    _Atomic uint64_t virtual_ns;   /* device time charged, ever, by its weight: who is behind goes first */
    _Atomic uint64_t active_at_ns; /* monotonic time up to which it had work or waited */
    _Atomic uint64_t finished_at_ns; /* monotonic time at which work was last seen to have finished */
    _Atomic uint64_t charged_ns;   /* device time charged, ever */
    _Atomic uint64_t busy_ns, billed_ns; /* ever: by events, and what of it was charged at once */
    _Atomic uint64_t recent_busy_ns, recent_own_ns; /* of late: by events, what of it was our own */
    _Atomic uint64_t learned_at_ns;
};

/* What one process holds of one card. */
struct gpuslice_usage {
    _Alignas(64) _Atomic uint64_t used_bytes; /* granted: held, or about to be asked of the driver */
    _Atomic uint64_t pending_bytes;           /* asked for and not yet granted; counts against everybody else */
    _Atomic uint64_t own_bytes;               /* the part that is the driver's own: contexts, modules */
    _Atomic uint64_t exported_bytes;          /* the part that other processes may have opened */
    _Atomic uint64_t imports;                 /* other processes' memory opened here, a count */
    _Atomic uint64_t in_flight_ns;            /* work launched and not yet charged, as estimated */
    _Atomic uint64_t unknown;                 /* launches under way of which nobody knows how long they take */
    _Atomic uint64_t changed_ns;              /* monotonic time at which used_bytes last changed, or was about to */
};

struct gpuslice_slot {
    /* pid (22 bits) | start time (26 bits) << 22 | hash of the pid namespace << 48; 0 for a free slot. */
    _Alignas(64) _Atomic uint64_t owner;
    _Atomic uint64_t start_time;    /* field 22 of /proc/<pid>/stat */
    _Atomic uint64_t start_stack;   /* field 28: tells an image from the one that exec put in its place; 0 unknown */
    _Atomic uint64_t pid_namespace; /* inode of /proc/self/ns/pid */
    _Atomic uint64_t pid;           /* in that namespace */
    _Atomic uint64_t host_pid;      /* as NVML names it, where it had to be found out; 0 unknown */
    _Atomic uint64_t locked;        /* 1: while the process is there, its byte of this file is locked (src/accounts/slots.c) */
    _Atomic uint64_t unlocked_ns;   /* monotonic time since when that was not so, or the process seen to be dead; 0: it is there */
    _Atomic uint64_t provisional;   /* a bit a card: own_bytes may be too much, the driver's figure has not said yet */
    _Atomic uint16_t in_flight[GPUSLICE_CARDS]; /* calls between these numbers and the driver: it may hold less than they say */
    struct gpuslice_usage usage[GPUSLICE_CARDS];
};

/* The driver's file of which exported descriptors are: the kernel's locks on it say which are open (src/accounts/exports.c). */
struct gpuslice_driver_file {
    _Atomic uint64_t inode; /* 0: none was exported yet; 1: of several */
    _Atomic uint64_t device;
    _Atomic uint64_t check; /* of the others */
    char path[GPUSLICE_DRIVER_PATH_BYTES];
};

struct gpuslice_region {
    _Atomic uint64_t magic;      /* GPUSLICE_REGION_MAGIC | GPUSLICE_REGION_VERSION */
    _Atomic uint64_t slots_high; /* slots [0, slots_high) were ever taken */
    _Atomic uint64_t swept;      /* slots of dead processes emptied, ever */
    uint64_t padding[5];
    struct gpuslice_driver_file driver_file;
    struct gpuslice_card cards[GPUSLICE_CARDS];
    struct gpuslice_slot slots[GPUSLICE_SLOTS];
};

/* What a container tells its neighbours on a card, in a file of its own that only it can write: so that what nobody
 * uses can be lent. A container that lies here changes what is lent and never what others are due. */
struct gpuslice_claim {
    uint64_t magic; /* GPUSLICE_CLAIM_MAGIC */
    uint64_t check; /* of all that follows: a record that is being written is no record */
    uint64_t virtual_ns; /* charged by weight, work under way included */
    uint64_t busy_ns;    /* how long its processes had work under way, ever */
    uint64_t busy_at_ns; /* monotonic time up to which that says */
    uint64_t wants_until_ns; /* it waits or has work under way, as far as it knows up to then */
    uint64_t under_way;      /* low byte: 1: it has work under way; 2: and nobody knows for how long; above: how long, as expected */
    uint64_t weight;         /* percent */
    uint64_t interactive;    /* 1: small work that somebody waits for */
    uint64_t pause_ns;       /* between its work's end and its next launch, in the mean */
    uint64_t ran_from_ns, ran_to_ns; /* its last run of work that has ended */
};
#define GPUSLICE_CLAIM_MAGIC (UINT64_C(0x4d49414c43000000) | UINT64_C(3)) /* "CLAIM", the version in the low byte */

/* What the driver says, seen from the host, that each process of this container holds of each card. Written by the agent
 * every half second and read-only here, for processes that NVML does not tell of themselves. */
#define GPUSLICE_FIGURES 256u
struct gpuslice_figure {
    uint64_t card;       /* the key of its uuid */
    uint64_t pid;        /* in the process's own namespace */
    uint64_t start_time; /* field 22 of /proc/<pid>/stat */
    uint64_t bytes;
};
struct gpuslice_figures {
    uint64_t magic; /* GPUSLICE_FIGURES_MAGIC */
    uint64_t check; /* of all that follows: figures that are being written are none */
    uint64_t at_ns; /* monotonic time, before the driver was asked */
    uint64_t count;
    struct gpuslice_figure of[GPUSLICE_FIGURES];
};
#define GPUSLICE_FIGURES_MAGIC (UINT64_C(0x4552554749460000) | UINT64_C(1)) /* "FIGURE", the version in the low byte */

#endif
