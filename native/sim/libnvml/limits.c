/* Memory limits of cgroups, which drivers from R615 on enforce; header and driver documentation of 615 and 620. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "nvml.h"

/* Root of this machine: CAP_SYS_ADMIN, or whoever made the machine's file, but in no container: one has neither, unless it
 * is privileged. */
static bool is_root(void)
{
    const char *admin = getenv("GPUSLICE_SIM_ADMIN");
    unsigned long long capabilities = 0;
    char line[256];
    if (view.contained)
        return admin && strcmp(admin, "1") == 0;
    FILE *status = fopen("/proc/self/status", "re");
    while (status && fgets(line, sizeof line, status))
        sscanf(line, "CapEff: %llx", &capabilities);
    if (status)
        fclose(status);
    const char *state = getenv("GPUSLICE_SIM_STATE");
    struct stat about;
    bool owns = geteuid() != 0 && state && stat(state, &about) == 0 && about.st_uid == geteuid();
    return capabilities >> 21 & 1 || owns;
}

/* The card and the cgroup that a call is about. */
static nvmlReturn_t about(const char *cgroup, struct place *place, uint64_t chain[SIM_CGROUPS])
{
    if (driver_major() < 615)
        return NVML_ERROR_FUNCTION_NOT_FOUND;
    if (place->card->parent >= 0 || place->card->mig_mode == 1 || sim_state()->accounting == SIM_ACCOUNTING_OFF)
        return NVML_ERROR_NOT_SUPPORTED;
    if (!cgroup || strlen(cgroup) >= SIM_PATH)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (!sim_cgroup_at(cgroup, chain))
        return NVML_ERROR_OPERATING_SYSTEM;
    return chain[1] ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED; /* the root cgroup */
}

/* dmem.min of every cgroup above, but for the root, which has none. */
static void add_above(const uint64_t chain[SIM_CGROUPS], uint32_t card, const char *cgroup, uint64_t more)
{
    char path[SIM_PATH];
    snprintf(path, sizeof path, "%s", cgroup);
    for (uint32_t depth = 1; depth + 1 < SIM_CGROUPS && chain[depth + 1]; depth++) {
        char *slash = strrchr(path, '/');
        if (!slash)
            return;
        *slash = '\0';
        struct sim_limit *limit = sim_limit_for(chain[depth], card, path);
        if (limit)
            limit->soft += more; /* modulo 2^64, so that less can be added, too */
    }
}

static nvmlReturn_t set(const nvmlSetMemoryLimits_v1_t *wanted, uint32_t card, const uint64_t chain[SIM_CGROUPS])
{
    sim_drop_limits_of_the_gone();
    struct sim_limit *limit = sim_limit_for(chain[0], card, wanted->name_space);
    if (!limit)
        return NVML_ERROR_MEMORY;
    if (sim_state()->accounting == SIM_ACCOUNTING_DMEM)
        add_above(chain, card, wanted->name_space, wanted->soft - limit->soft);
    limit->soft = wanted->soft;
    limit->hard = wanted->hard;
    limit->live = wanted->soft || wanted->hard != SIM_NO_LIMIT;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceSetMemoryLimits_v1(nvmlDevice_t device, nvmlSetMemoryLimits_v1_t *limits)
{
    struct place place;
    uint64_t chain[SIM_CGROUPS];
    TRY(place_of(device, &place));
    TRY(about(limits ? limits->name_space : NULL, &place, chain));
    if (!is_root())
        return NVML_ERROR_NO_PERMISSION;
    if (limits->soft > limits->hard || limits->soft > place.card->total_bytes ||
        (limits->hard != SIM_NO_LIMIT && limits->hard > place.card->total_bytes))
        return NVML_ERROR_INVALID_ARGUMENT;
    if (sim_state()->accounting == SIM_ACCOUNTING_DMEM && !sim_cgroup_has_dmem(limits->name_space))
        return NVML_ERROR_NOT_FOUND;
    sim_lock();
    nvmlReturn_t result = set(limits, place.index, chain);
    sim_unlock();
    return result;
}

/* Whose limits are read: with dmem those of the nearest cgroup that has such files, with misc of the nearest limited one. */
static uint32_t read_at(const char *cgroup, uint32_t card, const uint64_t chain[SIM_CGROUPS])
{
    char path[SIM_PATH];
    uint32_t depth = 0;
    snprintf(path, sizeof path, "%s", cgroup);
    for (; depth < SIM_CGROUPS && chain[depth]; depth++) {
        bool dmem = sim_state()->accounting == SIM_ACCOUNTING_DMEM;
        if (dmem ? sim_cgroup_has_dmem(path) : sim_limit_of(chain[depth], card) != NULL)
            break;
        char *slash = strrchr(path, '/');
        if (slash)
            *slash = '\0';
    }
    return depth;
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryLimits_v1(nvmlDevice_t device, nvmlGetMemoryLimits_v1_t *limits)
{
    struct place place;
    uint64_t chain[SIM_CGROUPS];
    TRY(place_of(device, &place));
    TRY(about(limits ? limits->name_space : NULL, &place, chain));
    sim_lock();
    sim_reap();
    sim_drop_limits_of_the_gone();
    uint32_t depth = read_at(limits->name_space, place.index, chain);
    bool found = depth < SIM_CGROUPS && chain[depth];
    const struct sim_limit *limit = found ? sim_limit_of(chain[depth], place.index) : NULL;
    limits->soft = limit ? limit->soft : 0;
    limits->hard = limit ? limit->hard : SIM_NO_LIMIT;
    limits->used = found ? sim_cgroup_bytes(chain[depth], place.index) : 0;
    sim_unlock();
    return found ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED; /* with misc: nobody has a limit */
}
