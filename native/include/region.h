/* The shared memory in which all processes of one container keep their accounts.
 *
 * One file per container, mapped by each process that uses a card. src/gpuslice/adapters/region/layout.py mirrors
 * these structures; a test compares the two field by field, so a change here needs the same change there and a new
 * GPUSLICE_REGION_VERSION.
 *
 * There is no lock, and no total that a dying process could leave half updated. What a container holds of a card is the
 * sum over the slots, and only the owner of a slot writes its numbers. A process that dies leaves a slot whose owner no
 * longer exists, and any process that finds such a slot may empty it. A file of zeros is an empty region.
 *
 * The tenant can write here, so others may use these numbers only for display: the limit itself is in the limits file,
 * which the tenant cannot write. Each process also keeps what it holds in its own memory and writes it again if it finds
 * the file damaged (src/accounts/attach.c).
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

/* Device time that accrues at some rate and is used up by work. */
struct gpuslice_credit {
    _Alignas(64) _Atomic int64_t ns;
    _Atomic uint64_t at_ns; /* monotonic time up to which it has accrued */
};

/* One card of the container. Cards are found by uuid: an index means nothing outside this file. */
struct gpuslice_card {
    _Atomic uint64_t key; /* hash of the uuid; 0 for an unused entry */
    char uuid[GPUSLICE_UUID_BYTES];
    _Atomic uint64_t limit_bytes;     /* as read from the limits file, for display; UINT64_MAX for none */
    _Atomic uint64_t compute_percent; /* of the card, for display; 0 for no limit */
    _Atomic uint64_t peak_bytes;      /* the most that was ever in use at once */
    _Atomic uint64_t refused;         /* allocations that got CUDA_ERROR_OUT_OF_MEMORY from us */
    _Atomic uint64_t throttled_ns;    /* how long launches were made to wait */
    _Atomic uint64_t orphaned_bytes;  /* released by their exporter, or left when it ended, while others may have them open */
    _Atomic uint64_t context_bytes;   /* what a context took when last measured */
    /* The share of compute: one account for all processes of the container (src/policy/share.c). */
    _Atomic uint64_t asked_at_ns;  /* monotonic time of the last query to NVML */
    _Atomic uint64_t sampled_us;   /* NVML's time of the newest sample seen */
    _Atomic uint64_t unsettled_ns; /* sampled as ours, for work whose event has not completed yet */
    _Atomic uint64_t wanted_bytes; /* of its own, which others have borrowed and somebody here waits for; 0: nobody waits */
    struct gpuslice_credit cap;    /* the most that the container may use */
    struct gpuslice_credit due;    /* the least that it gets, whatever neighbours claim */
    _Atomic uint64_t virtual_ns; /* total device time charged, divided by its weight: the container that is behind goes first */
    _Atomic uint64_t active_at_ns;       /* monotonic time up to which it had work or waited */
    _Atomic uint64_t finished_at_ns;     /* monotonic time at which work was last seen to have finished */
    _Atomic uint64_t charged_ns;         /* total device time charged */
    _Atomic uint64_t busy_ns, billed_ns; /* totals: measured by events, and how much of that was charged immediately */
    _Atomic uint64_t recent_busy_ns, recent_own_ns; /* recently: measured by events, and how much of that was our own work */
    _Atomic uint64_t learned_at_ns;
};

/* What one process holds of one card. */
struct gpuslice_usage {
    _Alignas(64) _Atomic uint64_t used_bytes; /* granted: held, or about to be allocated by the driver */
    _Atomic uint64_t pending_bytes;           /* requested and not granted yet; counts against all other processes */
    _Atomic uint64_t own_bytes;               /* the part that the driver uses itself: contexts, modules */
    _Atomic uint64_t exported_bytes;          /* the part that other processes may have opened */
    _Atomic uint64_t imports;                 /* the number of other processes' allocations opened here */
    _Atomic uint64_t in_flight_ns;            /* estimated time of work launched and not charged yet */
    _Atomic uint64_t unknown;                 /* launches in progress of unknown duration */
    _Atomic uint64_t changed_ns;              /* monotonic time when used_bytes last changed or was about to change */
};

struct gpuslice_slot {
    /* pid (22 bits) | start time (26 bits) << 22 | hash of the pid namespace << 48; 0 for a free slot. */
    _Alignas(64) _Atomic uint64_t owner;
    _Atomic uint64_t start_time;    /* field 22 of /proc/<pid>/stat */
    _Atomic uint64_t start_stack;   /* field 28: changes at exec; 0 if unknown */
    _Atomic uint64_t pid_namespace; /* inode of /proc/self/ns/pid */
    _Atomic uint64_t pid;           /* in that namespace */
    _Atomic uint64_t host_pid;      /* the pid that NVML reports, where it had to be determined; 0 if unknown */
    _Atomic uint64_t locked; /* 1: the slot's byte of this file is locked while the process exists (src/accounts/slots.c) */
    _Atomic uint64_t unlocked_ns; /* monotonic time since when it was seen unlocked, or the process seen dead; 0: it exists */
    _Atomic uint64_t provisional; /* one bit per card: own_bytes may be too high, as the driver's figure is not known yet */
    _Atomic uint16_t
        in_flight[GPUSLICE_CARDS]; /* driver calls in flight, during which the driver may hold less than is counted here */
    struct gpuslice_usage usage[GPUSLICE_CARDS];
};

/* The driver's file that exported descriptors refer to. Locks on it show which of them are open (src/accounts/exports.c). */
struct gpuslice_driver_file {
    _Atomic uint64_t inode; /* 0: nothing was exported yet; 1: there were several files */
    _Atomic uint64_t device;
    _Atomic uint64_t check; /* checksum of the other fields */
    char path[GPUSLICE_DRIVER_PATH_BYTES];
};

struct gpuslice_region {
    _Atomic uint64_t magic;      /* GPUSLICE_REGION_MAGIC | GPUSLICE_REGION_VERSION */
    _Atomic uint64_t slots_high; /* slots [0, slots_high) were ever taken */
    _Atomic uint64_t swept;      /* slots of dead processes emptied, ever */
    _Atomic uint64_t swept_ns;   /* monotonic time when all slots were last looked at */
    uint64_t padding[4];
    struct gpuslice_driver_file driver_file;
    struct gpuslice_card cards[GPUSLICE_CARDS];
    struct gpuslice_slot slots[GPUSLICE_SLOTS];
};

/* What a container tells its neighbours on a card, in a file that only it can write, so that unused compute can be lent. A
 * container that lies here changes what is lent, but never what others are entitled to. */
struct gpuslice_claim {
    uint64_t magic;          /* GPUSLICE_CLAIM_MAGIC */
    uint64_t check;          /* checksum of all that follows: a record that is just being written does not match */
    uint64_t virtual_ns;     /* device time charged, divided by its weight, including work in progress */
    uint64_t busy_ns;        /* total time during which its processes had work in progress */
    uint64_t busy_at_ns;     /* monotonic time up to which busy_ns counts */
    uint64_t wants_until_ns; /* it expects to wait or to have work in progress until then */
    uint64_t under_way;      /* low byte: 1: work in progress, 2: of unknown duration; higher bytes: the expected duration */
    uint64_t weight;         /* percent */
    uint64_t interactive;    /* 1: small work that somebody waits for */
    uint64_t pause_ns;       /* mean time from the end of its work to its next launch */
    uint64_t ran_from_ns, ran_to_ns; /* its last run of work that has ended */
};
#define GPUSLICE_CLAIM_MAGIC (UINT64_C(0x4d49414c43000000) | UINT64_C(3)) /* "CLAIM", the version in the low byte */

/* What each process of this container holds of each card, as the driver reports it on the host. The agent writes this every
 * half second for processes to which NVML does not report their own memory. Read-only in the container. */
#define GPUSLICE_FIGURES 256u
struct gpuslice_figure {
    uint64_t card;       /* the key of its uuid */
    uint64_t pid;        /* in the process's own namespace */
    uint64_t start_time; /* field 22 of /proc/<pid>/stat */
    uint64_t bytes;
};
struct gpuslice_figures {
    uint64_t magic; /* GPUSLICE_FIGURES_MAGIC */
    uint64_t check; /* checksum of all that follows: figures that are just being written do not match */
    uint64_t at_ns; /* monotonic time just before the driver was queried */
    uint64_t count;
    struct gpuslice_figure of[GPUSLICE_FIGURES];
};
#define GPUSLICE_FIGURES_MAGIC (UINT64_C(0x4552554749460000) | UINT64_C(1)) /* "FIGURE", the version in the low byte */

#endif
