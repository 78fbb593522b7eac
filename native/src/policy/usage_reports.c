#include "policy/usage_reports.h"

#include <stddef.h>
#include <string.h>

#include "accounts/slots.h"
#include "system/at_fork.h"
#include "system/elf.h"
#include "system/os.h"
#include "system/text.h"

/* ---- NVML ---- */

static uint32_t nvml_pid GS_PER_PROCESS; /* the PID by which NVML lists this process; 0: unknown */
static bool nvml_ready GS_PER_PROCESS;
static nvmlDevice_t devices[GPUSLICE_CARDS] GS_PER_PROCESS;
static bool leaving; /* the process is exiting: NVML may be gone, and is not called any more */

static uint32_t our_nvml_pid(void) { return __atomic_load_n(&nvml_pid, __ATOMIC_RELAXED); }

bool gs_nvml_pid_known(void) { return our_nvml_pid() != 0; }

static void leave(void *unused)
{
    (void)unused;
    __atomic_store_n(&leaving, true, __ATOMIC_RELAXED);
}

/* At exit the runtime unloads its modules one by one. Looked up by name: every libc has the function, but not every
 * header. */
static void notice_end(void)
{
    int (*at_exit)(void (*)(void *), void *, void *) =
        (int (*)(void (*)(void *), void *, void *))gs_elf_function("__cxa_atexit");
    if (at_exit)
        at_exit(leave, NULL, NULL);
}

/* NVML stays initialised for good: the program's own count of initialisations is not affected. Two threads may do this
 * at the same time. */
static bool is_ready(void)
{
    if (__atomic_load_n(&leaving, __ATOMIC_RELAXED) || !gs_driver_open_nvml())
        return false;
    bool ready = __atomic_load_n(&nvml_ready, __ATOMIC_ACQUIRE);
    if (!ready && DRIVER(nvmlInit_v2)() == NVML_SUCCESS) {
        ready = true;
        __atomic_store_n(&nvml_ready, true, __ATOMIC_RELEASE);
        notice_end();
    }
    return ready;
}

/* The program may shut NVML down more often than it initialised it, and thereby undo our initialisation. */
static bool is_shut(int result)
{
    if (result != NVML_ERROR_UNINITIALIZED)
        return false;
    for (uint32_t i = 0; i < GPUSLICE_CARDS; i++)
        __atomic_store_n(&devices[i], NULL, __ATOMIC_RELEASE);
    __atomic_store_n(&nvml_ready, false, __ATOMIC_RELEASE);
    return is_ready();
}

bool gs_open_device(const struct gs_card *card, nvmlDevice_t *device)
{
    if (!is_ready())
        return false;
    *device = __atomic_load_n(&devices[card->index], __ATOMIC_ACQUIRE);
    int result = *device ? NVML_SUCCESS : DRIVER(nvmlDeviceGetHandleByUUID)(card->uuid, device);
    if (is_shut(result))
        result = DRIVER(nvmlDeviceGetHandleByUUID)(card->uuid, device);
    if (result != NVML_SUCCESS)
        return false;
    __atomic_store_n(&devices[card->index], *device, __ATOMIC_RELEASE);
    return *device != NULL;
}

/* Asks NVML about the card, and once more if the program had shut it. */
#define ASK(card, device, call)                                                                                                \
    ({                                                                                                                         \
        nvmlDevice_t device;                                                                                                   \
        int result = gs_open_device(card, &device) ? (call) : NVML_ERROR_UNKNOWN;                                              \
        is_shut(result) && gs_open_device(card, &device) ? (call) : result;                                                    \
    })

/* Without NVML, as in a container without the utility libraries: the driver's own answer, once there is a context. */
static bool ask_driver(const struct gs_card *card, uint64_t *used)
{
    size_t free_bytes, total;
    CUdevice device;
    GS_RELAX_CAPTURE;
    bool known = DRIVER(cuCtxGetDevice)(&device) == CUDA_SUCCESS && gs_card_of_device(device) == card &&
                 DRIVER(cuMemGetInfo_v2)(&free_bytes, &total) == CUDA_SUCCESS;
    *used = known ? total - free_bytes : 0;
    return known;
}

bool gs_read_memory(const struct gs_card *card, uint64_t *used)
{
    nvmlMemory_t memory;
    if (ASK(card, device, DRIVER(nvmlDeviceGetMemoryInfo)(device, &memory)) != NVML_SUCCESS)
        return ask_driver(card, used);
    *used = memory.used;
    return true;
}

struct list {
    struct gs_processes processes;
    union {
        nvmlProcessInfo_v1_t first[GS_LISTED]; /* the only version that drivers before 450 have */
        nvmlProcessInfo_t second[GS_LISTED];
    };
};

/* The second version, not the third: drivers 535.43 to 535.86 write longer entries into the third. */
static int fill(nvmlDevice_t device, struct list *list)
{
    uint32_t count = GS_LISTED;
    int result = DRIVER(nvmlDeviceGetComputeRunningProcesses_v2)(device, &count, list->second);
    bool first = result == NVML_ERROR_FUNCTION_NOT_FOUND;
    if (first)
        result = DRIVER(nvmlDeviceGetComputeRunningProcesses)(device, &count, list->first);
    list->processes.count = result != NVML_SUCCESS ? 0 : count < GS_LISTED ? count : GS_LISTED;
    for (uint32_t i = 0; i < list->processes.count; i++) {
        uint64_t bytes = first ? list->first[i].usedGpuMemory : list->second[i].usedGpuMemory;
        list->processes.pids[i] = first ? list->first[i].pid : list->second[i].pid;
        list->processes.bytes[i] = bytes < GS_MOST_BYTES ? bytes : 0; /* "not available" is the highest number */
    }
    return result;
}

/* A driver without a figure looked for the wrong PID: a process with a context holds something. */
static uint64_t figure_of(const struct gs_processes *listed, uint32_t pid)
{
    for (uint32_t i = 0; pid && i < listed->count; i++)
        if (listed->pids[i] == pid && listed->bytes[i])
            return listed->bytes[i];
    return 0;
}

/* Not on the stack, which may be small in the program's thread, while NVML needs much. */
uint64_t gs_read_processes(const struct gs_card *card, struct gs_processes *listed)
{
    struct list *list = gs_map_private(sizeof *list);
    if (listed)
        listed->count = 0;
    if (!list)
        return 0;
    (void)ASK(card, device, fill(device, list));
    uint64_t figure = figure_of(&list->processes, our_nvml_pid());
    if (listed)
        memmove(listed, &list->processes, sizeof *listed);
    gs_unmap(list, sizeof *list);
    return figure;
}

bool gs_lists(const struct gs_processes *listed, uint32_t pid)
{
    for (uint32_t i = 0; i < listed->count; i++)
        if (listed->pids[i] == pid)
            return true;
    return false;
}

/* The only PID that is new, if it has a figure; otherwise 0. In a PID namespace a process may be in the list twice. */
static uint32_t the_new_one(const struct gs_processes *before, const struct gs_processes *after)
{
    uint32_t found = 0;
    for (uint32_t i = 0; i < after->count; i++) {
        if (gs_lists(before, after->pids[i]) || after->pids[i] == found)
            continue;
        if (found)
            return 0;
        found = after->pids[i];
        if (!after->bytes[i])
            return 0; /* this driver lists us, or somebody, and has no figures here */
    }
    return found;
}

/* In a PID namespace drivers differ: they list us by our own PID, by the host's, by our own without a figure, or not at
 * all. If our own PID was in the list before we had a context, it is a process of the host. */
uint64_t gs_learn_nvml_pid(const struct gs_processes *before, const struct gs_processes *after)
{
    uint32_t self = gs_pid(), found = the_new_one(before, after);
    if (gs_lists(after, self) && !gs_lists(before, self))
        found = figure_of(after, self) ? self : 0;
    if (found)
        __atomic_store_n(&nvml_pid, found, __ATOMIC_RELAXED);
    if (found && found != self)
        gs_accounts_set_host_pid(&gs_accounts, found);
    return figure_of(after, found);
}

/* Without an earlier list: takes our own PID, if it is listed with a figure. */
void gs_assume_nvml_pid(const struct gs_card *card)
{
    struct gs_processes listed;
    gs_read_processes(card, &listed);
    if (!our_nvml_pid() && figure_of(&listed, gs_pid()))
        __atomic_store_n(&nvml_pid, gs_pid(), __ATOMIC_RELAXED);
}

/* ---- the agent ---- */

#define READ_EVERY_NS UINT64_C(20000000)
#define STALE_NS UINT64_C(5000000000) /* the agent writes ten times in this period */
#define COARSE_NS UINT64_C(10000000)  /* by how much the times of changes may lag */
#define HEAD_BYTES offsetof(struct gpuslice_figures, of)

static char path[GS_PATH_ROOM];            /* "" before the start */
static struct gpuslice_figures buffers[2]; /* the last complete one, and the one that is read next */
static uint32_t current;
static uint64_t read_ns;
static struct gs_lock lock GS_PER_PROCESS;

void gs_figures_start(const char *prefix) { gs_text_join(path, sizeof path, prefix, "/etc/gpuslice/figures", ""); }

/* The agent writes the file in place, so a read may overlap a write: a file with a wrong checksum is read again next time. */
static bool is_whole(const struct gpuslice_figures *of, long bytes)
{
    size_t at = offsetof(struct gpuslice_figures, at_ns);
    if (bytes < (long)HEAD_BYTES || of->magic != GPUSLICE_FIGURES_MAGIC || of->count > GPUSLICE_FIGURES)
        return false;
    size_t expected = HEAD_BYTES + of->count * sizeof of->of[0];
    return (size_t)bytes >= expected && of->check == gs_hash(&of->at_ns, expected - at);
}

/* Under the lock. Times of another clock, as after a reboot, are stale or in the future. */
static bool are_fresh(void)
{
    uint64_t now = gs_monotonic_ns();
    if (*path && now - read_ns >= READ_EVERY_NS) {
        read_ns = now;
        struct gpuslice_figures *next = &buffers[!current];
        if (is_whole(next, gs_read_file(path, (char *)next, sizeof *next)))
            current = !current;
    }
    uint64_t at_ns = buffers[current].at_ns;
    return at_ns && at_ns <= now && now - at_ns < STALE_NS;
}

uint64_t gs_figures_at(void)
{
    GS_GUARD(&lock);
    return are_fresh() ? buffers[current].at_ns : 0;
}

/* Two processes in nested namespaces may have the same PID and start time: then neither is known. */
static uint32_t find(const struct gs_card *card, uint64_t pid, uint64_t start_time, struct gs_figure *figure)
{
    uint32_t found = 0;
    uint64_t key = gs_card_key(card->uuid);
    const struct gpuslice_figures *figures = &buffers[current];
    for (uint64_t i = 0; i < figures->count; i++) {
        const struct gpuslice_figure *of = &figures->of[i];
        if (of->card != key || of->pid != pid || of->start_time != start_time || of->bytes >= GS_MOST_BYTES)
            continue;
        *figure = (struct gs_figure){figures->at_ns, of->bytes};
        found++;
    }
    return found;
}

bool gs_figure_of(const struct gs_card *card, uint64_t pid, uint64_t start_time, struct gs_figure *figure)
{
    GS_GUARD(&lock);
    return are_fresh() && find(card, pid, start_time, figure) == 1;
}

bool gs_figures_are_after(uint64_t at_ns, uint64_t changed_ns) { return at_ns > changed_ns + COARSE_NS; }
