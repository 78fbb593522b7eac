/* Starting, versions and the text of errors. */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "driver.h"

/* What cuInit answers in a libcuda that does not fit the kernel module, 0 in one that does. CUDA_ERROR_SYSTEM_DRIVER_MISMATCH:
 * "a mismatch between the versions of the display driver and the CUDA driver" (CUDA Driver API, CUresult; CUDA Compatibility,
 * "Frequently asked questions", for copies in /usr/local/cuda/compat). Its version is its own. */
#ifndef SIM_MISFIT
#define SIM_MISFIT 0
#define SIM_MISFIT_VERSION 0
#endif

unsigned device_count;
struct device devices[SIM_CARDS];

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static _Atomic int status = CUDA_ERROR_NOT_INITIALIZED;

/* As with the real driver a child of a process that used CUDA cannot use it. */
static void in_child(void) { atomic_store(&status, CUDA_ERROR_NOT_INITIALIZED + 10000); }

CUresult driver_started(void)
{
    int now = atomic_load_explicit(&status, memory_order_acquire);
    return now > 10000 ? now - 10000 : now;
}

CUresult driver_ready(void)
{
    CUresult result = driver_started();
    uint32_t self = result == CUDA_SUCCESS ? sim_self_if_any() : SIM_PROCESSES;
    if (self != SIM_PROCESSES)
        checkpoint_await(&sim_state()->processes[self]);
    return result;
}

static CUresult start(void)
{
    struct sim_view view;
    if (SIM_MISFIT) /* the copies in build/sim/{compat,older} */
        return SIM_MISFIT;
    if (!sim_attach())
        return CUDA_ERROR_NO_DEVICE;
    sim_view_of_cuda(&view);
    device_count = view.count;
    for (unsigned i = 0; i < view.count; i++)
        devices[i] = (struct device){.card = view.cards[i], .ordinal = (int)i};
    for (unsigned i = 0; i < view.count; i++) {
        if (!(devices[i].primary = context_new(&devices[i], 0, 3020)))
            return CUDA_ERROR_OUT_OF_MEMORY;
        devices[i].primary->primary = true;
    }
    checkpoint_make_room();
    pthread_atfork(NULL, NULL, in_child);
    return view.count ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

EXPORT CUresult cuInit(unsigned flags)
{
    if (flags)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&mutex);
    if (atomic_load(&status) == CUDA_ERROR_NOT_INITIALIZED) {
        CUresult result = start();
        if (result != CUDA_SUCCESS) { /* a later try may find cards, as with the real driver it rarely does */
            pthread_mutex_unlock(&mutex);
            return result;
        }
        atomic_store_explicit(&status, CUDA_SUCCESS, memory_order_release);
    }
    pthread_mutex_unlock(&mutex);
    return driver_ready();
}

EXPORT CUresult cuDriverGetVersion(int *version)
{
    if (!version)
        return CUDA_ERROR_INVALID_VALUE;
    const struct sim_state *state = sim_attach(); /* this one works before cuInit */
    *version = SIM_MISFIT ? SIM_MISFIT_VERSION : state ? (int)state->cuda_version : 0;
    return CUDA_SUCCESS;
}

struct error_text {
    CUresult code;
    const char *name, *text;
};

static const struct error_text errors[] = {
#define ERROR(code, name, text) {code, "CUDA_" name, text},
#include "errors.def"
#undef ERROR
};

static const struct error_text *find_error(CUresult code)
{
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code)
            return &errors[i];
    return NULL;
}

EXPORT CUresult cuGetErrorName(CUresult code, const char **name)
{
    const struct error_text *error = find_error(code);
    if (!name)
        return CUDA_ERROR_INVALID_VALUE;
    *name = error ? error->name : NULL;
    return error ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuGetErrorString(CUresult code, const char **text)
{
    const struct error_text *error = find_error(code);
    if (!text)
        return CUDA_ERROR_INVALID_VALUE;
    *text = error ? error->text : NULL;
    return error ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuProfilerStart(void) { return driver_ready(); }
EXPORT CUresult cuProfilerStop(void) { return driver_ready(); }
EXPORT CUresult cuProfilerInitialize(const char *config, const char *output, int mode)
{
    (void)config, (void)output, (void)mode;
    return driver_ready();
}
