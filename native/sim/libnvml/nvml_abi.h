/* The part of NVML's binary interface that the simulation speaks. */
#ifndef GPUSLICE_SIM_NVML_ABI_H
#define GPUSLICE_SIM_NVML_ABI_H

#define EXPORT __attribute__((visibility("default")))

typedef int nvmlReturn_t;
typedef const char *nvmlDevice_t; /* opaque: the place in a table says which card */

enum {
    NVML_SUCCESS = 0,
    NVML_ERROR_UNINITIALIZED = 1,
    NVML_ERROR_INVALID_ARGUMENT = 2,
    NVML_ERROR_NOT_SUPPORTED = 3,
    NVML_ERROR_NO_PERMISSION = 4,
    NVML_ERROR_NOT_FOUND = 6,
    NVML_ERROR_INSUFFICIENT_SIZE = 7,
    NVML_ERROR_DRIVER_NOT_LOADED = 9,
    NVML_ERROR_TIMEOUT = 10,
    NVML_ERROR_FUNCTION_NOT_FOUND = 13,
    NVML_ERROR_GPU_IS_LOST = 15,
    NVML_ERROR_OPERATING_SYSTEM = 17,
    NVML_ERROR_LIB_RM_VERSION_MISMATCH = 18,
    NVML_ERROR_MEMORY = 20,
    NVML_ERROR_NO_DATA = 21,
    NVML_ERROR_ARGUMENT_VERSION_MISMATCH = 25,
    NVML_ERROR_UNKNOWN = 999
};

#define NVML_STRUCT_VERSION(type, number) ((unsigned)(sizeof(type) | (number) << 24))

typedef struct {
    unsigned long long total, free, used;
} nvmlMemory_t;

typedef struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
} nvmlMemory_v2_t;

typedef struct {
    unsigned long long total, free, used;
} nvmlBAR1Memory_t;

typedef struct {
    unsigned pid;
    unsigned long long used;
} nvmlProcessInfo_v1_t;

typedef struct {
    unsigned pid;
    unsigned long long used;
    unsigned gpu_instance, compute_instance;
} nvmlProcessInfo_v2_t;

typedef struct {
    char bus_id_legacy[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
} nvmlPciInfo_t;

typedef struct {
    char bus_id_legacy[16];
    unsigned domain, bus, device, device_id, reserved[5];
} nvmlPciInfo_v2_legacy_t;

typedef struct {
    unsigned version;
    unsigned domain, bus, device, device_id, subsystem_id, base_class, sub_class;
    char bus_id[32];
} nvmlPciInfoExt_t;

typedef struct {
    unsigned gpu, memory;
} nvmlUtilization_t;

typedef struct {
    unsigned pid;
    unsigned long long timestamp_us;
    unsigned sm, memory, encoder, decoder;
} nvmlProcessUtilizationSample_t;

typedef struct {
    unsigned long long timestamp_us;
    unsigned pid, sm, memory, encoder, decoder, jpeg, optical_flow;
} nvmlProcessUtilizationInfo_t;

typedef struct {
    unsigned version;
    unsigned count;
    unsigned long long last_seen_us;
    nvmlProcessUtilizationInfo_t *samples;
} nvmlProcessesUtilizationInfo_t;

typedef struct {
    nvmlDevice_t device;
    unsigned long long type, data;
    unsigned gpu_instance, compute_instance;
} nvmlEventData_t;

typedef union {
    double real;
    int sint;
    unsigned uint;
    unsigned long ulong;
    unsigned long long ulonglong;
    long long slonglong;
    unsigned short ushort;
} nvmlValue_t;

typedef struct {
    unsigned field, scope;
    long long timestamp_us, latency_us;
    int type;
    nvmlReturn_t result;
    nvmlValue_t value;
} nvmlFieldValue_t;

typedef struct {
    unsigned long long timestamp_us;
    nvmlValue_t value;
} nvmlSample_t;

typedef struct {
    unsigned multiprocessors, copy_engines, decoders, encoders, jpegs, optical_flows, gpu_slices, compute_slices;
    unsigned long long memory_mib;
} nvmlDeviceAttributes_t;

typedef struct {
    const char *name_space; /* a cgroup's folder */
    unsigned long long soft, hard;
} nvmlSetMemoryLimits_v1_t;

typedef struct {
    const char *name_space;
    unsigned long long soft, hard, used;
} nvmlGetMemoryLimits_v1_t;

typedef struct {
    unsigned version;
    int sensor;
    int celsius;
} nvmlTemperature_t;

#endif
