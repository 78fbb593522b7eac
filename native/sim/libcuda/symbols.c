/* The table of names behind cuGetProcAddress. It declares all entry points alike, so it stands alone. */
#include <stdbool.h>
#include <string.h>

#include "symbols.h"

#define STUB(symbol) int symbol(void);
#include "stubs.def"
#undef STUB

static const struct symbol symbols[] = {
#define SYMBOL(name, since, per_thread, symbol) {#name, since, per_thread, (void *)symbol},
#include "symbols.def"
#undef SYMBOL
};

#define COUNT (sizeof symbols / sizeof *symbols)

/* The first row of a name in the sorted table, COUNT if there is none. */
static size_t first_row(const char *name)
{
    size_t low = 0, high = COUNT;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (strcmp(symbols[middle].name, name) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return low < COUNT && strcmp(symbols[low].name, name) == 0 ? low : COUNT;
}

#ifdef SIM_FUTURE
#define FUTURE(name, symbol) int symbol(void);
#define FUTURE_FORMS                                                                                                           \
    FUTURE(cuMemAlloc, cuMemAlloc_v3)                                                                                          \
    FUTURE(cuMemFree, cuMemFree_v3)                                                                                            \
    FUTURE(cuMemGetInfo, cuMemGetInfo_v3)                                                                                      \
    FUTURE(cuMemAllocAsync, cuMemAllocAsync_v2)                                                                                \
    FUTURE(cuMemCreate, cuMemCreate_v2)                                                                                        \
    FUTURE(cuLaunchKernel, cuLaunchKernel_v2)
FUTURE_FORMS
#undef FUTURE
#define FUTURE(name, symbol) {#name, FUTURE_VERSION, false, (void *)symbol},
#define FUTURE_VERSION 14000
static const struct symbol future[] = {FUTURE_FORMS};
#endif

/* The newest row up to the version; a per-thread form of that version comes before the plain one. */
static const struct symbol *newest(size_t row, int version, bool per_thread)
{
    const struct symbol *best = NULL;
    const char *name = symbols[row].name;
    for (; row < COUNT && strcmp(symbols[row].name, name) == 0; row++) {
        const struct symbol *it = &symbols[row];
        if (it->since > version || (it->per_thread && !per_thread))
            continue;
        if (!best || it->since > best->since || (it->since == best->since && it->per_thread))
            best = it;
    }
    return best;
}

const struct symbol *symbol_find(const char *name, int version, bool per_thread, bool *known)
{
    size_t row = first_row(name);
    *known = row != COUNT;
#ifdef SIM_FUTURE
    for (size_t i = 0; version >= FUTURE_VERSION && i < sizeof future / sizeof *future; i++)
        if (strcmp(future[i].name, name) == 0)
            return &future[i];
#endif
    return *known ? newest(row, version, per_thread) : NULL;
}
