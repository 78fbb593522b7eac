/* Since CUDA 12.2 the driver loads a kernel's code when the kernel is first looked up or launched. Where NVML has a figure for
 * this process, the next measurement includes the code. Elsewhere, the memory that the card loses during that call is charged
 * as code. Since a neighbour may grow at the same moment, that is limited per call and per context. */
#include "hooks/kernels.h"

#include "hooks/place.h"
#include "policy/process_usage.h"
#include "system/at_fork.h"
#include "system/table.h"

#define LARGEST_CODE_BYTES (UINT64_C(64) << 20) /* of one first launch: code, and the local memory that it needs */
#define MOST_CODE_BYTES (UINT64_C(1) << 30)     /* in a context */

bool gs_kernels_watched GS_PER_PROCESS;
CUfunction
    gs_kernels_seen[GS_KERNELS_AT_HAND] GS_PER_PROCESS; /* a cache of those launched last, by a few bits of their address */

static struct gs_table launched GS_TABLE_PER_PROCESS; /* all functions launched so far */
static _Atomic bool measuring GS_PER_PROCESS; /* one thread at a time: otherwise each of two would be charged for both */

static _Thread_local struct {
    struct gs_place place;
    struct gs_snapshot before;
    bool measured;
} first __attribute__((tls_model("initial-exec")));

void gs_watch_kernels(void) { __atomic_store_n(&gs_kernels_watched, true, __ATOMIC_RELAXED); }

static void forget(void) { first.measured = false; }
GS_AT_FORK(forget);

static bool is_known(CUfunction function)
{
    struct gs_entry entry = {.key = (uint64_t)(uintptr_t)function};
    bool known = !function || gs_table_get(&launched, entry.key, &entry) || !gs_table_put(&launched, &entry);
    __atomic_store_n(&gs_kernels_seen[gs_kernel_place(function)], function, __ATOMIC_RELAXED);
    return known;
}

void gs_code_may_come(void)
{
    bool nobody = false;
    first.measured = __atomic_load_n(&gs_kernels_watched, __ATOMIC_RELAXED) && !gs_nvml_pid_known() &&
                     atomic_compare_exchange_strong(&measuring, &nobody, true);
    if (!first.measured)
        return;
    first.before.known = false;
    first.place = gs_current_place();
    if (first.place.card && first.place.card->index < GPUSLICE_CARDS)
        gs_snapshot(first.place.card, &first.before, NULL);
}

void gs_first_launch(CUfunction function)
{
    first.measured = false;
    if (!is_known(function))
        gs_code_may_come();
}

/* Handles are aligned, so this differs from the key of the context itself. */
static uint64_t key_of_code(CUcontext context) { return (uint64_t)(uintptr_t)context + 3; }

static void charge_code(void)
{
    struct gs_snapshot after;
    struct gs_card *card = first.place.card;
    gs_snapshot(card, &after, NULL);
    if (!after.known || after.held != first.before.held || after.used <= first.before.used)
        return;
    uint64_t grown = after.used - first.before.used, key = key_of_code(first.place.context);
    if (grown <= LARGEST_CODE_BYTES && gs_piece(key) + grown <= MOST_CODE_BYTES)
        gs_add_piece(card, key, (uint64_t)(uintptr_t)first.place.context, (int64_t)grown);
}

int gs_code_came(int result)
{
    if (!first.measured)
        return result;
    if (first.before.known && result == CUDA_SUCCESS)
        charge_code();
    first.measured = false;
    measuring = false;
    return result;
}

/* ---- calls that may load code before it is launched ---- */

#define BRING(symbol, parameters, call)                                                                                        \
    int symbol parameters                                                                                                      \
    {                                                                                                                          \
        gs_code_may_come();                                                                                                    \
        return gs_code_came(DRIVER(symbol) call);                                                                              \
    }

BRING(cuLibraryGetModule, (CUmodule * module, CUlibrary library), (module, library))
BRING(cuKernelGetFunction, (CUfunction * function, CUkernel kernel), (function, kernel))
BRING(cuFuncLoad, (CUfunction function), (function))
BRING(cuModuleGetFunction, (CUfunction * function, CUmodule module, const char *name), (function, module, name))
