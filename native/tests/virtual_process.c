/* Everything that throttle.c calls but the driver, in virtual time: clocks, sleeping, the region, the neighbours' claims, NVML.
 * Each process has a copy of its own of libthrottle.so, which holds the library's code (tests/virtual_launch.c).
 *
 * A call into the library runs as a coroutine, so that any number of threads of any number of processes can be in the middle
 * of one. It comes back whenever it sleeps, asks NVML or calls the driver to launch; in a process that is interleaved,
 * wherever another thread or process could get in between, too. Who is never resumed was killed there. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <ucontext.h>
#include <fcntl.h>
#include <unistd.h>

#include "accounts/slots.h"
#include "card_model.h"
#include "policy/neighbours.h"
#include "policy/samples.h"
#include "virtual_process.h"

#define NEIGHBOURS 8
#define MEMBERS 8
#define STACK_BYTES (64u << 10)
#define COARSE_NS 4000000u /* a tick of most kernels */
#define LOOKS_AGAIN_NS 1000u

/* What the processes of a container share. */
struct container {
    struct gpuslice_region *region;
    struct gs_card card;
    struct gpuslice_claim claim;
    bool torn;                         /* the claim is only written in part */
    struct container *met[NEIGHBOURS]; /* containers that tell each other what they want, this one among them */
    uint32_t met_count;                /* 0: it tells nobody */
    struct process *members[MEMBERS];
    uint32_t member_count;
};

struct process {
    struct container *box;
    struct card *card;
    uint32_t number; /* on the card */
    bool interleaved, dead;
    struct gpuslice_slot *slot;
    struct gpuslice_claim heard[NEIGHBOURS]; /* as last read whole */
    int file;
    void *library;
};

struct call {
    struct process *process;
    struct virtual_call what;
    enum stop stop;
    uint64_t sleep_ns;
    struct gs_share_sample sample;
    bool timed, cleared;
    ucontext_t inside, outside;
    struct call *next_free;
    char stack[STACK_BYTES];
};

static struct process *acting;
static struct call *current; /* NULL: nobody may stop */
static struct call *free_calls;

static void *need(void *found)
{
    if (!found)
        abort();
    return found;
}

/* ---- coroutines ---- */

void virtual_stop(enum stop why)
{
    if (!current)
        return;
    struct call *call = current;
    call->stop = why;
    swapcontext(&call->inside, &call->outside);
}

void virtual_step(void)
{
    if (acting->interleaved)
        virtual_stop(STEPS);
}

static void run(void)
{
    struct call *call = current;
    *(void **)&call->what.enter = need(dlsym(call->process->library, call->what.name));
    call->what.enter(&call->what);
    call->stop = RETURNS;
}

struct call *process_call(struct process *process, const char *name, uint64_t key, uint32_t stream, double own_ns)
{
    struct call *call = free_calls;
    free_calls = call ? call->next_free : NULL;
    call = call ? call : need(malloc(sizeof *call));
    call->process = process;
    call->what =
        (struct virtual_call){.name = name, .card = &process->box->card, .key = key, .stream = stream, .own_ns = own_ns};
    call->timed = call->cleared = false;
    getcontext(&call->inside);
    call->inside.uc_stack = (stack_t){.ss_sp = call->stack, .ss_size = STACK_BYTES};
    call->inside.uc_link = &call->outside;
    makecontext(&call->inside, run, 0);
    return call;
}

enum stop call_resume(struct call *call, uint64_t *sleep_ns)
{
    current = call;
    acting = call->process;
    swapcontext(&call->outside, &call->inside);
    current = NULL;
    *sleep_ns = call->sleep_ns;
    return call->stop;
}

void call_free(struct call *call)
{
    call->next_free = free_calls;
    free_calls = call;
}

void call_answer(struct call *call, int32_t own_percent, int32_t others_percent, uint32_t listed)
{
    call->sample.own_percent = own_percent;
    call->sample.others_percent = others_percent;
    call->sample.listed = listed;
}

bool call_timed(const struct call *call) { return call->timed; }
bool call_cleared(const struct call *call) { return call->cleared; }
void virtual_is_timed(void) { current->timed = true; }
void virtual_is_cleared(void) { current->cleared = true; }

struct card *virtual_card(void) { return acting->card; }
uint32_t virtual_number(void) { return acting->number; }

/* ---- containers and processes ---- */

struct container *container_new(uint32_t weight, uint32_t cap, bool interactive)
{
    struct container *box = need(calloc(1, sizeof *box));
    box->region = need(calloc(1, sizeof *box->region));
    box->card = (struct gs_card){.share = {weight, cap, interactive}, .uuid = "GPU"};
    return box;
}

void container_free(struct container *box)
{
    for (uint32_t i = 0; i < box->member_count; i++) {
        dlclose(box->members[i]->library);
        close(box->members[i]->file);
        free(box->members[i]);
    }
    free(box->region);
    free(box);
}

void container_meet(struct container *box, struct container *other)
{
    if (box->met_count == NEIGHBOURS)
        abort();
    box->met[box->met_count++] = other;
}

struct gpuslice_card *container_entry(const struct container *box) { return &box->region->cards[0]; }

/* A copy of libthrottle.so, which is beside this library: the loader takes two files for two libraries. */
static void load(struct process *process)
{
    char path[PATH_MAX], *slash;
    Dl_info here;
    struct stat size;
    if (!dladdr((void *)load, &here) || strlen(here.dli_fname) + 16 > sizeof path)
        abort();
    strcpy(path, here.dli_fname);
    slash = strrchr(path, '/');
    strcpy(slash ? slash + 1 : path, "libthrottle.so");
    int from = open(path, O_RDONLY | O_CLOEXEC);
    process->file = memfd_create("throttle", MFD_CLOEXEC);
    if (from < 0 || process->file < 0 || fstat(from, &size) ||
        sendfile(process->file, from, NULL, (size_t)size.st_size) != size.st_size)
        abort();
    close(from);
    snprintf(path, sizeof path, "/proc/self/fd/%d", process->file);
    process->library = need(dlopen(path, RTLD_NOW | RTLD_LOCAL));
}

struct process *process_new(struct container *box, struct card *card, uint32_t number, bool interleaved)
{
    struct process *process = need(calloc(1, sizeof *process));
    if (box->member_count == MEMBERS)
        abort();
    *process = (struct process){.box = box, .card = card, .number = number, .slot = &box->region->slots[box->member_count]};
    box->members[box->member_count++] = process;
    atomic_store(&process->slot->owner, box->member_count);
    load(process);
    acting = process;
    ((void (*)(const char *))need(dlsym(process->library, "gs_throttle_start")))("");
    ((void (*)(struct gs_card *))need(dlsym(process->library, "gs_throttle_meet")))(&box->card);
    process->interleaved = interleaved;
    return process;
}

void process_die(struct process *process) { process->dead = true; }

void process_claim(struct process *process, uint64_t ns, bool waits, uint64_t virtual_ns, uint64_t weight)
{
    struct container *box = process->box;
    uint64_t now = (uint64_t)card_now(process->card);
    box->claim = gs_claim(container_entry(box), &box->card.share, now, (struct gs_under_way){.ns = ns}, waits);
    box->claim.virtual_ns = virtual_ns;
    box->claim.weight = weight;
}

uint64_t container_under_way_ns(const struct container *box)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < box->member_count; i++)
        sum += atomic_load(&box->members[i]->slot->usage[0].in_flight_ns);
    return sum;
}

/* ---- time ---- */

static uint64_t now_ns(void) { return (uint64_t)card_now(acting->card); }

uint64_t gs_monotonic_ns(void)
{
    virtual_step();
    return now_ns();
}

uint64_t gs_realtime_us(void) { return now_ns() / 1000; }

uint64_t gs_coarse_ns(void)
{
    virtual_step();
    return now_ns() / COARSE_NS * COARSE_NS;
}

void gs_sleep_ns(uint64_t ns)
{
    if (!current)
        abort();
    current->sleep_ns = ns;
    virtual_stop(SLEEPS);
}

_Thread_local unsigned gs_locks __attribute__((tls_model("initial-exec")));

void gs_lock_awaited(struct gs_lock *lock)
{
    while (atomic_exchange(&lock->state, 2))
        gs_sleep_ns(LOOKS_AGAIN_NS);
}

void gs_lock_passed_on(struct gs_lock *lock) { (void)lock; }

/* ---- the region ---- */

struct gs_accounts gs_accounts; /* only its address means something */

struct gs_attachment gs_accounts_at(const struct gs_accounts *accounts)
{
    (void)accounts;
    virtual_step();
    return (struct gs_attachment){.region = acting->box->region, .slot = acting->slot};
}

uint64_t gs_slots_high(const struct gpuslice_region *region, const struct gpuslice_slot *mine)
{
    (void)region, (void)mine;
    return acting->box->member_count;
}

uint64_t gs_accounts_look(struct gs_accounts *accounts)
{
    (void)accounts;
    return gs_coarse_ns();
}

bool gs_accounts_sweep(struct gs_accounts *accounts)
{
    (void)accounts;
    struct container *box = acting->box;
    for (uint32_t i = 0; i < box->member_count; i++) {
        struct gpuslice_slot *slot = box->members[i]->slot;
        if (!box->members[i]->dead || !atomic_load(&slot->owner))
            continue;
        atomic_store(&slot->usage[0].in_flight_ns, 0);
        atomic_store(&slot->usage[0].unknown, 0);
        virtual_step();
        atomic_store(&slot->owner, 0);
    }
    return false;
}

uint32_t gs_card_count(void) { return 1; }

struct gs_card *gs_card_at(uint32_t position)
{
    (void)position;
    return &acting->box->card;
}

/* ---- claims ---- */

void gs_neighbours_start(struct gs_neighbours *neighbours, const char *prefix, const char *uuid)
{
    (void)prefix, (void)uuid;
    memset(neighbours, 0, sizeof *neighbours);
    neighbours->folder[0] = acting->box->met_count ? '/' : 0;
}

void gs_neighbours_tell(struct gs_neighbours *neighbours, struct gpuslice_claim *claim)
{
    if (!*neighbours->folder)
        return;
    acting->box->torn = true;
    virtual_step();
    acting->box->claim = *claim;
    acting->box->torn = false;
    virtual_step();
}

uint32_t gs_neighbours_read(struct gs_neighbours *neighbours, uint64_t now, uint64_t list_every_ns,
                            struct gs_neighbour found[GS_NEIGHBOURS])
{
    (void)neighbours, (void)list_every_ns;
    struct process *reader = acting;
    uint32_t count = 0;
    virtual_step();
    for (uint32_t i = 0; i < reader->box->met_count; i++) {
        const struct container *other = reader->box->met[i];
        if (other == reader->box)
            continue;
        if (!other->torn)
            reader->heard[i] = other->claim;
        if (!reader->heard[i].magic)
            continue;
        found[count] = gs_heard(&reader->heard[i], now);
        found[count++].name = i + 1;
    }
    return count;
}

/* ---- NVML ---- */

void gs_samples_begin(const struct gs_card *card) { (void)card; }

bool gs_sample(const struct gs_card *card, const struct gs_activity *activity, bool whole, struct gs_share_sample *sum)
{
    (void)card, (void)activity, (void)whole;
    int32_t percents[PROCESSES];
    uint64_t until_us = card_sample(acting->card, percents) / 1000;
    if (!until_us || until_us == atomic_load(&container_entry(acting->box)->sampled_us))
        return false;
    virtual_stop(SAMPLES);
    *sum = current->sample;
    sum->until_us = until_us;
    return true;
}
