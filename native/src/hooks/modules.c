/* Modules, libraries and heaps, whose size is known only after they are loaded. Kernel code that the driver loads at its first
 * use (since CUDA 12.2) is included in the next measurement, where NVML reports this process. */
#include "hooks/place.h"
#include "policy/process_usage.h"
#include "policy/reserve.h"

struct load {
    struct gs_card *card;
    CUcontext context;
    struct gs_snapshot before;
    int64_t grown, most; /* the growth by difference, and its upper bound by the second measurement */
    bool measured, repeated;
};

static bool begin(struct load *load)
{
    struct gs_place place = gs_current_place();
    *load = (struct load){.card = place.card, .context = place.context, .most = INT64_MAX};
    if (!place.card || place.card->index >= GPUSLICE_CARDS)
        return false;
    gs_snapshot(load->card, &load->before, NULL); /* used where NVML does not report this process, or stops doing so */
    return true;
}

/* Charges what was loaded. True if it fits. */
static bool fits(struct load *load, uint64_t key)
{
    struct gs_snapshot after;
    load->measured = gs_measure(load->card);
    if (!load->measured) {
        gs_snapshot(load->card, &after, NULL);
        load->grown = gs_grown(&load->before, &after);
        load->grown = load->grown < load->most ? load->grown : load->most;
        load->before = after; /* the state before it is possibly unloaded again */
        gs_add_piece(load->card, key, gs_key(load->context), load->grown);
    }
    return !gs_over_limit(load->card);
}

/* To be called after it was unloaded because it did not fit. A neighbour may have grown at the same moment: what the card gains
 * by unloading is a second measurement, and if the module fits by that, it is loaded once more. */
static bool again(struct load *load, uint64_t key)
{
    struct gs_snapshot after;
    bool fits = false;
    if (load->measured) {
        gs_measure(load->card);
    } else {
        gs_add_piece(load->card, key, gs_key(load->context), -load->grown);
        gs_snapshot(load->card, &after, NULL);
        int64_t returned = -gs_grown(&load->before, &after);
        load->most = returned < load->grown ? (returned > 0 ? returned : 0) : load->grown;
        load->before = after;
        fits = !load->repeated && load->most < load->grown &&
               gs_used(load->card) + (uint64_t)load->most <= gs_own_limit(load->card);
    }
    load->repeated = true;
    if (!fits)
        gs_refuse(load->card);
    return fits;
}

/* The driver's call, and it once more if the first measurement was too high. */
#define LOAD(symbol, call, key, undo)                                                                                          \
    struct load load;                                                                                                          \
    if (!begin(&load))                                                                                                         \
        return DRIVER(symbol) call;                                                                                            \
    for (;;) {                                                                                                                 \
        int result = DRIVER(symbol) call;                                                                                      \
        if (result != CUDA_SUCCESS || fits(&load, (uint64_t)(uintptr_t)(key)))                                                 \
            return result;                                                                                                     \
        uint64_t undone = (uint64_t)(uintptr_t)(key);                                                                          \
        undo;                                                                                                                  \
        if (!again(&load, undone))                                                                                             \
            return CUDA_ERROR_OUT_OF_MEMORY;                                                                                   \
    }
#define LOAD_MODULE(symbol, parameters, call)                                                                                  \
    int symbol parameters { LOAD(symbol, call, *module, DRIVER(cuModuleUnload)(*module)) }
#define LOAD_LIBRARY(symbol, parameters, call)                                                                                 \
    int symbol parameters { LOAD(symbol, call, *library, DRIVER(cuLibraryUnload)(*library)) }

LOAD_MODULE(cuModuleLoad, (CUmodule * module, const char *path), (module, path))
LOAD_MODULE(cuModuleLoadData, (CUmodule * module, const void *image), (module, image))
LOAD_MODULE(cuModuleLoadDataEx, (CUmodule * module, const void *image, unsigned count, int *options, void **values),
            (module, image, count, options, values))
LOAD_MODULE(cuModuleLoadFatBinary, (CUmodule * module, const void *image), (module, image))
LOAD_LIBRARY(cuLibraryLoadData,
             (CUlibrary * library, const void *code, void *jit, void **jit_values, unsigned jits, void *options, void **values,
              unsigned count),
             (library, code, jit, jit_values, jits, options, values, count))
LOAD_LIBRARY(cuLibraryLoadFromFile,
             (CUlibrary * library, const char *path, void *jit, void **jit_values, unsigned jits, void *options, void **values,
              unsigned count),
             (library, path, jit, jit_values, jits, options, values, count))

/* ---- limits: heaps that a context keeps ---- */

enum { STACK, PRINTF_BUFFER, MALLOC_HEAP };

static uint64_t key_of_limit(CUcontext context, int limit) { return gs_key(context) * 16 + (uint64_t)limit * 2 + 1; }

/* These two heaps have the size that the program sets, so that it is known in advance. */
static bool can_fit(struct gs_card *card, int limit, uint64_t before, uint64_t value)
{
    bool sized = limit == PRINTF_BUFFER || limit == MALLOC_HEAP;
    if (!sized || value <= before || !card || card->index >= GPUSLICE_CARDS)
        return true;
    uint64_t used = gs_used(card), more = value - before, most = gs_own_limit(card);
    if (used <= most && more <= most - used)
        return true;
    gs_refuse(card);
    return false;
}

int cuCtxSetLimit(int limit, size_t value)
{
    size_t before = 0;
    bool known = DRIVER(cuCtxGetLimit)(&before, limit) == CUDA_SUCCESS;
    if (known && !can_fit(gs_current_place().card, limit, before, value))
        return CUDA_ERROR_OUT_OF_MEMORY;
    LOAD(cuCtxSetLimit, (limit, value), key_of_limit(load.context, limit), if (known) DRIVER(cuCtxSetLimit)(limit, before))
}

static void unloaded(struct gs_card *card, uint64_t key)
{
    if (card->index < GPUSLICE_CARDS && !gs_measure(card))
        gs_drop_piece(card, key);
}

#define UNLOAD(symbol, type)                                                                                                   \
    int symbol(type handle)                                                                                                    \
    {                                                                                                                          \
        struct gs_card *card = gs_current_place().card;                                                                        \
        int result = DRIVER(symbol)(handle);                                                                                   \
        if (card && result == CUDA_SUCCESS)                                                                                    \
            unloaded(card, gs_key(handle));                                                                                    \
        return result;                                                                                                         \
    }

UNLOAD(cuModuleUnload, CUmodule)
UNLOAD(cuLibraryUnload, CUlibrary)
