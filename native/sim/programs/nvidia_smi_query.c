/* -L, --query-gpu and --query-compute-apps. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "nvidia_smi.h"

static bool mig_profile(const char *name, char *profile, size_t length)
{
    const char *mig = strstr(name, "MIG ");
    if (mig)
        snprintf(profile, length, "%s", mig + 4);
    return mig != NULL;
}

static void print_mig_list(nvmlDevice_t card)
{
    unsigned most = 0;
    (void)ASK(DeviceGetMaxMigDeviceCount, card, &most);
    for (unsigned i = 0; i < most; i++) {
        char name[128] = "", uuid[96] = "", profile[64] = "?";
        nvmlDevice_t device;
        if (ASK(DeviceGetMigDeviceHandleByIndex, card, i, &device) != NVML_SUCCESS)
            continue;
        (void)ASK(DeviceGetName, device, name, sizeof name);
        (void)ASK(DeviceGetUUID, device, uuid, sizeof uuid);
        mig_profile(name, profile, sizeof profile);
        printf("  MIG %-11s Device %2u: (UUID: %s)\n", profile, i, uuid);
    }
}

int print_list(unsigned device_count)
{
    for (unsigned i = 0; i < device_count; i++) {
        char name[128] = "N/A", uuid[96] = "N/A";
        nvmlDevice_t device;
        if (ASK(DeviceGetHandleByIndex_v2, i, &device) != NVML_SUCCESS)
            continue;
        (void)ASK(DeviceGetName, device, name, sizeof name);
        (void)ASK(DeviceGetUUID, device, uuid, sizeof uuid);
        printf("GPU %u: %s (UUID: %s)\n", i, name, uuid);
        print_mig_list(device);
    }
    return 0;
}

/* ------------------------------------------------------------------------------------- what can be asked */

struct answer {
    char text[160];
    const char *unit; /* "" for none */
};

/* Values come by address: they are written by the call whose result stands beside them. */
static void number(struct answer *answer, int result, const unsigned *value, const char *unit)
{
    if (result == NVML_SUCCESS)
        snprintf(answer->text, sizeof answer->text, "%u", *value);
    else
        snprintf(answer->text, sizeof answer->text, result == NVML_ERROR_NOT_SUPPORTED ? "[N/A]" : "[Unknown Error]");
    answer->unit = result == NVML_SUCCESS ? unit : "";
}

static void text(struct answer *answer, int result, const char *value)
{
    snprintf(answer->text, sizeof answer->text, "%s", result == NVML_SUCCESS ? value : "[N/A]");
    answer->unit = "";
}

static void on_off(struct answer *answer, int result, const unsigned *on)
{
    text(answer, result, *on ? "Enabled" : "Disabled");
}

static void identity(nvmlDevice_t device, const char *field, struct answer *answer)
{
    char value[160] = "";
    unsigned count = 0;
    nvmlPciInfo_t pci = {0};
    if (strcmp(field, "name") == 0 || strcmp(field, "gpu_name") == 0)
        text(answer, ASK(DeviceGetName, device, value, sizeof value), value);
    else if (strcmp(field, "uuid") == 0 || strcmp(field, "gpu_uuid") == 0)
        text(answer, ASK(DeviceGetUUID, device, value, sizeof value), value);
    else if (strcmp(field, "serial") == 0 || strcmp(field, "gpu_serial") == 0)
        text(answer, ASK(DeviceGetSerial, device, value, sizeof value), value);
    else if (strcmp(field, "driver_version") == 0)
        text(answer, ASK(SystemGetDriverVersion, value, sizeof value), value);
    else if (strcmp(field, "vbios_version") == 0)
        text(answer, ASK(DeviceGetVbiosVersion, device, value, sizeof value), value);
    else if (strcmp(field, "pci.bus_id") == 0 || strcmp(field, "gpu_bus_id") == 0)
        text(answer, ASK(DeviceGetPciInfo_v3, device, &pci), pci.bus_id);
    else if (strcmp(field, "count") == 0)
        number(answer, ASK(DeviceGetCount_v2, &count), &count, "");
}

static void mib(struct answer *answer, int result, unsigned long long value)
{
    unsigned small = (unsigned)value;
    number(answer, result, &small, "MiB");
}

static void memory(nvmlDevice_t device, const char *field, struct answer *answer)
{
    struct memory it;
    int result = memory_of(device, &it) ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
    if (strcmp(field, "memory.total") == 0)
        mib(answer, result, it.total_mib);
    else if (strcmp(field, "memory.used") == 0)
        mib(answer, result, it.used_mib);
    else if (strcmp(field, "memory.free") == 0)
        mib(answer, result, it.free_mib);
    else if (strcmp(field, "memory.reserved") == 0)
        mib(answer, result, it.reserved_mib);
}

static void milliwatts(struct answer *answer, int result, const unsigned *value)
{
    if (result == NVML_SUCCESS)
        snprintf(answer->text, sizeof answer->text, "%u.%02u", *value / 1000, *value % 1000 / 10);
    else
        snprintf(answer->text, sizeof answer->text, "[N/A]");
    answer->unit = result == NVML_SUCCESS ? "W" : "";
}

static void activity(nvmlDevice_t device, const char *field, struct answer *answer)
{
    unsigned value = 0;
    char state[16];
    nvmlUtilization_t rates = {0};
    if (strcmp(field, "utilization.gpu") == 0)
        number(answer, ASK(DeviceGetUtilizationRates, device, &rates), &rates.gpu, "%");
    else if (strcmp(field, "utilization.memory") == 0)
        number(answer, ASK(DeviceGetUtilizationRates, device, &rates), &rates.memory, "%");
    else if (strcmp(field, "temperature.gpu") == 0)
        number(answer, ASK(DeviceGetTemperature, device, 0, &value), &value, "");
    else if (strcmp(field, "fan.speed") == 0)
        number(answer, ASK(DeviceGetFanSpeed, device, &value), &value, "%");
    else if (strcmp(field, "power.draw") == 0)
        milliwatts(answer, ASK(DeviceGetPowerUsage, device, &value), &value);
    else if (strcmp(field, "power.limit") == 0)
        milliwatts(answer, ASK(DeviceGetPowerManagementLimit, device, &value), &value);
    else if (strcmp(field, "pstate") == 0) {
        int result = ASK(DeviceGetPerformanceState, device, &value);
        snprintf(state, sizeof state, "P%u", value);
        text(answer, result, state);
    }
}

static void clocks(nvmlDevice_t device, const char *field, struct answer *answer)
{
    unsigned mhz = 0;
    if (strcmp(field, "clocks.sm") == 0 || strcmp(field, "clocks.current.sm") == 0 || strcmp(field, "clocks.gr") == 0)
        number(answer, ASK(DeviceGetClockInfo, device, 1, &mhz), &mhz, "MHz");
    else if (strcmp(field, "clocks.mem") == 0 || strcmp(field, "clocks.current.memory") == 0)
        number(answer, ASK(DeviceGetClockInfo, device, 2, &mhz), &mhz, "MHz");
    else if (strcmp(field, "clocks.max.sm") == 0)
        number(answer, ASK(DeviceGetMaxClockInfo, device, 1, &mhz), &mhz, "MHz");
    else if (strcmp(field, "clocks.max.memory") == 0)
        number(answer, ASK(DeviceGetMaxClockInfo, device, 2, &mhz), &mhz, "MHz");
}

static void switches(nvmlDevice_t device, const char *field, struct answer *answer)
{
    static const char *const modes[] = {"Default", "Exclusive_Thread", "Prohibited", "Exclusive_Process"};
    unsigned value = 0, pending = 0;
    int major = 0, minor = 0;
    char capability[24];
    if (strcmp(field, "persistence_mode") == 0)
        on_off(answer, ASK(DeviceGetPersistenceMode, device, &value), &value);
    else if (strcmp(field, "mig.mode.current") == 0)
        on_off(answer, ASK(DeviceGetMigMode, device, &value, &pending), &value);
    else if (strcmp(field, "ecc.mode.current") == 0)
        on_off(answer, ASK(DeviceGetEccMode, device, &value, &pending), &value);
    else if (strcmp(field, "display_active") == 0)
        on_off(answer, ASK(DeviceGetDisplayActive, device, &value), &value);
    else if (strcmp(field, "display_mode") == 0)
        on_off(answer, ASK(DeviceGetDisplayMode, device, &value), &value);
    else if (strcmp(field, "compute_mode") == 0) {
        int result = ASK(DeviceGetComputeMode, device, &value);
        text(answer, result, modes[value & 3]);
    } else if (strcmp(field, "compute_cap") == 0) {
        int result = ASK(DeviceGetCudaComputeCapability, device, &major, &minor);
        snprintf(capability, sizeof capability, "%d.%d", major, minor);
        text(answer, result, capability);
    }
}

static bool ask(nvmlDevice_t device, unsigned index, const char *field, struct answer *answer)
{
    answer->text[0] = '\0';
    answer->unit = "";
    if (strcmp(field, "index") == 0)
        number(answer, NVML_SUCCESS, &index, "");
    else if (strcmp(field, "timestamp") == 0)
        text(answer, NVML_ERROR_NOT_SUPPORTED, "");
    identity(device, field, answer);
    memory(device, field, answer);
    activity(device, field, answer);
    clocks(device, field, answer);
    switches(device, field, answer);
    return answer->text[0] != '\0';
}

/* ----------------------------------------------------------------------------------------------- CSV */

struct format {
    bool header, units;
};

static struct format parse_format(const char *text)
{
    return (struct format){.header = !text || !strstr(text, "noheader"), .units = !text || !strstr(text, "nounits")};
}

static const char *column_unit(const char *field)
{
    if (strncmp(field, "memory.", 7) == 0 || strcmp(field, "used_memory") == 0 || strcmp(field, "used_gpu_memory") == 0)
        return " [MiB]";
    if (strncmp(field, "utilization.", 12) == 0 || strcmp(field, "fan.speed") == 0)
        return " [%]";
    if (strncmp(field, "power.", 6) == 0)
        return " [W]";
    return strncmp(field, "clocks.", 7) == 0 ? " [MHz]" : "";
}

#define MOST_FIELDS 64

static unsigned split(const char *list, char *copy, size_t length, char **fields)
{
    unsigned count = 0;
    snprintf(copy, length, "%s", list);
    for (char *rest = copy, *field; count < MOST_FIELDS && (field = strsep(&rest, ",")) != NULL;) {
        field += strspn(field, " ");
        fields[count++] = field;
    }
    return count;
}

static void print_header(char **fields, unsigned count)
{
    for (unsigned i = 0; i < count; i++)
        printf("%s%s%s", i ? ", " : "", fields[i], column_unit(fields[i]));
    printf("\n");
}

static void print_answer(const struct answer *answer, bool units, bool first)
{
    printf("%s%s", first ? "" : ", ", answer->text);
    if (units && *answer->unit)
        printf(" %s", answer->unit);
}

static bool wanted(nvmlDevice_t device, unsigned index, const char *only)
{
    char uuid[96] = "";
    nvmlPciInfo_t pci = {0};
    if (!only)
        return true;
    (void)ASK(DeviceGetUUID, device, uuid, sizeof uuid);
    (void)ASK(DeviceGetPciInfo_v3, device, &pci);
    char *end;
    unsigned long number = strtoul(only, &end, 10);
    return (*end == '\0' && number == index) || strcasecmp(only, uuid) == 0 || strcasecmp(only, pci.bus_id) == 0;
}

static bool known(char **fields, unsigned count, nvmlDevice_t device)
{
    for (unsigned i = 0; i < count; i++) {
        struct answer answer;
        if (ask(device, 0, fields[i], &answer))
            continue;
        printf("Field \"%s\" is not a valid field to query.\n\n", fields[i]);
        return false;
    }
    return true;
}

int print_query(unsigned device_count, const char *list, const char *format_text, const char *only)
{
    char copy[2048], *fields[MOST_FIELDS];
    struct format format = parse_format(format_text);
    unsigned count = split(list, copy, sizeof copy, fields);
    nvmlDevice_t device;
    if (ASK(DeviceGetHandleByIndex_v2, 0, &device) == NVML_SUCCESS && !known(fields, count, device))
        return NVML_ERROR_INVALID_ARGUMENT;
    if (format.header)
        print_header(fields, count);
    for (unsigned i = 0; i < device_count; i++) {
        if (ASK(DeviceGetHandleByIndex_v2, i, &device) != NVML_SUCCESS || !wanted(device, i, only))
            continue;
        for (unsigned j = 0; j < count; j++) {
            struct answer answer;
            ask(device, i, fields[j], &answer);
            print_answer(&answer, format.units, j == 0);
        }
        printf("\n");
    }
    return 0;
}

static void ask_process(nvmlDevice_t device, const nvmlProcessInfo_v1_t *info, const char *field, struct answer *answer)
{
    char name[4096] = "";
    answer->text[0] = '\0';
    if (strcmp(field, "pid") == 0)
        number(answer, NVML_SUCCESS, &info->pid, "");
    else if (strcmp(field, "used_memory") == 0 || strcmp(field, "used_gpu_memory") == 0)
        mib(answer, NVML_SUCCESS, info->used >> 20);
    else if (strcmp(field, "process_name") == 0 || strcmp(field, "name") == 0)
        text(answer, ASK(SystemGetProcessName, info->pid, name, sizeof name), name);
    else
        identity(device, field, answer);
}

int print_process_query(unsigned device_count, const char *list, const char *format_text)
{
    static nvmlProcessInfo_v1_t infos[MOST_PROCESSES];
    char copy[2048], *fields[MOST_FIELDS];
    struct format format = parse_format(format_text);
    unsigned count = split(list, copy, sizeof copy, fields);
    if (format.header)
        print_header(fields, count);
    for (unsigned i = 0; i < device_count; i++) {
        nvmlDevice_t device;
        unsigned processes = MOST_PROCESSES;
        if (ASK(DeviceGetHandleByIndex_v2, i, &device) != NVML_SUCCESS ||
            ASK(DeviceGetComputeRunningProcesses, device, &processes, infos) != NVML_SUCCESS)
            continue;
        for (unsigned j = 0; j < processes; j++) {
            for (unsigned k = 0; k < count; k++) {
                struct answer answer;
                ask_process(device, &infos[j], fields[k], &answer);
                print_answer(&answer, format.units, k == 0);
            }
            printf("\n");
        }
    }
    return 0;
}
