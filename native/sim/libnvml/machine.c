/* How cards lie in the machine, and modes that a simulated one has in one form only. */
#include <stdio.h>
#include <string.h>

#include "nvml.h"

typedef struct {
    unsigned version, type; /* 1 text, 2 binary */
    union {
        char text[41];
        unsigned char bytes[16];
    } value;
} nvmlUUID_t;

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device);

EXPORT nvmlReturn_t nvmlDeviceGetHandleByUUIDV(const nvmlUUID_t *uuid, nvmlDevice_t *device)
{
    TRY(nvml_ready());
    if (!uuid || uuid->type != 1)
        return NVML_ERROR_INVALID_ARGUMENT;
    return nvmlDeviceGetHandleByUUID(uuid->value.text, device);
}

/* Cards with links meet directly; others share a host bridge. 0 the same board, 20 one bridge, 30 one node. */
EXPORT nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t a, nvmlDevice_t b, int *level)
{
    struct place first, second;
    TRY(whole_of(a, &first));
    TRY(whole_of(b, &second));
    if (!level)
        return NVML_ERROR_INVALID_ARGUMENT;
    *level = first.index == second.index ? 0 : first.card->pci_bus == second.card->pci_bus ? 20 : 30;
    return NVML_SUCCESS;
}

/* Only what is asked of NVLink (index 2): all cards with links reach each other. 0 good, 2 a card without links. */
EXPORT nvmlReturn_t nvmlDeviceGetP2PStatus(nvmlDevice_t a, nvmlDevice_t b, int capability, int *status)
{
    struct place first, second;
    TRY(whole_of(a, &first));
    TRY(whole_of(b, &second));
    if (!status)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (capability != 2)
        return NVML_ERROR_NOT_SUPPORTED;
    *status = first.card->nvlink_count && second.card->nvlink_count ? 0 : 2;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned link, unsigned *active)
{
    struct place place;
    TRY(whole_of(device, &place));
    if (!active)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (!place.card->nvlink_count)
        return NVML_ERROR_NOT_SUPPORTED;
    if (link >= place.card->nvlink_count)
        return NVML_ERROR_INVALID_ARGUMENT;
    *active = 1;
    return NVML_SUCCESS;
}

static nvmlReturn_t affinity(nvmlDevice_t device, unsigned words, unsigned long *set)
{
    struct place place;
    TRY(whole_of(device, &place));
    if (!words || !set)
        return NVML_ERROR_INVALID_ARGUMENT;
    memset(set, 0, words * sizeof *set);
    *set = 1;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetCpuAffinity(nvmlDevice_t device, unsigned words, unsigned long *set)
{
    return affinity(device, words, set);
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryAffinity(nvmlDevice_t device, unsigned words, unsigned long *set, int scope)
{
    (void)scope;
    return affinity(device, words, set);
}

EXPORT nvmlReturn_t nvmlDeviceGetVirtualizationMode(nvmlDevice_t device, int *mode)
{
    struct place place;
    TRY(whole_of(device, &place));
    if (!mode)
        return NVML_ERROR_INVALID_ARGUMENT;
    *mode = 0;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetAccountingMode(nvmlDevice_t device, int *mode)
{
    struct place place;
    TRY(whole_of(device, &place));
    if (!mode)
        return NVML_ERROR_INVALID_ARGUMENT;
    *mode = 0;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlUnitGetCount(unsigned *count)
{
    TRY(nvml_ready());
    if (!count)
        return NVML_ERROR_INVALID_ARGUMENT;
    *count = 0;
    return NVML_SUCCESS;
}
