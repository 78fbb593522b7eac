/* Memory of a card and what its processes hold of it. */

#include <stdlib.h>
#include <string.h>

#include "nvml.h"

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
    struct place place;
    TRY(place_of(device, &place));
    if (!memory)
        return NVML_ERROR_INVALID_ARGUMENT;
    sim_reap_now();
    memory->total = place.card->total_bytes;
    memory->free = sim_free_bytes(place.index);
    memory->used = memory->total - memory->free; /* this form counts the driver's reserve as used */
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
    struct place place;
    TRY(place_of(device, &place));
    if (driver_major() < 510)
        return NVML_ERROR_FUNCTION_NOT_FOUND;
    if (!memory)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (memory->version != NVML_STRUCT_VERSION(nvmlMemory_v2_t, 2))
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    sim_reap_now();
    memory->total = place.card->total_bytes;
    memory->reserved = place.card->reserved_bytes;
    memory->free = sim_free_bytes(place.index);
    memory->used = memory->total - memory->reserved - memory->free;
    struct sim_allowance allowed = sim_allowance(sim_cgroups_here(), place.index);
    if (allowed.shown < memory->total) { /* of a process in a cgroup with a limit the reserve is none of its business */
        memory->total = allowed.shown;
        memory->reserved = 0;
        memory->used = allowed.shown - (allowed.left < allowed.shown ? allowed.left : allowed.shown);
        memory->free = allowed.left < memory->free ? allowed.left : memory->free;
    }
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetBAR1MemoryInfo(nvmlDevice_t device, nvmlBAR1Memory_t *memory)
{
    struct place place;
    TRY(place_of(device, &place));
    if (!memory)
        return NVML_ERROR_INVALID_ARGUMENT;
    memory->total = place.whole->bar1_bytes;
    memory->used = 2 * MIB;
    memory->free = memory->total - memory->used;
    return NVML_SUCCESS;
}

/* ----------------------------------------------------------------------------------------- processes */

struct found_process {
    unsigned pid;
    uint64_t used;
    uint32_t card;
};

static bool is_on(uint32_t card, uint32_t wanted)
{
    return card == wanted || sim_state()->cards[card].parent == (int32_t)wanted;
}

/* Managed memory is nvidia-uvm's, which takes it in its own name: it is in no process's figure, as an H100 showed. */
static uint64_t held(const struct sim_process *process, uint32_t card)
{
    uint64_t bytes = 0;
    for (uint32_t kind = 0; kind < SIM_KINDS; kind++)
        bytes += kind == SIM_MANAGED ? 0 : process->used_bytes[card][kind];
    return bytes;
}

static unsigned add_ghosts(uint32_t wanted, struct found_process *found, unsigned room)
{
    const struct sim_state *state = sim_state();
    unsigned count = 0;
    for (uint32_t i = 0; i < state->ghost_high && count < room; i++)
        if (state->ghosts[i].live && is_on(state->ghosts[i].card, wanted))
            found[count++] =
                (struct found_process){(unsigned)state->ghosts[i].pid, state->ghosts[i].bytes, state->ghosts[i].card};
    return count;
}

/* How the open kernel modules find processes and their figures for a caller in a PID namespace of its own (gpu_rmapi.c,
 * gpuGetProcWithObject and gpuFindClientInfoWithPidIterator, release by release). The host sees everything always. */
enum namespaces {
    HOST_NUMBERS,   /* before 535.113: the host's numbers, for everybody */
    WITHOUT_FIGURE, /* to 560: those of the namespace; the figure was looked for under the wrong number */
    WITH_FIGURE     /* from 565 on */
};

static enum namespaces namespaces(void)
{
    const char *point = strchr(sim_state()->driver_version, '.');
    unsigned long release = driver_major() * 1000UL + (point ? strtoul(point + 1, NULL, 10) : 0);
    return release < 535113 ? HOST_NUMBERS : release < 565000 ? WITHOUT_FIGURE : WITH_FIGURE;
}

/* 1 if the caller is told of it. */
static unsigned add_process(uint32_t slot, uint32_t card, struct found_process *found)
{
    const struct sim_process *process = &sim_state()->processes[slot];
    bool inside = sim_in_own_namespace();
    int32_t pid = inside && namespaces() == HOST_NUMBERS ? process->pid : sim_pid_here(slot);
    uint64_t bytes = inside && namespaces() == WITHOUT_FIGURE ? 0 : held(process, card);
    *found = (struct found_process){(unsigned)pid, bytes, card};
    return pid != 0;
}

/* Processes with a context on the card or on a MIG device of it, in the order they came. */
static unsigned find_processes(uint32_t wanted, struct found_process *found, unsigned room)
{
    const struct sim_state *state = sim_state();
    unsigned count = add_ghosts(wanted, found, room);
    sim_lock();
    sim_reap_unless_done(200000);
    for (uint32_t slot = 0; slot < state->process_high; slot++)
        for (uint32_t card = 0; card < state->card_count && count < room; card++) {
            const struct sim_process *process = &state->processes[slot];
            if (process->live && process->context_count[card] && is_on(card, wanted))
                count += add_process(slot, card, &found[count]);
        }
    sim_unlock();
    return count;
}

#define MOST_PROCESSES (SIM_PROCESSES + SIM_GHOSTS)

/* The same by order, where no namespace is made: by the environment. "unknown": no figure for anybody, as under WSL. */
enum figures { FULL, NO_FIGURE, UNKNOWN_FIGURE, FOREIGN_NUMBERS, TWICE };
#define NOT_AVAILABLE UINT64_MAX

static enum figures figures(void)
{
    static const char *const names[] = {"full", "none", "unknown", "foreign", "twice"};
    const char *wanted = getenv("GPUSLICE_SIM_PROCESS_FIGURES");
    for (unsigned i = 0; wanted && i < sizeof names / sizeof *names; i++)
        if (strcmp(wanted, names[i]) == 0)
            return (enum figures)i;
    return FULL;
}

static unsigned disguise(struct found_process *found, unsigned count)
{
    unsigned given = count;
    for (unsigned i = 0; i < count; i++)
        switch (figures()) {
        case NO_FIGURE: found[i].used = 0; break;
        case UNKNOWN_FIGURE: found[i].used = NOT_AVAILABLE; break;
        case FOREIGN_NUMBERS: /* so that ours may be somebody else's */ found[i].pid += 1; break;
        case TWICE: /* a process with two clients of the kernel's */
            if (given < MOST_PROCESSES)
                found[given++] = found[i];
            break;
        case FULL: break;
        }
    return given;
}

static nvmlReturn_t list(nvmlDevice_t device, unsigned *count, struct found_process *found)
{
    struct place place;
    TRY(place_of(device, &place));
    if (!count)
        return NVML_ERROR_INVALID_ARGUMENT;
    unsigned room = *count;
    bool hidden = sim_hides_processes() && !getenv("GPUSLICE_SIM_PROCESS_FIGURES");
    *count = hidden ? 0 : disguise(found, find_processes(place.index, found, MOST_PROCESSES));
    return *count > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

static void instances_of(uint32_t card, unsigned *gpu, unsigned *compute)
{
    const struct sim_card *it = &sim_state()->cards[card];
    *gpu = it->parent >= 0 ? it->gpu_instance : ~0u;
    *compute = it->parent >= 0 ? it->compute_instance : ~0u;
}

EXPORT nvmlReturn_t nvmlDeviceGetComputeRunningProcesses(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_v1_t *infos)
{
    struct found_process found[MOST_PROCESSES];
    TRY(list(device, count, found));
    for (unsigned i = 0; infos && i < *count; i++)
        infos[i] = (nvmlProcessInfo_v1_t){found[i].pid, found[i].used};
    return NVML_SUCCESS;
}

/* Entries follow each other every `step` bytes. */
static nvmlReturn_t list_every(nvmlDevice_t device, unsigned *count, void *infos, size_t step)
{
    struct found_process found[MOST_PROCESSES];
    TRY(list(device, count, found));
    for (unsigned i = 0; infos && i < *count; i++) {
        nvmlProcessInfo_v2_t info = {.pid = found[i].pid, .used = found[i].used};
        instances_of(found[i].card, &info.gpu_instance, &info.compute_instance);
        memset((char *)infos + i * step, 0, step);
        memcpy((char *)infos + i * step, &info, sizeof info);
    }
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_v2_t *infos)
{
    if (driver_major() < 450)
        return NVML_ERROR_FUNCTION_NOT_FOUND;
    return list_every(device, count, infos, sizeof *infos);
}

/* 535.43 to 535.86 had one more word in each entry, under the same name. */
EXPORT nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_v2_t *infos)
{
    const char *point = strchr(sim_state()->driver_version, '.');
    unsigned long branch = point ? strtoul(point + 1, NULL, 10) : 0;
    bool longer = driver_major() == 535 && branch >= 43 && branch <= 86;
    if (driver_major() < 510)
        return NVML_ERROR_FUNCTION_NOT_FOUND;
    return list_every(device, count, infos, sizeof *infos + (longer ? sizeof(unsigned long long) : 0));
}

/* Nothing draws and nothing runs under MPS here. */
static nvmlReturn_t none(nvmlDevice_t device, unsigned *count)
{
    struct place place;
    TRY(place_of(device, &place));
    if (!count)
        return NVML_ERROR_INVALID_ARGUMENT;
    *count = 0;
    return NVML_SUCCESS;
}

#define NO_PROCESSES(name)                                                                                                     \
    EXPORT nvmlReturn_t name(nvmlDevice_t device, unsigned *count, void *infos)                                                \
    {                                                                                                                          \
        (void)infos;                                                                                                           \
        return none(device, count);                                                                                            \
    }
NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses)
NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v2)
NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3)
NO_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses)
NO_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v2)
NO_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v3)
