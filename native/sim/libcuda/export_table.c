/* cuGetExportTable: tables of private functions that NVIDIA's runtime asks for.
 *
 * Nothing of them is documented. What was seen from outside: a table's first word is its size in bytes; the runtime
 * calls few entries and goes on when they answer success and, where it asked for arrays of switches, when these are
 * long enough. Its own state per context it keeps in a table without a size, which therefore has to work.
 */
#include <stdlib.h>
#include <string.h>

#include "driver.h"

typedef const void *entry; /* of a function of whatever type */

static int nothing(void) { return CUDA_SUCCESS; }

/* ------------------------------------------------------------------------------------ the plain table */

#define ENTRIES 127

struct table {
    size_t bytes;
    entry entries[ENTRIES];
};

static const struct table plain = {.bytes = sizeof plain, .entries = {[0 ... ENTRIES - 1] = nothing}};

/* ------------------------------------------------------------- memory by a table that nobody knows */

/* Stands for whatever a driver's private tables may offer: memory to a program that means harm, a context or code to
 * the runtime and to libraries that draw. Nothing can be told of it. */
CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes);
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device);
CUresult cuModuleLoadData(CUmodule *made, const void *image);
static const struct table memory = {
    .bytes = sizeof memory,
    .entries = {cuMemAlloc_v2, cuDevicePrimaryCtxRetain, cuModuleLoadData, [3 ... ENTRIES - 1] = nothing}};

/* ------------------------------------------------------------- what the runtime works with (6bd5fb6c) */

static CUresult primary_of(CUcontext *context, CUdevice ordinal)
{
    struct device *device;
    TRY(device_of(ordinal, &device));
    *context = device->primary;
    return CUDA_SUCCESS;
}

/* Elsewhere in this driver; exported, and so declared nowhere. */
CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared, CUstream stream, void **parameters, void **extra);

/* How a runtime up to 11.1 loads the code that nvcc put into a program, and, in some versions, launches it. That these
 * are their places and parameters is documented by open-source projects that reimplement the driver. */
static CUresult load_wrapped(CUmodule *module, const void *wrapper) { return cuModuleLoadData(module, wrapper); }

static CUresult load_bare(const void *image, CUmodule *module) { return cuModuleLoadData(module, image); }

static const struct table runtime = {.bytes = sizeof runtime,
                                     .entries = {load_wrapped, primary_of, [2 ... 4] = nothing, load_wrapped, nothing,
                                                 load_bare, cuLaunchKernel, [9 ... ENTRIES - 1] = nothing}};

/* ------------------------------------------------------------------ switches of callbacks (a094798c) */

#define SWITCHES 2048
static uint64_t switches[SWITCHES]; /* all off: nobody listens */

static CUresult get_switches(void **array, size_t *count)
{
    *array = switches;
    *count = SWITCHES;
    return CUDA_SUCCESS;
}

static const struct table callbacks = {
    .bytes = sizeof callbacks,
    .entries = {nothing, get_switches, [2 ... 4] = nothing, get_switches, [6 ... ENTRIES - 1] = nothing}};

/* ---------------------------------------------------------------- state kept by context (c693336e) */

typedef void (*destructor)(CUcontext context, void *key, void *value);

struct kept {
    CUcontext context;
    void *key, *value;
    destructor destroy;
    struct kept *next;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct kept *all_kept;

static CUcontext or_current(CUcontext context)
{
    struct context *current;
    return context ? context : context_current(&current) == CUDA_SUCCESS ? current : NULL;
}

static CUresult keep(CUcontext context, void *key, void *value, destructor destroy)
{
    struct kept *kept = malloc(sizeof *kept);
    if (!kept)
        return CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&mutex);
    *kept = (struct kept){or_current(context), key, value, destroy, all_kept};
    all_kept = kept;
    pthread_mutex_unlock(&mutex);
    return CUDA_SUCCESS;
}

static struct kept *take(CUcontext context, const void *key, bool any_key)
{
    pthread_mutex_lock(&mutex);
    struct kept **link = &all_kept;
    while (*link && !((*link)->context == context && (any_key || (*link)->key == key)))
        link = &(*link)->next;
    struct kept *found = *link;
    if (found)
        *link = found->next;
    pthread_mutex_unlock(&mutex);
    return found;
}

static CUresult drop(CUcontext context, void *key)
{
    struct kept *found = take(or_current(context), key, false);
    free(found);
    return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

static CUresult look_up(void **value, CUcontext context, void *key)
{
    CUcontext wanted = or_current(context);
    pthread_mutex_lock(&mutex);
    const struct kept *kept = all_kept;
    while (kept && !(kept->context == wanted && kept->key == key))
        kept = kept->next;
    if (kept)
        *value = kept->value;
    pthread_mutex_unlock(&mutex);
    return kept ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

void kept_drop_all(struct context *context)
{
    for (struct kept *kept; (kept = take(context, NULL, true));) {
        if (kept->destroy)
            kept->destroy(context, kept->key, kept->value);
        free(kept);
    }
}

static const entry context_state[ENTRIES] = {keep, drop, look_up, [3 ... ENTRIES - 1] = nothing};

/* --------------------------------------------------------------------------------------------- by name */

static const struct named {
    unsigned char id[16];
    const void *table;
} named[] = {
    {{0x6b, 0xd5, 0xfb, 0x6c, 0x5b, 0xf4, 0xe7, 0x4a, 0x89, 0x87, 0xd9, 0x39, 0x12, 0xfd, 0x9d, 0xf9}, &runtime},
    {{0xa0, 0x94, 0x79, 0x8c, 0x2e, 0x74, 0x2e, 0x74, 0x93, 0xf2, 0x08, 0x00, 0x20, 0x0c, 0x0a, 0x66}, &callbacks},
    {{0xc6, 0x93, 0x33, 0x6e, 0x11, 0x21, 0xdf, 0x11, 0xa8, 0xc3, 0x68, 0xf3, 0x55, 0xd8, 0x95, 0x93}, context_state},
    {{'g', 'p', 'u', 's', 'i', 'm', ':', ' ', 'm', 'e', 'm', 'o', 'r', 'y', ' ', '1'}, &memory},
};

EXPORT CUresult cuGetExportTable(const void **table, const CUuuid *id)
{
    if (!table || !id)
        return CUDA_ERROR_INVALID_VALUE;
    *table = &plain;
    for (size_t i = 0; i < sizeof named / sizeof *named; i++)
        if (memcmp(id->bytes, named[i].id, sizeof named[i].id) == 0)
            *table = named[i].table;
    return CUDA_SUCCESS;
}
