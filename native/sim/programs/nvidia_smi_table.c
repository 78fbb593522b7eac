/* The table as drivers of the 418 branch print it, and from 450 on with its columns for MIG. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "nvidia_smi.h"

#define RULE "+-----------------------------------------------------------------------------+\n"
#define DOUBLE "|=============================================================================|\n"
#define CARD_RULE "+-------------------------------+----------------------+----------------------+\n"

struct row {
    unsigned index;
    nvmlDevice_t device;
};

static bool knows_mig(void) { return driver_major() >= 450; }

/* As date prints it; SOURCE_DATE_EPOCH makes it repeatable. */
static void print_time(void)
{
    char text[64];
    const char *fixed = getenv("SOURCE_DATE_EPOCH");
    time_t now = fixed ? (time_t)strtoll(fixed, NULL, 10) : time(NULL);
    strftime(text, sizeof text, "%a %b %e %H:%M:%S %Y", fixed ? gmtime(&now) : localtime(&now));
    printf("%s\n", text);
}

static void print_head(void)
{
    char driver[80] = "N/A", cuda[32];
    int version = 0;
    (void)ASK(SystemGetDriverVersion, driver, sizeof driver);
    (void)ASK(SystemGetCudaDriverVersion_v2, &version);
    snprintf(cuda, sizeof cuda, "%d.%d", version / 1000, version % 1000 / 10);
    print_time();
    printf(RULE "| NVIDIA-SMI %-12s Driver Version: %-12s CUDA Version: %-8s |\n", driver, driver, cuda);
    printf("|-------------------------------+----------------------+----------------------+\n"
           "| GPU  Name        Persistence-M| Bus-Id        Disp.A | Volatile Uncorr. ECC |\n"
           "| Fan  Temp  Perf  Pwr:Usage/Cap|         Memory-Usage | GPU-Util  Compute M. |\n");
    if (knows_mig())
        printf("|                               |                      |               MIG M. |\n");
    printf("|===============================+======================+======================|\n");
}

/* "37C", or "N/A" when the card does not say. */
static void text_or_absent(char *text, size_t length, int result, const char *format, unsigned value)
{
    if (result == NVML_SUCCESS)
        snprintf(text, length, format, value);
    else
        snprintf(text, length, "N/A");
}

#define TEXT(name, format, call, ...)                                                                                          \
    char name[32];                                                                                                             \
    unsigned name##_value = 0;                                                                                                 \
    int name##_result = ASK(call, __VA_ARGS__, &name##_value);                                                                 \
    text_or_absent(name, sizeof name, name##_result, format, name##_value)

static void shorten(char *text, size_t width)
{
    if (strlen(text) > width)
        strcpy(text + width - 3, "...");
}

static const char *on_off(int result, unsigned value) { return result != NVML_SUCCESS ? "N/A" : value ? "On" : "Off"; }

static void print_first_line(const struct row *row)
{
    char name[96] = "N/A", ecc[32] = "N/A";
    unsigned persistence = 0, display = 0;
    unsigned long long errors = 0;
    nvmlPciInfo_t pci = {0};
    (void)ASK(DeviceGetName, row->device, name, sizeof name);
    (void)ASK(DeviceGetPciInfo_v3, row->device, &pci);
    shorten(name, 18);
    int persistent = ASK(DeviceGetPersistenceMode, row->device, &persistence);
    int displays = ASK(DeviceGetDisplayActive, row->device, &display);
    if (ASK(DeviceGetTotalEccErrors, row->device, 1, 0, &errors) == NVML_SUCCESS)
        snprintf(ecc, sizeof ecc, "%llu", errors);
    printf("|%4u  %-18s  %-4s | %-16s %3s |%21s |\n", row->index, name, on_off(persistent, persistence), pci.bus_id,
           on_off(displays, display), ecc);
}

static const char *compute_mode(nvmlDevice_t device)
{
    static const char *const names[] = {"Default", "E. Thread", "Prohibited", "E. Process"};
    unsigned mode = 0;
    if (ASK(DeviceGetComputeMode, device, &mode) != NVML_SUCCESS || mode > 3)
        return "N/A";
    return names[mode];
}

static void watts(char *text, size_t length, int result, const unsigned *milliwatts)
{
    text_or_absent(text, length, result, "%uW", (*milliwatts + 500) / 1000);
}

static void print_second_line(const struct row *row)
{
    char power[32], limit[32], memory_text[64] = "N/A", busy[32];
    unsigned power_mw = 0, limit_mw = 0;
    nvmlUtilization_t rates = {0};
    struct memory memory;
    TEXT(fan, "%u%%", DeviceGetFanSpeed, row->device);
    TEXT(heat, "%uC", DeviceGetTemperature, row->device, 0);
    TEXT(state, "P%u", DeviceGetPerformanceState, row->device);
    watts(power, sizeof power, ASK(DeviceGetPowerUsage, row->device, &power_mw), &power_mw);
    watts(limit, sizeof limit, ASK(DeviceGetPowerManagementLimit, row->device, &limit_mw), &limit_mw);
    if (memory_of(row->device, &memory))
        snprintf(memory_text, sizeof memory_text, "%lluMiB /%6lluMiB", memory.used_mib, memory.total_mib);
    int used = ASK(DeviceGetUtilizationRates, row->device, &rates);
    text_or_absent(busy, sizeof busy, used, "%u%%", rates.gpu);
    printf("| %3s%6s%6s%7s /%5s |%21s |%8s%13s |\n", fan, heat, state, power, limit, memory_text, busy,
           compute_mode(row->device));
}

static void print_mig_line(nvmlDevice_t device)
{
    unsigned mode = 0, pending = 0;
    int result = ASK(DeviceGetMigMode, device, &mode, &pending);
    const char *text = result != NVML_SUCCESS ? "N/A" : mode ? "Enabled" : "Disabled";
    printf("|                               |                      |%21s |\n", text);
}

static void print_card(const struct row *row)
{
    print_first_line(row);
    print_second_line(row);
    if (knows_mig())
        print_mig_line(row->device);
    printf(CARD_RULE);
}

/* ---------------------------------------------------------------------------------------- MIG devices */

static bool mig_device(nvmlDevice_t card, unsigned index, nvmlDevice_t *device)
{
    return ASK(DeviceGetMigDeviceHandleByIndex, card, index, device) == NVML_SUCCESS;
}

static bool any_mig(unsigned count)
{
    for (unsigned i = 0; i < count; i++) {
        nvmlDevice_t card, device;
        if (ASK(DeviceGetHandleByIndex_v2, i, &card) == NVML_SUCCESS && mig_device(card, 0, &device))
            return true;
    }
    return false;
}

static void print_mig_device(unsigned card, unsigned index, nvmlDevice_t device)
{
    unsigned gpu = 0, compute = 0;
    struct memory memory = {0};
    nvmlBAR1Memory_t bar1 = {0};
    nvmlDeviceAttributes_t about = {0};
    (void)ASK(DeviceGetGpuInstanceId, device, &gpu);
    (void)ASK(DeviceGetComputeInstanceId, device, &compute);
    (void)ASK(DeviceGetAttributes_v2, device, &about);
    (void)ASK(DeviceGetBAR1MemoryInfo, device, &bar1);
    (void)memory_of(device, &memory);
    printf("|%3u %4u %3u %3u  |%7lluMiB /%6lluMiB |%3u %6s |%3u %3u %4u %4u %4u |\n", card, gpu, compute, index,
           memory.used_mib, memory.total_mib, about.multiprocessors, "0", about.copy_engines, about.encoders, about.decoders,
           about.optical_flows, about.jpegs);
    printf("|                  |%7lluMiB /%6lluMiB |           |                       |\n", bar1.used >> 20, bar1.total >> 20);
    printf("+------------------+----------------------+-----------+-----------------------+\n");
}

static void print_mig_devices(unsigned count)
{
    printf("\n" RULE "| MIG devices:                                                                |\n"
           "+------------------+----------------------+-----------+-----------------------+\n"
           "| GPU  GI  CI  MIG |         Memory-Usage |        Vol|         Shared        |\n"
           "|      ID  ID  Dev |           BAR1-Usage | SM     Unc| CE  ENC  DEC  OFA  JPG|\n"
           "|                  |                      |        ECC|                       |\n"
           "|==================+======================+===========+=======================|\n");
    for (unsigned i = 0; i < count; i++) {
        nvmlDevice_t card, device;
        unsigned most = 0;
        if (ASK(DeviceGetHandleByIndex_v2, i, &card) != NVML_SUCCESS)
            continue;
        (void)ASK(DeviceGetMaxMigDeviceCount, card, &most);
        for (unsigned j = 0; j < most; j++)
            if (mig_device(card, j, &device))
                print_mig_device(i, j, device);
    }
}

/* ------------------------------------------------------------------------------------------ processes */

static void process_name(unsigned pid, char *name, size_t length, size_t width)
{
    char whole[4096] = "";
    if (ASK(SystemGetProcessName, pid, whole, sizeof whole) != NVML_SUCCESS)
        snprintf(whole, sizeof whole, "[Not Found]");
    size_t size = strlen(whole);
    if (size > width) /* the end of a long path says more than its beginning */
        snprintf(name, length, "...%s", whole + size - (width - 3));
    else
        snprintf(name, length, "%s", whole);
}

static void instance(char *text, size_t length, unsigned id)
{
    text_or_absent(text, length, id == ~0u ? NVML_ERROR_NOT_FOUND : NVML_SUCCESS, "%u", id);
}

static unsigned print_processes_of(unsigned index)
{
    static nvmlProcessInfo_v2_t infos[MOST_PROCESSES];
    static nvmlProcessInfo_v1_t old[MOST_PROCESSES];
    char name[64], gpu[32], compute[32];
    unsigned count = MOST_PROCESSES;
    nvmlDevice_t device;
    if (ASK(DeviceGetHandleByIndex_v2, index, &device) != NVML_SUCCESS)
        return 0;
    if (!knows_mig()) {
        if (ASK(DeviceGetComputeRunningProcesses, device, &count, old) != NVML_SUCCESS)
            return 0;
        for (unsigned i = 0; i < count; i++) {
            process_name(old[i].pid, name, sizeof name, 40);
            printf("|%5u%10u      C   %-40s %7lluMiB |\n", index, old[i].pid, name, old[i].used >> 20);
        }
        return count;
    }
    if (ASK(DeviceGetComputeRunningProcesses_v3, device, &count, infos) != NVML_SUCCESS)
        return 0;
    for (unsigned i = 0; i < count; i++) {
        process_name(infos[i].pid, name, sizeof name, 27);
        instance(gpu, sizeof gpu, infos[i].gpu_instance);
        instance(compute, sizeof compute, infos[i].compute_instance);
        printf("|%5u%6s%5s%10u      C   %-27s %9lluMiB |\n", index, gpu, compute, infos[i].pid, name, infos[i].used >> 20);
    }
    return count;
}

static void print_processes(unsigned count)
{
    unsigned shown = 0;
    if (knows_mig())
        printf("\n" RULE "| Processes:                                                                  |\n"
               "|  GPU   GI   CI        PID   Type   Process name                  GPU Memory |\n"
               "|        ID   ID                                                   Usage      |\n" DOUBLE);
    else
        printf("\n" RULE "| Processes:                                                       GPU Memory |\n"
               "|  GPU       PID   Type   Process name                             Usage      |\n" DOUBLE);
    for (unsigned i = 0; i < count; i++)
        shown += print_processes_of(i);
    if (!shown && !in_container())
        printf("|  No running processes found                                                 |\n");
    printf(RULE);
}

int print_table(unsigned device_count)
{
    print_head();
    for (unsigned i = 0; i < device_count; i++) {
        struct row row = {.index = i};
        if (ASK(DeviceGetHandleByIndex_v2, i, &row.device) == NVML_SUCCESS)
            print_card(&row);
    }
    if (knows_mig() && any_mig(device_count))
        print_mig_devices(device_count);
    print_processes(device_count);
    return 0;
}
