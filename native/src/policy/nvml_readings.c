/* What NVML reports about a card, and by which PID it lists this process. */
#include "policy/nvml_readings.h"

#include <string.h>

#include "accounts/slots.h"
#include "policy/cards.h"
#include "system/at_fork.h"
#include "system/elf.h"
#include "system/os.h"

static uint32_t nvml_pid; /* the PID by which NVML lists this process; 0: unknown */
static bool nvml_ready;
static bool leaving; /* the process is exiting: NVML may be gone, and is not called any more */
static nvmlDevice_t devices[GPUSLICE_CARDS];

static void forget(void)
{
    nvml_pid = 0;
    nvml_ready = false;
    memset(devices, 0, sizeof devices);
}
GS_AT_FORK(forget);

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

static void add_entry(struct reading *reading, uint32_t pid, uint64_t bytes)
{
    uint64_t figure = bytes < GS_MOST_BYTES ? bytes : 0; /* NVML reports "not available" as the highest number */
    reading->pids[reading->count] = pid;
    reading->bytes[reading->count++] = figure;
}

union list {
    nvmlProcessInfo_v1_t first[GS_LISTED]; /* the only version that drivers before 450 have */
    nvmlProcessInfo_t second[GS_LISTED];
};

/* The second version, not the third: drivers 535.43 to 535.86 write longer entries into the third. */
static int fill_list(nvmlDevice_t device, struct reading *reading, union list *list)
{
    uint32_t count = GS_LISTED;
    int result = DRIVER(nvmlDeviceGetComputeRunningProcesses_v2)(device, &count, list->second);
    bool first = result == NVML_ERROR_FUNCTION_NOT_FOUND;
    if (first)
        result = DRIVER(nvmlDeviceGetComputeRunningProcesses)(device, &count, list->first);
    for (uint32_t i = 0; result == NVML_SUCCESS && i < count && i < GS_LISTED; i++)
        add_entry(reading, first ? list->first[i].pid : list->second[i].pid,
                  first ? list->first[i].usedGpuMemory : list->second[i].usedGpuMemory);
    return result;
}

/* Not on the stack, which may be small in the program's thread, while NVML needs much. */
static int read_list(nvmlDevice_t device, struct reading *reading)
{
    union list *list = gs_map_private(sizeof *list);
    if (!list)
        return NVML_ERROR_UNKNOWN;
    int result = fill_list(device, reading, list);
    gs_unmap(list, sizeof *list);
    return result;
}

static uint64_t figure_of(const struct reading *reading, uint32_t pid)
{
    for (uint32_t i = 0; i < reading->count; i++)
        if (reading->pids[i] == pid && reading->bytes[i])
            return reading->bytes[i];
    return 0;
}

/* A driver without a figure looked for the wrong PID: a process with a context holds something. */
void gs_read_processes(const struct process_usage *own, struct reading *reading)
{
    nvmlDevice_t device;
    reading->count = 0;
    if (gs_open_device(own->card, &device) && is_shut(read_list(device, reading)) && gs_open_device(own->card, &device))
        read_list(device, reading);
    uint32_t self = our_nvml_pid();
    reading->mine = self ? figure_of(reading, self) : 0;
    reading->listed = reading->mine > 0;
}

/* Without NVML, as in a container without the utility libraries: the driver's own answer, once there is a context. */
static void ask_driver(const struct process_usage *own, struct reading *reading)
{
    size_t free_bytes, total;
    CUdevice device;
    int mode = gs_relax_capture();
    reading->known = DRIVER(cuCtxGetDevice)(&device) == CUDA_SUCCESS && gs_card_of_device(device) == own->card &&
                     DRIVER(cuMemGetInfo_v2)(&free_bytes, &total) == CUDA_SUCCESS;
    if (reading->known)
        reading->device_used = total - free_bytes;
    gs_restore_capture(mode);
}

void gs_read_memory(const struct process_usage *own, struct reading *reading)
{
    nvmlDevice_t device;
    nvmlMemory_t memory;
    int result = gs_open_device(own->card, &device) ? DRIVER(nvmlDeviceGetMemoryInfo)(device, &memory) : NVML_ERROR_UNKNOWN;
    if (is_shut(result) && gs_open_device(own->card, &device))
        result = DRIVER(nvmlDeviceGetMemoryInfo)(device, &memory);
    reading->known = result == NVML_SUCCESS;
    if (reading->known)
        reading->device_used = memory.used;
    else
        ask_driver(own, reading);
}

bool gs_reading_lists(const struct reading *reading, uint32_t pid)
{
    for (uint32_t i = 0; i < reading->count; i++)
        if (reading->pids[i] == pid)
            return true;
    return false;
}

/* The only PID that is new, if it has a figure; otherwise 0. In a PID namespace a process may be in the list twice. */
static uint32_t the_new_one(const struct reading *before, const struct reading *after)
{
    uint32_t found = 0;
    for (uint32_t i = 0; i < after->count; i++) {
        if (gs_reading_lists(before, after->pids[i]) || after->pids[i] == found)
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
static uint32_t number_of_ours(const struct reading *before, const struct reading *after)
{
    uint32_t self = gs_pid();
    if (gs_reading_lists(after, self) && !gs_reading_lists(before, self))
        return figure_of(after, self) ? self : 0;
    return the_new_one(before, after);
}

void gs_learn_nvml_pid(struct process_usage *own, const struct reading *before, struct reading *after)
{
    uint32_t found = our_nvml_pid() || own->contexts || !before->known ? 0 : number_of_ours(before, after);
    if (!found)
        return;
    __atomic_store_n(&nvml_pid, found, __ATOMIC_RELAXED);
    if (found != gs_pid())
        gs_accounts_set_host_pid(&gs_accounts, found);
    gs_read_processes(own, after);
}

/* Without an earlier reading: takes our own PID, if it is listed with a figure. */
void gs_assume_nvml_pid(struct process_usage *own)
{
    struct reading reading = {0};
    gs_read_processes(own, &reading);
    if (!our_nvml_pid() && figure_of(&reading, gs_pid()))
        __atomic_store_n(&nvml_pid, gs_pid(), __ATOMIC_RELAXED);
}
