/* Starts this process under its container's limits, at the first call of any hook. */
#define _GNU_SOURCE
#include "policy/start.h"

#include <string.h>

#include "policy/limits.h"
#include "policy/throttle.h"
#include "policy/usage_reports.h"
#include "system/at_fork.h"
#include "system/elf.h"
#include "system/text.h"

#define PATH_ROOM GS_PATH_ROOM
#define OWN_FOLDER "/usr/lib/gpuslice/"

bool gs_active;

static struct gs_lock start_lock GS_PER_PROCESS;
static bool started;

/* Files are found relative to the library: <prefix>/usr/lib/gpuslice/… → <prefix>/etc/gpuslice/limits. In a container
 * the prefix is empty. No environment variable changes this. */
static bool own_prefix(char prefix[PATH_ROOM])
{
    if (!gs_elf_own_path(prefix, PATH_ROOM))
        return false;
    char *folder = NULL;
    for (char *at = strstr(prefix, OWN_FOLDER); at; at = strstr(at + 1, OWN_FOLDER))
        folder = at;
    if (folder)
        *folder = 0;
    return folder != NULL;
}

static enum gs_limits_state read_limits_at(const char *prefix, struct gs_limits *limits)
{
    char path[PATH_ROOM];
    return gs_text_join(path, sizeof path, prefix, "/etc/gpuslice/limits", "") ? gs_limits_read(path, limits)
                                                                               : GS_LIMITS_CORRUPT;
}

static void open_accounts_at(const char *prefix)
{
    char path[PATH_ROOM];
    if (gs_text_join(path, sizeof path, prefix, "/var/lib/gpuslice/region", ""))
        gs_accounts_open(&gs_accounts, path);
    if (gs_text_join(path, sizeof path, prefix, "/etc/gpuslice", ""))
        gs_exports_are_of(&gs_accounts.exports, path);
}

/* A limits file that cannot be read leaves no card at all: every allocation is refused. So does a region that cannot be
 * mapped, because then nobody knows what the other processes hold. */
static bool activate(void)
{
    static struct gs_limits limits; /* large, and filled under the lock */
    static char prefix[PATH_ROOM] = "";
    enum gs_limits_state state = read_limits_at("", &limits);
    if (state == GS_LIMITS_ABSENT) {
        if (!own_prefix(prefix) || !*prefix)
            return false;
        state = read_limits_at(prefix, &limits);
    }
    if (state == GS_LIMITS_ABSENT)
        return false;
    open_accounts_at(prefix);
    gs_cards_make(&limits);
    gs_cards_follow(prefix);
    gs_figures_start(prefix);
    gs_throttle_start(prefix);
    gs_watch_forks();
    return true;
}

static bool start_locked(void)
{
    if (!started) {
        if (activate())
            __atomic_store_n(&gs_active, true, __ATOMIC_RELEASE);
        __atomic_store_n(&started, true, __ATOMIC_RELEASE);
    }
    return gs_active;
}

bool gs_start(void)
{
    if (__atomic_load_n(&started, __ATOMIC_ACQUIRE))
        return __atomic_load_n(&gs_active, __ATOMIC_ACQUIRE);
    GS_GUARD(&start_lock);
    return start_locked();
}
