/* Memory limits of cgroups, as drivers from R615 on enforce them (NVML's SetMemoryLimits).
 *
 * With "misc" the driver has a table of its own and the nearest limited cgroup counts; with "dmem" the kernel's controller
 * counts in every cgroup on the way up. A machine without cgroups has a folder that stands for them, whose `cgroup.procs`
 * name the processes; one that is not named is where its parent or its session's leader is, as the kernel would have it. */
#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

#include "state.h"

#define CGROUP2_MAGIC 0x63677270

/* -------------------------------------------------------------------------------------- which cgroup it is */

static bool is_cgroup(const char *path)
{
    char file[PATH_MAX];
    const char *root = sim_state()->cgroup_root;
    if (*root)
        return strncmp(path, root, strlen(root)) == 0;
    snprintf(file, sizeof file, "%s/cgroup.controllers", path);
    return access(file, F_OK) == 0;
}

bool sim_cgroup_has_dmem(const char *path)
{
    char file[PATH_MAX], passed_on[256] = "";
    const char *slash = strrchr(path, '/');
    bool kernels = !*sim_state()->cgroup_root;
    if (kernels)
        snprintf(file, sizeof file, "%s/dmem.max", path);
    else /* the folder may be new, and nobody fills it */
        snprintf(file, sizeof file, "%.*s/cgroup.subtree_control", (int)(slash ? slash - path : 0), path);
    FILE *control = kernels ? NULL : fopen(file, "re");
    bool read = control && fgets(passed_on, sizeof passed_on, control);
    if (control)
        fclose(control);
    return kernels ? access(file, F_OK) == 0 : read && strstr(passed_on, "dmem");
}

/* By its folder's number, and when it was made: file systems other than the kernel's use numbers again. 0: it is none. */
static uint64_t number_of(const char *path)
{
    struct statx about;
    if (!is_cgroup(path) || statx(AT_FDCWD, path, 0, STATX_INO | STATX_BTIME, &about) != 0)
        return 0;
    uint64_t made = about.stx_mask & STATX_BTIME ? (uint64_t)about.stx_btime.tv_sec * 1000000000u + about.stx_btime.tv_nsec : 0;
    return about.stx_ino ^ made * UINT64_C(0x9e3779b97f4a7c15);
}

bool sim_cgroup_at(const char *path, uint64_t chain[SIM_CGROUPS])
{
    char place[PATH_MAX];
    memset(chain, 0, SIM_CGROUPS * sizeof *chain);
    if (!realpath(path, place))
        return false;
    for (uint32_t depth = 0; depth < SIM_CGROUPS && (chain[depth] = number_of(place)) != 0; depth++) {
        char *slash = strrchr(place, '/');
        if (!slash || slash == place)
            break;
        *slash = '\0';
    }
    return chain[0] != 0;
}

/* The folder below `place` whose processes include this one; "" if there is none. */
static bool find_procs(const char *place, int32_t pid, char found[PATH_MAX])
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/cgroup.procs", place);
    FILE *procs = fopen(path, "re");
    int listed = 0;
    while (procs && listed != pid && fscanf(procs, "%d", &listed) == 1)
        continue;
    if (procs)
        fclose(procs);
    if (listed == pid && pid) {
        snprintf(found, PATH_MAX, "%s", place);
        return true;
    }
    DIR *folder = opendir(place);
    bool is_found = false;
    for (struct dirent *entry; folder && !is_found && (entry = readdir(folder));) {
        if (entry->d_type != DT_DIR || entry->d_name[0] == '.')
            continue;
        if (snprintf(path, sizeof path, "%s/%s", place, entry->d_name) < (int)sizeof path)
            is_found = find_procs(path, pid, found);
    }
    if (folder)
        closedir(folder);
    return is_found;
}

static int32_t parent_of(int32_t pid)
{
    char path[48], text[1024];
    int parent = 0;
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t length = file < 0 ? 0 : read(file, text, sizeof text - 1);
    if (file >= 0)
        close(file);
    text[length > 0 ? length : 0] = '\0';
    char *after_name = strrchr(text, ')');
    return after_name && sscanf(after_name + 1, " %*c %d", &parent) == 1 ? parent : 0;
}

static void find_in_folders(int32_t pid, uint64_t chain[SIM_CGROUPS])
{
    const char *root = sim_state()->cgroup_root;
    char found[PATH_MAX] = "";
    for (int32_t each = pid; each > 1; each = parent_of(each))
        if (find_procs(root, each, found))
            break;
    if (!*found)
        find_procs(root, getsid(pid), found);
    sim_cgroup_at(*found ? found : root, chain);
}

/* In a namespace of cgroups the path is seen from the container's own, which is what is mounted there as well. */
static void ask_the_kernel(int32_t pid, uint64_t chain[SIM_CGROUPS])
{
    static const char *const roots[] = {"/sys/fs/cgroup", "/sys/fs/cgroup/unified"}; /* the latter beside version 1 */
    char path[48], line[PATH_MAX], place[PATH_MAX + 32];
    struct statfs about;
    snprintf(path, sizeof path, "/proc/%d/cgroup", pid);
    FILE *file = fopen(path, "re");
    while (file && fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = '\0';
        for (unsigned i = 0; strncmp(line, "0::", 3) == 0 && !chain[0] && i < sizeof roots / sizeof *roots; i++) {
            snprintf(place, sizeof place, "%s%s", roots[i], line + 3);
            if (statfs(place, &about) == 0 && about.f_type == CGROUP2_MAGIC)
                sim_cgroup_at(place, chain);
        }
    }
    if (file)
        fclose(file);
}

void sim_cgroups_of(int32_t pid, uint64_t chain[SIM_CGROUPS])
{
    memset(chain, 0, SIM_CGROUPS * sizeof *chain);
    if (sim_state()->accounting == SIM_ACCOUNTING_OFF)
        return;
    if (*sim_state()->cgroup_root)
        find_in_folders(pid, chain);
    else
        ask_the_kernel(pid, chain);
}

const uint64_t *sim_cgroups_here(void)
{
    static uint64_t chain[SIM_CGROUPS];
    static _Atomic pid_t asked_by;
    if (asked_by != getpid()) {
        sim_cgroups_of(getpid(), chain);
        asked_by = getpid();
    }
    return chain;
}

/* ---------------------------------------------------------------------------------------------- the limits */

struct sim_limit *sim_limit_of(uint64_t cgroup, uint32_t card)
{
    struct sim_state *state = sim_state();
    for (uint32_t i = 0; cgroup && i < state->limit_high; i++)
        if (state->limits[i].live && state->limits[i].cgroup == cgroup && state->limits[i].card == card)
            return &state->limits[i];
    return NULL;
}

struct sim_limit *sim_limit_for(uint64_t cgroup, uint32_t card, const char *path)
{
    struct sim_state *state = sim_state();
    struct sim_limit *found = sim_limit_of(cgroup, card);
    for (uint32_t i = 0; !found && i < SIM_LIMITS; i++)
        if (!state->limits[i].live) {
            found = &state->limits[i];
            *found = (struct sim_limit){.live = 1, .card = card, .cgroup = cgroup, .hard = SIM_NO_LIMIT};
            snprintf(found->path, sizeof found->path, "%s", path);
            if (i >= state->limit_high)
                state->limit_high = i + 1;
        }
    return found;
}

void sim_drop_limits_of_the_gone(void)
{
    struct sim_state *state = sim_state();
    for (uint32_t i = 0; i < state->limit_high; i++)
        if (state->limits[i].live && number_of(state->limits[i].path) != state->limits[i].cgroup)
            state->limits[i].live = 0;
}

static bool counts_in(const uint64_t chain[SIM_CGROUPS], uint64_t cgroup, uint32_t card)
{
    for (uint32_t depth = 0; depth < SIM_CGROUPS && chain[depth]; depth++) {
        if (chain[depth] == cgroup)
            return true;
        if (sim_state()->accounting == SIM_ACCOUNTING_MISC && sim_limit_of(chain[depth], card))
            return false;
    }
    return false;
}

uint64_t sim_cgroup_bytes(uint64_t cgroup, uint32_t card)
{
    const struct sim_state *state = sim_state();
    uint64_t bytes = 0;
    for (uint32_t slot = 0; slot < state->process_high; slot++) {
        const struct sim_process *process = &state->processes[slot];
        if (!process->live || !counts_in(process->cgroups, cgroup, card))
            continue;
        for (uint32_t kind = 0; kind < SIM_KINDS; kind++)
            bytes += kind == SIM_MANAGED ? 0 : process->used_bytes[card][kind];
    }
    return bytes;
}

struct sim_allowance sim_allowance(const uint64_t chain[SIM_CGROUPS], uint32_t card)
{
    const struct sim_state *state = sim_state();
    struct sim_allowance allowed = {SIM_NO_LIMIT, SIM_NO_LIMIT};
    for (uint32_t depth = 0; state->limit_high && depth < SIM_CGROUPS && chain[depth]; depth++) {
        const struct sim_limit *limit = sim_limit_of(chain[depth], card);
        if (!limit || limit->hard == SIM_NO_LIMIT)
            continue;
        uint64_t used = sim_cgroup_bytes(chain[depth], card);
        uint64_t left = used < limit->hard ? limit->hard - used : 0;
        allowed.left = left < allowed.left ? left : allowed.left;
        bool misc = state->accounting == SIM_ACCOUNTING_MISC;
        if (misc || depth == 0) /* a leaf's own dmem.max says "max" below a limited cgroup, and that is shown */
            allowed.shown = limit->hard;
        if (misc)
            break;
    }
    return allowed;
}
