/* Starting, handles, versions, names of processes, the text of errors. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "nvml.h"

struct sim_view view;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static _Atomic unsigned references;
static const char places[SIM_CARDS];
static uint32_t resets[SIM_CARDS]; /* of each card when NVML was opened, which is when it looks for cards */
#ifndef SIM_NVML_VERSION
#define SIM_NVML_VERSION "" /* the kernel module's; another in the copy in build/sim/older */
#endif
static char library_version[32] = SIM_NVML_VERSION; /* the library stays that of the driver with which it was loaded */

nvmlReturn_t nvml_ready(void) { return atomic_load(&references) ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED; }

nvmlDevice_t handle_of(uint32_t index) { return &places[index]; }

unsigned driver_major(void) { return (unsigned)strtoul(sim_state()->driver_version, NULL, 10); }

nvmlReturn_t copy_text(char *to, unsigned length, const char *text)
{
    if (!to)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (strlen(text) >= length)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    strcpy(to, text);
    return NVML_SUCCESS;
}

nvmlReturn_t place_for(const char *call, nvmlDevice_t device, struct place *place)
{
    TRY(nvml_ready());
    struct sim_state *state = sim_state();
    if (device < places || device >= places + state->card_count)
        return NVML_ERROR_INVALID_ARGUMENT;
    place->index = (uint32_t)(device - places);
    place->card = &state->cards[place->index];
    place->whole = place->card->parent >= 0 ? &state->cards[place->card->parent] : place->card;
    if (place->card->lost || place->whole->lost || place->whole->resets != resets[place->whole - state->cards])
        return NVML_ERROR_GPU_IS_LOST;
    if (place->card->refused_with && !strncmp(call, place->card->refused_call, strlen(place->card->refused_call)))
        return (nvmlReturn_t)place->card->refused_with;
    return NVML_SUCCESS;
}

nvmlReturn_t whole_for(const char *call, nvmlDevice_t device, struct place *place)
{
    TRY(place_for(call, device, place));
    return place->card == place->whole ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

/* ------------------------------------------------------------------------------------ start and end */

/* Once until the last who opened it has closed it. */
static nvmlReturn_t open_driver(void)
{
    struct sim_state *state = sim_attach();
    if (!state || state->driver_unloaded)
        return NVML_ERROR_DRIVER_NOT_LOADED;
    if (!*library_version)
        strcpy(library_version, state->driver_version);
    if (strcmp(library_version, state->driver_version) != 0)
        return NVML_ERROR_LIB_RM_VERSION_MISMATCH;
    for (uint32_t i = 0; i < state->card_count; i++)
        resets[i] = state->cards[i].resets;
    sim_view_of_machine(&view);
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlInit_v2(void)
{
    pthread_mutex_lock(&mutex);
    nvmlReturn_t result = atomic_load(&references) ? NVML_SUCCESS : open_driver();
    if (result == NVML_SUCCESS)
        atomic_fetch_add(&references, 1);
    pthread_mutex_unlock(&mutex);
    return result;
}

EXPORT nvmlReturn_t nvmlInit(void) { return nvmlInit_v2(); }

EXPORT nvmlReturn_t nvmlInitWithFlags(unsigned flags) { return flags & ~3u ? NVML_ERROR_INVALID_ARGUMENT : nvmlInit_v2(); }

EXPORT nvmlReturn_t nvmlShutdown(void)
{
    TRY(nvml_ready());
    atomic_fetch_sub(&references, 1);
    return NVML_SUCCESS;
}

EXPORT const char *nvmlErrorString(nvmlReturn_t code)
{
    static const char *const texts[] = {
        "Success",
        "Uninitialized",
        "Invalid Argument",
        "Not Supported",
        "Insufficient Permissions",
        "Already Initialized",
        "Not Found",
        "Insufficient Size",
        "Insufficient External Power",
        "Driver Not Loaded",
        "Timeout",
        "Interrupt Request Issue",
        "NVML Shared Library Not Found",
        "Function Not Found",
        "Corrupted infoROM",
        "GPU is lost",
        "GPU requires reset",
        "The operating system has blocked the request",
        "RM has detected an NVML/RM version mismatch.",
        "In use by another client",
        "Insufficient Memory",
        "No data",
        "The requested vgpu operation is not available on target device, because ECC is enabled",
        "Insufficient Resources",
        "Frequency Not Supported",
        "Argument Version Mismatch",
        "Deprecated",
        "Not Ready",
        "GPU Not Found",
        "Invalid State"};
    return code >= 0 && (size_t)code < sizeof texts / sizeof *texts ? texts[code] : "Unknown Error";
}

/* ------------------------------------------------------------------------------------------ versions */

EXPORT nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned length)
{
    TRY(nvml_ready());
    return copy_text(version, length, sim_state()->driver_version);
}

EXPORT nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned length)
{
    TRY(nvml_ready());
    return copy_text(version, length, sim_state()->nvml_version);
}

EXPORT nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    TRY(nvml_ready());
    if (!version)
        return NVML_ERROR_INVALID_ARGUMENT;
    *version = (int)sim_state()->cuda_version;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version) { return nvmlSystemGetCudaDriverVersion_v2(version); }

static const char *ghost_name(unsigned pid)
{
    const struct sim_state *state = sim_state();
    for (uint32_t i = 0; i < state->ghost_high; i++)
        if (state->ghosts[i].live && (unsigned)state->ghosts[i].pid == pid)
            return state->ghosts[i].name;
    return NULL;
}

EXPORT nvmlReturn_t nvmlSystemGetProcessName(unsigned pid, char *name, unsigned length)
{
    char path[48], text[4096];
    TRY(nvml_ready());
    if (!name || !length)
        return NVML_ERROR_INVALID_ARGUMENT;
    const char *ghost = ghost_name(pid);
    if (ghost) {
        snprintf(name, length, "%s", ghost);
        return NVML_SUCCESS;
    }
    snprintf(path, sizeof path, "/proc/%u/cmdline", pid);
    FILE *file = fopen(path, "re");
    if (!file)
        return NVML_ERROR_NOT_FOUND;
    size_t read = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[read] = '\0'; /* arguments end in zero bytes: this is the first */
    snprintf(name, length, "%s", text);
    return read ? NVML_SUCCESS : NVML_ERROR_NOT_FOUND;
}

/* ------------------------------------------------------------------------------------------- handles */

static bool is_whole(uint32_t index) { return sim_state()->cards[index].parent < 0; }

/* Seeing a MIG device means seeing the card that holds it. */
static bool sees(uint32_t index)
{
    for (uint32_t i = 0; i < view.count; i++)
        if (view.cards[i] == index || sim_state()->cards[view.cards[i]].parent == (int32_t)index)
            return true;
    return false;
}

static unsigned whole_count(void)
{
    unsigned count = 0;
    for (uint32_t index = 0; index < sim_state()->card_count; index++)
        count += is_whole(index) && sees(index);
    return count;
}

static nvmlReturn_t found(uint32_t index, nvmlDevice_t *device)
{
    struct place place;
    *device = handle_of(index);
    return place_of(*device, &place);
}

EXPORT nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count)
{
    TRY(nvml_ready());
    if (!count)
        return NVML_ERROR_INVALID_ARGUMENT;
    *count = whole_count();
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetCount(unsigned *count) { return nvmlDeviceGetCount_v2(count); }

EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned wanted, nvmlDevice_t *device)
{
    TRY(nvml_ready());
    if (!device || wanted >= whole_count())
        return NVML_ERROR_INVALID_ARGUMENT;
    for (uint32_t index = 0; index < sim_state()->card_count; index++)
        if (is_whole(index) && sees(index) && wanted-- == 0)
            return found(index, device);
    return NVML_ERROR_INVALID_ARGUMENT;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned index, nvmlDevice_t *device)
{
    return nvmlDeviceGetHandleByIndex_v2(index, device);
}

EXPORT nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned *index)
{
    struct place place;
    TRY(place_of(device, &place));
    if (!index)
        return NVML_ERROR_INVALID_ARGUMENT;
    *index = place.card == place.whole ? 0 : place.card->mig_index;
    for (uint32_t i = 0; place.card == place.whole && i < place.index; i++)
        *index += is_whole(i) && sees(i);
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
    TRY(nvml_ready());
    if (!uuid || !device)
        return NVML_ERROR_INVALID_ARGUMENT;
    for (uint32_t index = 0; index < sim_state()->card_count; index++)
        if (sees(index) && strcasecmp(sim_state()->cards[index].uuid, uuid) == 0)
            return found(index, device);
    return NVML_ERROR_NOT_FOUND;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleBySerial(const char *serial, nvmlDevice_t *device)
{
    TRY(nvml_ready());
    if (!serial || !device)
        return NVML_ERROR_INVALID_ARGUMENT;
    for (uint32_t index = 0; index < sim_state()->card_count; index++)
        if (is_whole(index) && sees(index) && *serial && strcmp(sim_state()->cards[index].serial, serial) == 0)
            return found(index, device);
    return NVML_ERROR_NOT_FOUND;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *text, nvmlDevice_t *device)
{
    unsigned domain = 0, bus, slot;
    TRY(nvml_ready());
    if (!text || !device)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (sscanf(text, "%x:%x:%x", &domain, &bus, &slot) != 3)
        return NVML_ERROR_INVALID_ARGUMENT;
    for (uint32_t index = 0; index < sim_state()->card_count; index++) {
        const struct sim_card *card = &sim_state()->cards[index];
        if (is_whole(index) && sees(index) && card->pci_domain == domain && card->pci_bus == bus && card->pci_device == slot)
            return found(index, device);
    }
    return NVML_ERROR_NOT_FOUND;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByPciBusId(const char *text, nvmlDevice_t *device)
{
    return nvmlDeviceGetHandleByPciBusId_v2(text, device);
}
