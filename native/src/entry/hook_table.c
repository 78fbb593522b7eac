#define _GNU_SOURCE
#include "entry/hook_table.h"

#include <string.h>

#include "system/elf_objects.h"
#include "system/text.h"

enum library { CUDA, NVML };
enum default_stream { EITHER, LEGACY, OWN };

struct hook {
    const char *symbol;
    const char *name;
    void *address; /* NULL for a function that we call but do not intercept */
    int since;
    unsigned char library;
    unsigned char stream;
};

static const struct hook hooks[GS_FUNCTIONS] = {
#define HOOK(library, symbol, name, since, stream, parameters) {#symbol, name, (void *)symbol, since, library, stream},
#define BORROW(library, symbol, parameters) {#symbol, "", NULL, 0, library, EITHER},
#include "driver/hooks.def"
};

static uint32_t hashes[GS_FUNCTIONS];

static void fill_hashes(void)
{
    if (!__atomic_load_n(&hashes[0], __ATOMIC_ACQUIRE)) /* two threads may both do it, with the same result */
        for (int i = GS_FUNCTIONS - 1; i >= 0; i--)
            __atomic_store_n(&hashes[i], gs_elf_hash(hooks[i].symbol), __ATOMIC_RELEASE);
}

int gs_hook_named(const char *symbol)
{
    uint32_t wanted = gs_elf_hash(symbol);
    fill_hashes();
    for (int i = 0; i < GS_FUNCTIONS; i++)
        if (hashes[i] == wanted && hooks[i].address && gs_text_equal(hooks[i].symbol, symbol))
            return i;
    return -1;
}

void *gs_hook_address(enum gs_function function) { return hooks[function].address; }

bool gs_hook_is_variable_in(const struct gs_elf_symbols *symbols)
{
    fill_hashes();
    for (int i = 0; i < GS_FUNCTIONS; i++)
        if (hooks[i].address && gs_elf_symbol(symbols, hooks[i].symbol, hashes[i], STT_OBJECT))
            return true;
    return false;
}

static bool suits(const struct hook *hook, const char *name, int version, bool own_stream)
{
    return hook->address && hook->name[0] && hook->since <= version && strcmp(hook->name, name) == 0 &&
           (hook->stream == EITHER || (hook->stream == OWN) == own_stream);
}

/* Some programs ask cuGetProcAddress for a symbol such as "cuMemAlloc_v2", although the manual wants the name without the
 * suffix. The symbol alone identifies the variant. */
static void *by_whole_symbol(const char *name)
{
    int hook = gs_hook_named(name);
    for (int i = 0; i < GS_FUNCTIONS; i++)
        if (hook < 0 || (hooks[i].address && strcmp(hooks[i].name, name) == 0))
            return NULL; /* it is a name, whose meaning depends on the version */
    return hooks[hook].library == CUDA && gs_driver_has((enum gs_function)hook) ? hooks[hook].address : NULL;
}

void *gs_hook_variant(const char *name, int version, uint64_t flags, void *found)
{
    bool own_stream = flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;
    const struct hook *best = NULL;
    for (int i = 0; i < GS_FUNCTIONS; i++)
        if (suits(&hooks[i], name, version, own_stream) && (!best || hooks[i].since >= best->since))
            best = &hooks[i];
    /* For versions before the variant with the per-thread stream existed, the flag selects the legacy variant. */
    if (!best && own_stream)
        return gs_hook_variant(name, version, flags & ~(uint64_t)CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM, found);
    if (best && gs_driver[best - hooks] == found)
        return best->address;
    for (int i = 0; i < GS_FUNCTIONS; i++) /* the driver chose another variant: use the hook of that one */
        if (hooks[i].address && hooks[i].library == CUDA && gs_driver[i] == found)
            return hooks[i].address;
    if (!best)
        return by_whole_symbol(name);
    /* What the driver found is none of the symbols that it exports. Up to the newest version that we know, it is still the
     * variant of our list. Beyond that version its arguments may differ, so the program gets the driver's function. */
    if (version > GS_NEWEST_KNOWN_VERSION)
        return NULL;
    if (!gs_driver_has((enum gs_function)(best - hooks)))
        __atomic_store_n(&gs_driver[best - hooks], found, __ATOMIC_RELEASE);
    return best->address;
}

/* ---- variants that are newer than this list ---- */

/* A variant that only queries or waits takes no memory and may pass. */
static bool only_asks(const char *name)
{
    return strstr(name, "Info") || strstr(name, "TotalMem") || strstr(name, "Synchronize") || strstr(name, "ProcAddress");
}

static bool has_hook(const char *name, size_t length)
{
    for (int i = 0; i < GS_FUNCTIONS; i++)
        if (hooks[i].address && strncmp(hooks[i].name, name, length) == 0 && !hooks[i].name[length])
            return true;
    return false;
}

/* The length of the name without a suffix such as "_v3" or "_v3_ptsz". */
static size_t base_length(const char *symbol)
{
    for (const char *at = strstr(symbol, "_v"); at; at = strstr(at + 1, "_v")) {
        const char *behind = at + 2;
        while (*behind >= '0' && *behind <= '9')
            behind++;
        if (behind > at + 2 && (!*behind || *behind == '_'))
            return (size_t)(at - symbol);
    }
    return strlen(symbol);
}

bool gs_is_unknown_variant(const char *symbol)
{
    size_t length = base_length(symbol);
    return symbol[length] && gs_hook_named(symbol) < 0 && has_hook(symbol, length) && !only_asks(symbol);
}

bool gs_is_unknown_form(const char *name, const void *found)
{
    if (!found || only_asks(name) || !has_hook(name, base_length(name)))
        return false;
    for (int i = 0; i < GS_FUNCTIONS; i++)
        if (hooks[i].address == found)
            return false;
    return true;
}
