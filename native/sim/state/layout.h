/* The simulated machine: every byte that processes share about its cards.
 *
 * One file, mapped by each process. simulator/src/simcluster/gpu_layout.py mirrors these structures with ctypes; a test
 * compares the two field by field, so a change here needs the same change there.
 *
 * Allocation records are the truth; every sum beside them is a cache that recover() can compute again when a
 * process died between two stores.
 */
#ifndef GPUSLICE_SIM_LAYOUT_H
#define GPUSLICE_SIM_LAYOUT_H

#include <stdatomic.h>
#include <stdint.h>

#define SIM_MAGIC UINT64_C(0x3155504753494c53) /* "SLISGPU1", little-endian */
#define SIM_LAYOUT_VERSION 14u
#define SIM_CARDS 32u
#define SIM_PROCESSES 1024u
#define SIM_RECORDS (1u << 18)
#define SIM_EVENTS 256u
#define SIM_GHOSTS 32u
#define SIM_SAMPLES 32u
#define SIM_SAMPLE_PROCESSES 30u
#define SIM_NOBODY SIM_PROCESSES /* the owner of memory that only an exported descriptor keeps */
#define SIM_CONNECTIONS 32u
#define SIM_QUEUES 4096u
#define SIM_QUEUE_ITEMS 1024u
#define SIM_WHOLE_CARD 1024u /* the width of work that fills a card */
#define SIM_STRIPES 16u
#define SIM_CGROUPS 12u /* a process is in one, and in those above it */
#define SIM_LIMITS 512u /* of cgroups on cards */
#define SIM_PATH 384u
#define SIM_SAMPLE_PERIOD_NS UINT64_C(166666667) /* a sixth of a second, as the driver samples */
#define SIM_ABSENT UINT32_MAX                    /* the card has no such gauge */
#define SIM_ABSENT64 UINT64_MAX
#define SIM_NO_LIMIT UINT64_MAX /* NVML_DEVICE_MEMORY_LIMIT_MAX */

/* What took the memory. */
enum sim_kind {
    SIM_CONTEXT,  /* contexts' own use */
    SIM_PLAIN,    /* cuMemAlloc, cuMemAllocPitch */
    SIM_MANAGED,  /* cuMemAllocManaged: resident at allocation as far as the card has room */
    SIM_POOL,     /* reserved bytes of stream-ordered pools */
    SIM_PHYSICAL, /* cuMemCreate */
    SIM_ARRAY,    /* arrays and mipmapped arrays */
    SIM_GRAPH,    /* reserved bytes of graphs' memory nodes */
    SIM_MODULE,   /* code and globals of modules and libraries */
    SIM_LIMIT,    /* heaps grown with cuCtxSetLimit */
    SIM_IMPORT,   /* another process's memory, opened here: no bytes of its own */
    SIM_KINDS = 12
};

struct sim_sample_process {
    int32_t pid; /* in its own namespace */
    uint16_t percent;
    uint16_t slot;
};

struct sim_sample {
    uint64_t timestamp_us;
    uint32_t percent;
    uint32_t process_count;
    struct sim_sample_process processes[SIM_SAMPLE_PROCESSES];
};

struct sim_card {
    /* Identity: written when the file is created. */
    char name[96];
    char uuid[96];
    char serial[32];
    char part_number[32];
    char vbios[32];
    char mig_profile[32];
    int32_t parent; /* index of the whole card for a MIG device, else -1 */
    uint32_t minor;
    uint32_t pci_domain, pci_bus, pci_device;
    uint32_t pci_device_id, pci_subsystem_id;
    uint32_t mig_mode; /* 0 off, 1 on, SIM_ABSENT for cards without it */
    uint32_t gpu_instance, compute_instance, mig_gpu_slices, mig_compute_slices, mig_index, mig_profile_id;
    uint32_t capability_major, capability_minor;
    uint32_t multiprocessor_count, cores_per_multiprocessor;
    uint32_t architecture, brand; /* NVML's numbers */
    uint32_t shared_per_multiprocessor, l2_bytes, memory_bus_bits, copy_engines;
    uint32_t gpm;            /* 1 where NVML offers GPM metrics */
    uint64_t total_bytes;    /* as NVML shows it */
    uint64_t reserved_bytes; /* held by the driver, shown apart by NVML's v2 */
    uint64_t idle_bytes;     /* used with no process on the card */
    uint64_t context_bytes;  /* what one context takes */
    uint64_t bar1_bytes;
    /* Gauges: an injector may change them at any time. SIM_ABSENT where the card has none. */
    uint32_t temperature_c, memory_temperature_c, slowdown_c, shutdown_c;
    uint32_t power_mw, power_limit_mw, power_default_limit_mw, power_min_limit_mw, power_max_limit_mw;
    uint32_t fan_percent, performance_state;
    uint32_t sm_clock_mhz, memory_clock_mhz, video_clock_mhz;
    uint32_t max_sm_clock_mhz, max_memory_clock_mhz, max_video_clock_mhz;
    uint32_t persistence, ecc, compute_mode, display_active, display_mode;
    uint32_t pcie_generation, pcie_width, pcie_max_generation, pcie_max_width;
    uint32_t nvlink_count;
    uint32_t lost;            /* 1: fallen off the bus */
    uint32_t resets;          /* how often it came back: it stays lost to who opened NVML before */
    uint32_t failing;         /* a CUresult that contexts on this card get, 0 for none */
    uint32_t refused_with;    /* an nvmlReturn_t that the calls of NVML named below get on this card, 0 for none */
    char refused_call[60];    /* the beginning of their names */
    uint32_t sampled_turn_us; /* NVML's percentage of a process includes its waits for its turn, and this long after its
                               * work while others work; 0: only its own time */
    uint32_t gpu_percent;     /* utilisation set from outside, SIM_ABSENT to follow the kernels */
    uint32_t memory_percent;  /* as above for the memory controller */
    uint32_t encoder_percent, decoder_percent;
    uint32_t retired_pending, remap_pending, remap_failure, recovery_action;
    uint64_t clock_event_reasons;
    uint64_t ecc_corrected_volatile, ecc_uncorrected_volatile, ecc_corrected_aggregate, ecc_uncorrected_aggregate;
    uint64_t retired_single, retired_double, remapped_corrected, remapped_uncorrected;
    uint64_t pcie_replays, pcie_tx_bytes, pcie_rx_bytes, nvlink_tx_kib, nvlink_rx_kib;
    uint64_t throttled_power_ns, throttled_thermal_ns;
    uint64_t kernel_ns;  /* how long a kernel takes when nothing says otherwise */
    uint64_t context_ns; /* how long a context takes to come, and its memory with it */
    uint64_t module_ns;  /* the same of a module's code */
    /* Accounts and engine: under the lock. */
    uint64_t used_bytes;
    uint64_t engine_ns;     /* the engine is simulated up to this monotonic time */
    uint64_t busy_ns;       /* time with work, ever */
    uint64_t sample_end_ns; /* when the sample being gathered ends */
    uint64_t sample_busy_ns;
    uint64_t sample_count; /* samples written, ever; the ring holds the last SIM_SAMPLES */
    struct sim_sample samples[SIM_SAMPLES];
};

/* A step of a queue: kernels of one stream, a wait for another queue's item, or a host function's turn. */
struct sim_item {
    double remaining_ns;  /* of its own time, with the card to itself */
    uint64_t awaited;     /* a wait: the mark of the item that must be finished first */
    uint64_t finished_ns; /* monotonic */
    uint32_t stream;
    uint16_t width; /* how much of the card it fills, of SIM_WHOLE_CARD */
    uint8_t held;   /* a host function's turn: remaining_ns becomes 0 when it has returned */
    uint8_t sealed; /* somebody asked when it ends: nothing more may join it */
};

/* What one connection of a process to a card was given, numbered from 1; the ring remembers ends for a while. */
struct sim_queue {
    uint32_t live;
    uint32_t process;
    uint32_t card;
    uint32_t padding;
    uint64_t made, finished;
    struct sim_item items[SIM_QUEUE_ITEMS];
};

struct sim_launches {
    uint64_t legacy, per_thread, graphs;
    uint64_t padding[5]; /* a cache line each */
};

struct sim_process {
    _Atomic uint32_t live; /* 1 while a process holds this slot, published last */
    int32_t pid;           /* in its own namespace */
    uint64_t start_time;
    uint64_t pid_namespace;        /* its number in /proc/self/ns/pid */
    uint64_t cgroups[SIM_CGROUPS]; /* its own first, then those above it, 0 for no more */
    uint32_t contained;            /* 1: it had NVIDIA_VISIBLE_DEVICES, so it stands for a container */
    uint32_t context_count[SIM_CARDS];
    uint32_t
        checkpoint; /* CUprocessState: 0 running, 1 locked, 2 checkpointed: its memory is not on the card, 3 failed: lost */
    uint64_t host_address, host_bytes; /* where it has room for what a checkpoint copies to the host, and how much is there */
    uint64_t used_bytes[SIM_CARDS][SIM_KINDS];
    double done_ns[SIM_CARDS];            /* time the card worked for it, ever: kernels that run side by side count once */
    double sample_ns[SIM_CARDS];          /* its time by NVML within the sample being gathered */
    uint64_t sampled_until_ns[SIM_CARDS]; /* of the engine's time: when NVML ceases to count it, see sampled_turn_us */
    uint32_t queues[SIM_CARDS][SIM_CONNECTIONS]; /* 1 + index in the table of queues, 0 for none yet */
    struct sim_launches launches[SIM_STRIPES];   /* threads count apart; the sums are what happened */
};

struct sim_record {
    _Atomic uint32_t live; /* 1 while the bytes are taken, 2 while a checkpoint keeps them; published last */
    uint16_t card;
    uint16_t kind;
    uint32_t process;
    uint32_t generation; /* counts reuse, so that an old handle is recognised */
    uint64_t bytes;
    uint64_t address; /* of nobody's: the number of the descriptor's file */
    uint32_t target;  /* SIM_IMPORT: the record it keeps alive */
    uint32_t shared;  /* imports that may keep it alive: look before forgetting it */
    uint32_t next_free;
    uint32_t padding;
};

struct sim_event {
    uint64_t sequence; /* 1 for the first ever; 0 while being written */
    uint64_t type;     /* NVML's event type bits */
    uint64_t data;     /* the XID */
    uint32_t card;
    uint32_t padding;
};

/* How the driver accounts memory by cgroup (RmMemacctMode): in a table of its own, or by the kernel's dmem controller. */
enum sim_accounting { SIM_ACCOUNTING_OFF, SIM_ACCOUNTING_MISC, SIM_ACCOUNTING_DMEM };

/* What a cgroup may hold of a card. dmem adds soft limits to those of the cgroups above. */
struct sim_limit {
    uint32_t live;
    uint32_t card;
    uint64_t cgroup; /* as sim_process has it */
    uint64_t soft, hard;
    char path[SIM_PATH]; /* as it was set: a cgroup that is gone has no limits */
};

/* A process that exists only on paper, for pictures of a busy card. */
struct sim_ghost {
    uint32_t live;
    int32_t pid;
    uint32_t card;
    uint32_t percent;
    uint64_t bytes;
    char name[96];
};

struct sim_state {
    uint64_t magic;
    uint64_t layout_bytes;
    uint32_t layout_version;
    uint32_t card_count;
    uint32_t cuda_version;    /* 10010 for 10.1 */
    uint32_t process_high;    /* slots ever used: [0, process_high) */
    uint32_t driver_unloaded; /* 1: there is no kernel module just now */
    uint32_t accounting;      /* enum sim_accounting, chosen when the module was loaded */
    char driver_version[32];  /* of the kernel module */
    char nvml_version[32];
    uint64_t created_ns;        /* monotonic */
    uint64_t granularity_bytes; /* physical memory is handed out in these */
    uint64_t pool_chunk_bytes;  /* a pool reserves in these */
    _Atomic uint64_t lock;      /* 0, or the owner's number among all that ever attached */
    _Atomic uint64_t sequence;  /* odd while the accounts change */
    uint64_t recoveries;        /* locks taken over from the dead */
    uint64_t reaped;            /* slots of dead processes emptied */
    uint64_t pid_namespace;     /* the one in which the machine was made: the host's */
    _Atomic uint64_t attached;  /* how many ever mapped this file */
    _Atomic uint64_t exported;  /* descriptors ever made of memory */
    uint64_t exports;           /* records that belong to nobody */
    uint32_t record_high;       /* records ever used: [1, record_high) */
    uint32_t record_free;       /* head of the free list, 0 for none */
    uint32_t ghost_high;        /* ghosts ever made: [0, ghost_high) */
    uint32_t queue_high;        /* queues ever used: [0, queue_high) */
    uint32_t limit_high;        /* limits ever used: [0, limit_high) */
    uint32_t padding;
    char cgroup_root[SIM_PATH]; /* a folder that stands for /sys/fs/cgroup, see limits.c; "" for the kernel's own */
    _Atomic uint64_t event_count;
    struct sim_event events[SIM_EVENTS];
    struct sim_ghost ghosts[SIM_GHOSTS];
    struct sim_limit limits[SIM_LIMITS];
    struct sim_card cards[SIM_CARDS];
    struct sim_process processes[SIM_PROCESSES];
    struct sim_record records[SIM_RECORDS];
    struct sim_queue queues[SIM_QUEUES];
};

#endif
