/* nvidia-smi: the table, the list of cards, and queries as CSV. */
#include "nvidia_smi.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct nvml nvml;

bool nvml_open(void)
{
    void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (!library)
        return false;
#define CALL(type, name, arguments) nvml.name = (type(*) arguments)dlsym(library, "nvml" #name);
    CALLS
#undef CALL
    return nvml.Init_v2 != NULL;
}

/* The newer form, where there is one, keeps the driver's reserve apart. */
bool memory_of(nvmlDevice_t device, struct memory *memory)
{
    nvmlMemory_v2_t newer = {.version = NVML_STRUCT_VERSION(nvmlMemory_v2_t, 2)};
    nvmlMemory_t older;
    if (ASK(DeviceGetMemoryInfo_v2, device, &newer) == NVML_SUCCESS)
        *memory = (struct memory){newer.total >> 20, newer.used >> 20, newer.free >> 20, newer.reserved >> 20};
    else if (ASK(DeviceGetMemoryInfo, device, &older) == NVML_SUCCESS)
        *memory = (struct memory){older.total >> 20, older.used >> 20, older.free >> 20, 0};
    else
        return false;
    return true;
}

/* In a container the host's processes are not to be seen, and the real program prints an empty table, not a line. */
bool in_container(void)
{
    const char *host = getenv("GPUSLICE_SIM_HOST_PID");
    return getenv("NVIDIA_VISIBLE_DEVICES") != NULL && !(host && strcmp(host, "1") == 0);
}

unsigned driver_major(void)
{
    char version[80] = "0";
    (void)ASK(SystemGetDriverVersion, version, sizeof version);
    return (unsigned)strtoul(version, NULL, 10);
}

static const char *value_of(int count, char **arguments, const char *option)
{
    size_t length = strlen(option);
    for (int i = 1; i < count; i++) {
        if (strncmp(arguments[i], option, length) == 0 && arguments[i][length] == '=')
            return arguments[i] + length + 1;
        if (strcmp(arguments[i], option) == 0)
            return i + 1 < count ? arguments[i + 1] : "";
    }
    return NULL;
}

static bool has(int count, char **arguments, const char *option) { return value_of(count, arguments, option) != NULL; }

static int lost_card(unsigned device_count)
{
    for (unsigned i = 0; i < device_count; i++) {
        nvmlDevice_t device;
        int result = ASK(DeviceGetHandleByIndex_v2, i, &device);
        if (result != NVML_ERROR_GPU_IS_LOST)
            continue;
        printf("Unable to determine the device handle for GPU%u: GPU is lost.  Reboot the system to recover this GPU\n", i);
        return result;
    }
    return NVML_SUCCESS;
}

static int answer(int count, char **arguments, unsigned device_count)
{
    const char *gpu = value_of(count, arguments, "--query-gpu");
    const char *apps = value_of(count, arguments, "--query-compute-apps");
    const char *format = value_of(count, arguments, "--format");
    if (!device_count) {
        printf("No devices were found\n");
        return 6;
    }
    int lost = lost_card(device_count);
    if (lost)
        return lost;
    if (has(count, arguments, "-L") || has(count, arguments, "--list-gpus"))
        return print_list(device_count);
    if (gpu)
        return print_query(device_count, gpu, format, value_of(count, arguments, "-i"));
    return apps ? print_process_query(device_count, apps, format) : print_table(device_count);
}

int main(int count, char **arguments)
{
    unsigned device_count = 0;
    if (!nvml_open() || nvml.Init_v2() != NVML_SUCCESS) {
        printf("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest "
               "NVIDIA driver is installed and running.\n\n");
        return NVML_ERROR_DRIVER_NOT_LOADED;
    }
    (void)ASK(DeviceGetCount_v2, &device_count);
    int status = answer(count, arguments, device_count);
    (void)ASK(Shutdown);
    return status;
}
