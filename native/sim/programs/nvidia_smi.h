/* nvidia-smi on NVML alone: what it calls, found by name at run time so that a library that interposes is asked. */
#ifndef GPUSLICE_SIM_NVIDIA_SMI_H
#define GPUSLICE_SIM_NVIDIA_SMI_H

#include <stdbool.h>

#include "../libnvml/nvml_abi.h"

#define MOST_PROCESSES 1100u

/* CALL(result type, name without nvml, arguments) */
#define CALLS                                                                                                                  \
    CALL(int, Init_v2, (void))                                                                                                 \
    CALL(int, Shutdown, (void))                                                                                                \
    CALL(const char *, ErrorString, (int))                                                                                     \
    CALL(int, SystemGetDriverVersion, (char *, unsigned))                                                                      \
    CALL(int, SystemGetCudaDriverVersion_v2, (int *))                                                                          \
    CALL(int, SystemGetProcessName, (unsigned, char *, unsigned))                                                              \
    CALL(int, DeviceGetCount_v2, (unsigned *))                                                                                 \
    CALL(int, DeviceGetHandleByIndex_v2, (unsigned, nvmlDevice_t *))                                                           \
    CALL(int, DeviceGetIndex, (nvmlDevice_t, unsigned *))                                                                      \
    CALL(int, DeviceGetName, (nvmlDevice_t, char *, unsigned))                                                                 \
    CALL(int, DeviceGetUUID, (nvmlDevice_t, char *, unsigned))                                                                 \
    CALL(int, DeviceGetSerial, (nvmlDevice_t, char *, unsigned))                                                               \
    CALL(int, DeviceGetVbiosVersion, (nvmlDevice_t, char *, unsigned))                                                         \
    CALL(int, DeviceGetPciInfo_v3, (nvmlDevice_t, nvmlPciInfo_t *))                                                            \
    CALL(int, DeviceGetMinorNumber, (nvmlDevice_t, unsigned *))                                                                \
    CALL(int, DeviceGetPersistenceMode, (nvmlDevice_t, unsigned *))                                                            \
    CALL(int, DeviceGetDisplayActive, (nvmlDevice_t, unsigned *))                                                              \
    CALL(int, DeviceGetDisplayMode, (nvmlDevice_t, unsigned *))                                                                \
    CALL(int, DeviceGetComputeMode, (nvmlDevice_t, unsigned *))                                                                \
    CALL(int, DeviceGetFanSpeed, (nvmlDevice_t, unsigned *))                                                                   \
    CALL(int, DeviceGetTemperature, (nvmlDevice_t, int, unsigned *))                                                           \
    CALL(int, DeviceGetPerformanceState, (nvmlDevice_t, unsigned *))                                                           \
    CALL(int, DeviceGetPowerUsage, (nvmlDevice_t, unsigned *))                                                                 \
    CALL(int, DeviceGetPowerManagementLimit, (nvmlDevice_t, unsigned *))                                                       \
    CALL(int, DeviceGetPowerManagementDefaultLimit, (nvmlDevice_t, unsigned *))                                                \
    CALL(int, DeviceGetClockInfo, (nvmlDevice_t, int, unsigned *))                                                             \
    CALL(int, DeviceGetMaxClockInfo, (nvmlDevice_t, int, unsigned *))                                                          \
    CALL(int, DeviceGetUtilizationRates, (nvmlDevice_t, nvmlUtilization_t *))                                                  \
    CALL(int, DeviceGetMemoryInfo, (nvmlDevice_t, nvmlMemory_t *))                                                             \
    CALL(int, DeviceGetMemoryInfo_v2, (nvmlDevice_t, nvmlMemory_v2_t *))                                                       \
    CALL(int, DeviceGetBAR1MemoryInfo, (nvmlDevice_t, nvmlBAR1Memory_t *))                                                     \
    CALL(int, DeviceGetTotalEccErrors, (nvmlDevice_t, int, int, unsigned long long *))                                         \
    CALL(int, DeviceGetEccMode, (nvmlDevice_t, unsigned *, unsigned *))                                                        \
    CALL(int, DeviceGetCudaComputeCapability, (nvmlDevice_t, int *, int *))                                                    \
    CALL(int, DeviceGetCurrPcieLinkGeneration, (nvmlDevice_t, unsigned *))                                                     \
    CALL(int, DeviceGetCurrPcieLinkWidth, (nvmlDevice_t, unsigned *))                                                          \
    CALL(int, DeviceGetComputeRunningProcesses, (nvmlDevice_t, unsigned *, nvmlProcessInfo_v1_t *))                            \
    CALL(int, DeviceGetComputeRunningProcesses_v3, (nvmlDevice_t, unsigned *, nvmlProcessInfo_v2_t *))                         \
    CALL(int, DeviceGetMigMode, (nvmlDevice_t, unsigned *, unsigned *))                                                        \
    CALL(int, DeviceGetMaxMigDeviceCount, (nvmlDevice_t, unsigned *))                                                          \
    CALL(int, DeviceGetMigDeviceHandleByIndex, (nvmlDevice_t, unsigned, nvmlDevice_t *))                                       \
    CALL(int, DeviceGetGpuInstanceId, (nvmlDevice_t, unsigned *))                                                              \
    CALL(int, DeviceGetComputeInstanceId, (nvmlDevice_t, unsigned *))                                                          \
    CALL(int, DeviceGetAttributes_v2, (nvmlDevice_t, nvmlDeviceAttributes_t *))

/* Each entry is NULL when the library lacks it. */
struct nvml {
#define CALL(type, name, arguments) type(*name) arguments;
    CALLS
#undef CALL
};

extern struct nvml nvml;

struct memory {
    unsigned long long total_mib, used_mib, free_mib, reserved_mib;
};

/* Calls an entry; NVML_ERROR_FUNCTION_NOT_FOUND when it is missing. */
#define ASK(name, ...) (nvml.name ? nvml.name(__VA_ARGS__) : NVML_ERROR_FUNCTION_NOT_FOUND)

bool nvml_open(void);
bool memory_of(nvmlDevice_t device, struct memory *memory);
bool in_container(void);
unsigned driver_major(void);

int print_table(unsigned device_count);
int print_list(unsigned device_count);
int print_query(unsigned device_count, const char *fields, const char *format, const char *only);
int print_process_query(unsigned device_count, const char *fields, const char *format);

#endif
