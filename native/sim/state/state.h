/* Access to the shared state, and the accounts kept in it. Linked into both libraries. */
#ifndef GPUSLICE_SIM_STATE_H
#define GPUSLICE_SIM_STATE_H

#include <stdbool.h>
#include <stddef.h>

#include "layout.h"

/* For what every call reads. A library that is loaded later may do so in glibc, which keeps some room for it; not in musl,
 * which knows glibc's macro not. */
#ifdef __GLIBC__
#define SIM_NEAR __attribute__((tls_model("initial-exec")))
#else
#define SIM_NEAR
#endif

/* The mapped state; NULL without GPUSLICE_SIM_STATE or with a file of another layout. */
struct sim_state *sim_attach(void);
struct sim_state *sim_state(void);
/* This process's slot, taken on first use; SIM_PROCESSES when the table is full. */
uint32_t sim_self(void);
/* The slot if there is one already, else SIM_PROCESSES. */
uint32_t sim_self_if_any(void);
void sim_forget_self(void);       /* in a forked child */
extern uint64_t sim_host_address; /* where this process has room for checkpoints; before the slot is taken */

void sim_lock(void);
void sim_unlock(void);
/* Under the lock: empties the slots of processes that are no more. */
void sim_reap(void);
void sim_reap_unless_done(uint64_t within_ns); /* so that the questions of one look at a card share one */
void sim_reap_now(void);                       /* takes the lock itself */
void sim_reap_sometimes(void);                 /* at most once a millisecond */

uint64_t sim_monotonic_ns(void);
uint64_t sim_realtime_us(void);
uint64_t sim_start_time(int32_t pid); /* field 22 of /proc/<pid>/stat; 0 for the dead */
int32_t sim_pid_here(uint32_t slot);  /* a process's number in this one's PID namespace, 0 where it has none */
bool sim_in_own_namespace(void);      /* not the one of the machine */

/* Accounts. A record index is never 0. */
uint32_t sim_charge(uint32_t card, enum sim_kind kind, uint64_t bytes, uint64_t address);
uint64_t sim_charge_up_to(uint32_t card, enum sim_kind kind, uint64_t bytes, uint64_t address, uint32_t *record);
void sim_release(uint32_t record);
void sim_release_locked(uint32_t record);
uint32_t sim_import(uint32_t target, uint32_t generation);
bool sim_grow(uint32_t record, uint64_t bytes); /* makes it larger by so much */
bool sim_is_imported(uint32_t record);          /* somebody else has it open, or it is somebody else's */
/* Exported descriptors: the memory lives while one is open anywhere. */
struct sim_kept {
    uint32_t record, generation; /* nobody's, and of one that outlives all others */
};
struct sim_kept sim_keep(uint32_t target, uint64_t number);
int sim_export(uint32_t target, const void *content, size_t bytes); /* a descriptor, -1 on failure */
bool sim_exported(int file, struct sim_kept *kept, void *content, size_t bytes);
uint64_t sim_round(uint64_t bytes);       /* up to the physical granularity */
uint64_t sim_used_bytes(uint32_t card);   /* by all processes and ghosts, without idle_bytes; MIG devices included */
uint64_t sim_free_bytes(uint32_t card);   /* what an allocation could still get */
uint64_t sim_usable_bytes(uint32_t card); /* total less the driver's reserve */
/* Under the lock: a process's memory leaves its cards, and comes back as far as there is room for all of it. */
bool sim_park(uint32_t process);
bool sim_unpark(uint32_t process);
void sim_recover(void); /* under the lock: every sum again from the records */

/* Limits of cgroups. A cgroup's number is that of its folder, so it is the same seen from any namespace. */
bool sim_cgroup_at(const char *path, uint64_t chain[SIM_CGROUPS]); /* it and those above it; false: it is no cgroup */
bool sim_cgroup_has_dmem(const char *path);                        /* the one above passes the controller on */
void sim_cgroups_of(int32_t pid, uint64_t chain[SIM_CGROUPS]);     /* of a process of this machine; all 0: of none */
const uint64_t *sim_cgroups_here(void);                            /* this process's, looked up once */
struct sim_limit *sim_limit_of(uint64_t cgroup, uint32_t card);    /* NULL for none */
struct sim_limit *sim_limit_for(uint64_t cgroup, uint32_t card, const char *path); /* made if need be; NULL: no room */
void sim_drop_limits_of_the_gone(void);
uint64_t sim_cgroup_bytes(uint64_t cgroup, uint32_t card); /* what processes in it hold, managed memory left out */
/* Of a card, what cgroups leave to a process of these: the hard limit that it is shown, and what it could still get. */
struct sim_allowance {
    uint64_t shown, left;
};
struct sim_allowance sim_allowance(const uint64_t chain[SIM_CGROUPS], uint32_t card);

/* Engine. A mark stands for a piece of work of this process; 0 for nothing, which is finished. */
void sim_engine_advance(uint32_t card, uint64_t now_ns); /* under the lock */
void sim_engine_forget(uint32_t process);                /* under the lock: its queues end with it */
/* `width` of SIM_WHOLE_CARD; streams with the same connection modulo SIM_CONNECTIONS wait for each other. */
uint64_t sim_engine_work(uint32_t card, uint32_t connection, uint32_t stream, uint64_t duration_ns, uint32_t width);
uint64_t sim_engine_await(uint32_t card, uint32_t connection, uint64_t awaited); /* 0 where it is finished already */
uint64_t sim_engine_hold(uint32_t card, uint32_t connection);                    /* holds the queue up until it is let go */
bool sim_engine_is_turn_of(uint64_t held);                                       /* everything before it is finished */
void sim_engine_let_go(uint64_t held);
bool sim_engine_reached(uint64_t mark);
bool sim_engine_follows(uint64_t mark, uint64_t other); /* the first is not reached before the other, by queues and waits */
void sim_engine_wait(uint64_t mark);
void sim_engine_seal(uint64_t mark);     /* its end will be asked for: work that follows does not count */
uint64_t sim_engine_time(uint64_t mark); /* when it was finished; 0: not yet, or forgotten */

/* Which cards this process sees, in order; indices into state->cards. */
struct sim_view {
    uint32_t count;
    uint32_t cards[SIM_CARDS];
    bool contained; /* NVIDIA_VISIBLE_DEVICES is set */
};
void sim_view_of_machine(struct sim_view *view); /* by NVIDIA_VISIBLE_DEVICES: what NVML shows */
void sim_view_of_cuda(struct sim_view *view);    /* and by CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER */
enum sim_launch { SIM_LAUNCH_LEGACY, SIM_LAUNCH_PER_THREAD, SIM_LAUNCH_GRAPH };
void sim_count_launch(enum sim_launch how);
bool sim_hides_processes(void); /* a PID namespace hides the host's processes */

#endif
