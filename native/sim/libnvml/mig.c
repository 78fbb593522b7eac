/* MIG: a card's GPU instances, each with one compute instance, as the state was created with them. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "nvml.h"

typedef struct {
    nvmlDevice_t device;
    unsigned id, profile_id;
    struct {
        unsigned start, size;
    } placement;
} nvmlGpuInstanceInfo_t;

/* An instance is known by the MIG device it is. */
typedef const char *nvmlGpuInstance_t;

EXPORT nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned *current, unsigned *pending)
{
    struct place place;
    TRY(whole_of(device, &place));
    if (!current || !pending)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (place.card->mig_mode == SIM_ABSENT || driver_major() < 450)
        return NVML_ERROR_NOT_SUPPORTED;
    *current = *pending = place.card->mig_mode;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned *is)
{
    struct place place;
    TRY(place_of(device, &place));
    if (!is)
        return NVML_ERROR_INVALID_ARGUMENT;
    *is = place.card != place.whole;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned *count)
{
    struct place place;
    TRY(whole_of(device, &place));
    if (!count)
        return NVML_ERROR_INVALID_ARGUMENT;
    *count = place.card->mig_mode == 1 ? 7 : 0;
    return NVML_SUCCESS;
}

static bool sees_mig(uint32_t index)
{
    for (uint32_t i = 0; i < view.count; i++)
        if (view.cards[i] == index)
            return true;
    return false;
}

EXPORT nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned wanted, nvmlDevice_t *mig)
{
    struct place place;
    TRY(whole_of(device, &place));
    if (!mig)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (place.card->mig_mode != 1)
        return place.card->mig_mode == SIM_ABSENT ? NVML_ERROR_NOT_SUPPORTED : NVML_ERROR_NOT_FOUND;
    for (uint32_t index = 0; index < sim_state()->card_count; index++) {
        const struct sim_card *card = &sim_state()->cards[index];
        if (card->parent == (int32_t)place.index && card->mig_index == wanted && sees_mig(index)) {
            *mig = handle_of(index);
            return NVML_SUCCESS;
        }
    }
    return NVML_ERROR_NOT_FOUND;
}

static nvmlReturn_t mig_of(nvmlDevice_t device, struct place *place)
{
    TRY(place_of(device, place));
    return place->card != place->whole ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

EXPORT nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t mig, nvmlDevice_t *device)
{
    struct place place;
    TRY(mig_of(mig, &place));
    if (!device)
        return NVML_ERROR_INVALID_ARGUMENT;
    *device = handle_of((uint32_t)place.card->parent);
    return NVML_SUCCESS;
}

#define MIG_NUMBER(function, field)                                                                                            \
    EXPORT nvmlReturn_t function(nvmlDevice_t device, unsigned *id)                                                            \
    {                                                                                                                          \
        struct place place;                                                                                                    \
        TRY(mig_of(device, &place));                                                                                           \
        if (!id)                                                                                                               \
            return NVML_ERROR_INVALID_ARGUMENT;                                                                                \
        *id = place.card->field;                                                                                               \
        return NVML_SUCCESS;                                                                                                   \
    }
MIG_NUMBER(nvmlDeviceGetGpuInstanceId, gpu_instance)
MIG_NUMBER(nvmlDeviceGetComputeInstanceId, compute_instance)

EXPORT nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t device, nvmlDeviceAttributes_t *out)
{
    struct place place;
    TRY(mig_of(device, &place));
    if (!out)
        return NVML_ERROR_INVALID_ARGUMENT;
    const struct sim_card *card = place.card;
    *out = (nvmlDeviceAttributes_t){.multiprocessors = card->multiprocessor_count,
                                    .copy_engines = card->mig_compute_slices,
                                    .decoders = card->mig_compute_slices / 2,
                                    .gpu_slices = card->mig_gpu_slices,
                                    .compute_slices = card->mig_compute_slices,
                                    .memory_mib = card->total_bytes / MIB};
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetAttributes(nvmlDevice_t device, nvmlDeviceAttributes_t *out)
{
    return nvmlDeviceGetAttributes_v2(device, out);
}

/* ------------------------------------------------------------------------------------ GPU instances */

static nvmlReturn_t mig_card(nvmlDevice_t device, struct place *place)
{
    TRY(whole_of(device, place));
    return place->card->mig_mode == 1 ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuInstances(nvmlDevice_t device, unsigned profile, nvmlGpuInstance_t *instances,
                                              unsigned *count)
{
    struct place place;
    TRY(mig_card(device, &place));
    if (!count)
        return NVML_ERROR_INVALID_ARGUMENT;
    *count = 0;
    for (uint32_t index = 0; index < sim_state()->card_count; index++) {
        const struct sim_card *card = &sim_state()->cards[index];
        if (card->parent != (int32_t)place.index || card->mig_profile_id != profile)
            continue;
        if (instances)
            instances[*count] = handle_of(index);
        ++*count;
    }
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuInstanceById(nvmlDevice_t device, unsigned id, nvmlGpuInstance_t *instance)
{
    struct place place;
    TRY(mig_card(device, &place));
    if (!instance)
        return NVML_ERROR_INVALID_ARGUMENT;
    for (uint32_t index = 0; index < sim_state()->card_count; index++)
        if (sim_state()->cards[index].parent == (int32_t)place.index && sim_state()->cards[index].gpu_instance == id) {
            *instance = handle_of(index);
            return NVML_SUCCESS;
        }
    return NVML_ERROR_NOT_FOUND;
}

EXPORT nvmlReturn_t nvmlGpuInstanceGetInfo(nvmlGpuInstance_t instance, nvmlGpuInstanceInfo_t *info)
{
    struct place place;
    TRY(mig_of(instance, &place));
    if (!info)
        return NVML_ERROR_INVALID_ARGUMENT;
    unsigned start = 0;
    for (uint32_t index = (uint32_t)place.card->parent + 1; index < place.index; index++)
        start += sim_state()->cards[index].mig_gpu_slices;
    *info = (nvmlGpuInstanceInfo_t){handle_of((uint32_t)place.card->parent),
                                    place.card->gpu_instance,
                                    place.card->mig_profile_id,
                                    {start, place.card->mig_gpu_slices}};
    return NVML_SUCCESS;
}
