#define _GNU_SOURCE
#include "entry/hook_table.h"

#include <string.h>

#include "system/elf.h"
#include "system/elf_objects.h"
#include "system/text.h"

static uint32_t hashes[GS_FUNCTIONS];

static void fill_hashes(void)
{
    if (!__atomic_load_n(&hashes[0], __ATOMIC_ACQUIRE)) /* two threads may both do it, with the same result */
        for (int i = GS_FUNCTIONS - 1; i >= 0; i--)
            __atomic_store_n(&hashes[i], gs_elf_hash(gs_described[i].symbol), __ATOMIC_RELEASE);
}

int gs_hook_named(const char *symbol)
{
    uint32_t wanted = gs_elf_hash(symbol);
    fill_hashes();
    for (int i = 0; i < GS_FUNCTIONS; i++)
        if (hashes[i] == wanted && gs_described[i].intercepted && gs_text_equal(gs_described[i].symbol, symbol))
            return i;
    return -1;
}

const char *gs_hook_symbol(int hook) { return gs_described[hook].symbol; }

bool gs_hook_is_variable_in(const struct gs_elf_symbols *symbols)
{
    fill_hashes();
    for (int i = 0; i < GS_FUNCTIONS; i++)
        if (gs_described[i].intercepted && gs_elf_symbol(symbols, gs_described[i].symbol, hashes[i], STT_OBJECT))
            return true;
    return false;
}

static bool suits(const struct gs_described *hook, const char *name, int version, bool own_stream)
{
    return hook->intercepted && hook->name[0] && hook->since <= version && strcmp(hook->name, name) == 0 &&
           (hook->stream == EITHER || (hook->stream == OWN) == own_stream);
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

/* Whether what was found is this hook's function in its own library, which need not be the driver. */
static bool is_of(int hook, const void *found)
{
    return gs_driver[hook] == found || gs_elf_function_beside(found, gs_described[hook].symbol) == found;
}

/* Some programs ask cuGetProcAddress for a symbol such as "cuMemAlloc_v2", although the manual wants the name without the
 * suffix. The symbol alone identifies the variant. */
static int by_whole_symbol(const char *name, const void *found)
{
    int hook = gs_hook_named(name);
    for (int i = 0; i < GS_FUNCTIONS; i++)
        if (hook < 0 || (gs_described[i].intercepted && strcmp(gs_described[i].name, name) == 0))
            return -1; /* it is a name, whose meaning depends on the version */
    return gs_described[hook].library == CUDA && gs_elf_function_beside(found, name) ? hook : -1;
}

int gs_hook_variant(const char *name, int version, uint64_t flags, const void *found)
{
    bool own_stream = flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;
    int best = -1;
    size_t base = base_length(name);
    for (int i = 0; i < GS_FUNCTIONS; i++)
        if (suits(&gs_described[i], name, version, own_stream) &&
            (best < 0 || gs_described[i].since >= gs_described[best].since))
            best = i;
    /* For versions before the variant with the per-thread stream existed, the flag selects the legacy variant. */
    if (best < 0 && own_stream)
        return gs_hook_variant(name, version, flags & ~(uint64_t)CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM, found);
    if (best >= 0 && is_of(best, found))
        return best;
    for (int i = 0; i < GS_FUNCTIONS; i++) /* the driver chose another variant: use the hook of that one */
        if (gs_described[i].intercepted && strncmp(gs_described[i].name, name, base) == 0 && !gs_described[i].name[base] &&
            is_of(i, found))
            return i;
    if (best < 0)
        return by_whole_symbol(name, found);
    /* What the driver found is none of the symbols that it exports. Up to the newest version that we know, it is still the
     * variant of our list. Beyond that version its arguments may differ, so the program gets the driver's function. */
    return version > GS_NEWEST_KNOWN_VERSION ? -1 : best;
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
        if (gs_described[i].intercepted && strncmp(gs_described[i].name, name, length) == 0 && !gs_described[i].name[length])
            return true;
    return false;
}

bool gs_is_unknown_variant(const char *symbol)
{
    size_t length = base_length(symbol);
    return symbol[length] && gs_hook_named(symbol) < 0 && has_hook(symbol, length) && !only_asks(symbol);
}

bool gs_is_unknown_form(const char *name) { return !only_asks(name) && has_hook(name, base_length(name)); }
