/* Modules, libraries, their kernels and globals. Code is not run: an image has a size and names. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "driver.h"

#define FATBIN_WRAPPER 0x466243b1u
#define FATBIN 0xba55ed50u
#define GLOBAL_BYTES (UINT64_C(64) << 10)

struct fatbin_wrapper {
    uint32_t magic, version;
    const void *data;
    void *unused;
};

struct fatbin {
    uint32_t magic;
    uint16_t version, header_bytes;
    uint64_t bytes;
};

/* Where an ELF file's section headers end, which is its end. */
static uint64_t elf_bytes(const unsigned char *image)
{
    uint64_t sections;
    uint16_t entry, count;
    memcpy(&sections, image + 0x28, sizeof sections);
    memcpy(&entry, image + 0x3a, sizeof entry);
    memcpy(&count, image + 0x3c, sizeof count);
    return sections + (uint64_t)entry * count;
}

CUresult module_measure(struct module *module, const void *image)
{
    uint32_t magic = 0;
    *module = (struct module){.bytes = 0};
    if (*(const char *)image == '\0')
        return CUDA_ERROR_INVALID_IMAGE;
    const char *text = image;
    if (strncmp(text, "\177ELF", 4) == 0) {
        module->bytes = elf_bytes(image);
        return CUDA_SUCCESS;
    }
    if (strnlen(text, 4) == 4)
        memcpy(&magic, image, sizeof magic);
    if (magic == FATBIN_WRAPPER)
        return module_measure(module, ((const struct fatbin_wrapper *)image)->data);
    if (magic == FATBIN) {
        module->bytes = ((const struct fatbin *)image)->header_bytes + ((const struct fatbin *)image)->bytes;
        return CUDA_SUCCESS;
    }
    module->ptx = strdup(text);
    module->bytes = strlen(text);
    return CUDA_SUCCESS;
}

CUresult module_load(struct module *module, struct device *device)
{
    static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    uint32_t *record = &module->records[device->ordinal];
    pthread_mutex_lock(&mutex);
    if (!*record)
        *record = charge_slowly(device, SIM_MODULE, sim_round(module->bytes), card_of(device)->module_ns);
    pthread_mutex_unlock(&mutex);
    return *record ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static void forget_globals(struct module *module)
{
    for (struct global *next, *global = module->globals; global; global = next) {
        next = global->next;
        free(global->name);
        free(global);
    }
    module->globals = NULL;
}

static void unload_from(struct module *module, int ordinal)
{
    sim_release(module->records[ordinal]);
    module->records[ordinal] = 0;
}

struct unloading {
    const struct context *context; /* it is inactive already */
    bool last;                     /* and was the last on its device */
};

static void look_for_another(struct object *object, void *with)
{
    struct unloading *unloading = with;
    const struct context *context = (struct context *)object;
    if (context->device == unloading->context->device && context->active)
        unloading->last = false;
}

static void unload_with(struct object *object, void *with)
{
    const struct unloading *unloading = with;
    struct module *module = (struct module *)object;
    if (object->owner != unloading->context && !(module->library && unloading->last))
        return;
    unload_from(module, unloading->context->device->ordinal);
    forget_globals(module);
}

/* A library stays on a device until the last context there ends. Globals' addresses go with the context itself. */
void modules_unload(const struct context *context)
{
    struct unloading unloading = {context, true};
    objects_each(OBJECT_CONTEXT, look_for_another, &unloading);
    objects_each(OBJECT_MODULE, unload_with, &unloading);
}

static void drop_globals(struct module *module)
{
    memory_lock();
    for (struct global *global = module->globals; global; global = global->next)
        allocation_drop(global->allocation);
    memory_unlock();
    forget_globals(module);
}

CUresult module_unload(struct module *module)
{
    for (struct function *next, *function = module->functions; function; function = next) {
        next = function->next;
        object_free(function);
    }
    drop_globals(module);
    for (int ordinal = 0; ordinal < (int)SIM_CARDS; ordinal++)
        unload_from(module, ordinal);
    free(module->ptx);
    object_free(module);
    return CUDA_SUCCESS;
}

/* -------------------------------------------------------------------------------------------- modules */

EXPORT CUresult cuModuleLoadData(CUmodule *made, const void *image)
{
    struct context *context;
    TRY(context_current(&context));
    if (!made || !image)
        return CUDA_ERROR_INVALID_VALUE;
    struct module measured;
    TRY(module_measure(&measured, image));
    struct module *module = object_new(OBJECT_MODULE, sizeof *module, context->memory);
    if (!module)
        return CUDA_ERROR_OUT_OF_MEMORY;
    module->bytes = measured.bytes;
    module->ptx = measured.ptx;
    CUresult result = module_load(module, context->device);
    if (result != CUDA_SUCCESS)
        module_unload(module);
    else
        *made = module;
    return result;
}

EXPORT CUresult cuModuleLoadDataEx(CUmodule *made, const void *image, unsigned count, int *options, void **values)
{
    (void)count, (void)options, (void)values;
    return cuModuleLoadData(made, image);
}

EXPORT CUresult cuModuleLoadFatBinary(CUmodule *made, const void *image) { return cuModuleLoadData(made, image); }

CUresult module_read_file(const char *path, char **content)
{
    FILE *file = path ? fopen(path, "re") : NULL;
    if (!file)
        return CUDA_ERROR_FILE_NOT_FOUND;
    fseek(file, 0, SEEK_END);
    long bytes = ftell(file);
    rewind(file);
    *content = calloc(1, (size_t)bytes + 64); /* an image may be looked at as an ELF header */
    bool complete = *content && fread(*content, 1, (size_t)bytes, file) == (size_t)bytes;
    fclose(file);
    return complete ? CUDA_SUCCESS : CUDA_ERROR_FILE_NOT_FOUND;
}

EXPORT CUresult cuModuleLoad(CUmodule *made, const char *path)
{
    char *image = NULL;
    CUresult result = module_read_file(path, &image);
    if (result == CUDA_SUCCESS)
        result = cuModuleLoadData(made, image);
    free(image);
    return result;
}

EXPORT CUresult cuModuleUnload(CUmodule module)
{
    TRY(driver_ready());
    if (!object_is(module, OBJECT_MODULE) || module->library)
        return CUDA_ERROR_INVALID_HANDLE;
    return module_unload(module);
}

EXPORT CUresult cuModuleGetLoadingMode(int *mode)
{
    TRY(driver_ready());
    if (!mode)
        return CUDA_ERROR_INVALID_VALUE;
    *mode = 2; /* lazy */
    return CUDA_SUCCESS;
}

/* ------------------------------------------------------------------------------------------ functions */

/* "matmul=2000,add=5": microseconds by a part of the name. */
static uint64_t duration_by_name(const char *name)
{
    const char *list = getenv("GPUSLICE_SIM_KERNELS"), *all = getenv("GPUSLICE_SIM_KERNEL_US");
    char part[128];
    for (double us; list && *list; list = strchr(list, ',') ? strchr(list, ',') + 1 : NULL)
        if (sscanf(list, "%127[^=,]=%lf", part, &us) == 2 && strstr(name, part))
            return (uint64_t)(us * 1000);
    return all && *all ? (uint64_t)(strtod(all, NULL) * 1000) : SIM_ABSENT64;
}

/* The name stands in the text after ".entry" and before its parameters. */
static bool ptx_has(const char *ptx, const char *name)
{
    size_t length = strlen(name);
    if (!strstr(ptx, ".entry"))
        return true;
    for (const char *at = ptx; (at = strstr(at, ".entry")); at++) {
        const char *found = at + strlen(".entry");
        found += strspn(found, " \t\r\n");
        if (strncmp(found, name, length) == 0 && strchr(" \t\r\n({", found[length]))
            return true;
    }
    return false;
}

static CUresult function_new(struct module *module, const char *name, struct function **made)
{
    if (module->ptx && !ptx_has(module->ptx, name))
        return CUDA_ERROR_NOT_FOUND;
    struct function *function = object_new(OBJECT_FUNCTION, sizeof *function, module->object.owner);
    if (!function)
        return CUDA_ERROR_OUT_OF_MEMORY;
    function->module = module;
    snprintf(function->name, sizeof function->name, "%s", name);
    function->duration_ns = duration_by_name(name);
    function->duration_from_first = strstr(name, "gpusim_busy_ns") != NULL;
    function->next = module->functions;
    module->functions = function;
    *made = function;
    return CUDA_SUCCESS;
}

static CUresult function_named(struct module *module, const char *name, struct function **found)
{
    static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    CUresult result = CUDA_SUCCESS;
    if (!object_is(module, OBJECT_MODULE))
        return CUDA_ERROR_INVALID_HANDLE;
    if (!found || !name || !*name)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&mutex);
    for (*found = module->functions; *found && strcmp((*found)->name, name) != 0;)
        *found = (*found)->next;
    if (!*found)
        result = function_new(module, name, found);
    pthread_mutex_unlock(&mutex);
    return result;
}

EXPORT CUresult cuModuleGetFunction(CUfunction *found, CUmodule module, const char *name)
{
    TRY(driver_ready());
    return function_named(module, name, found);
}

EXPORT CUresult cuModuleGetFunctionCount(unsigned *count, CUmodule module)
{
    TRY(driver_ready());
    if (!object_is(module, OBJECT_MODULE))
        return CUDA_ERROR_INVALID_HANDLE;
    *count = 0;
    for (const struct function *function = module->functions; function; function = function->next)
        ++*count;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncGetModule(CUmodule *module, CUfunction function)
{
    TRY(driver_ready());
    if (!object_is(function, OBJECT_FUNCTION) || !module)
        return CUDA_ERROR_INVALID_HANDLE;
    *module = function->module;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncGetName(const char **name, CUfunction function)
{
    TRY(driver_ready());
    if (!object_is(function, OBJECT_FUNCTION) || !name)
        return CUDA_ERROR_INVALID_HANDLE;
    *name = function->name;
    return CUDA_SUCCESS;
}

/* Parameters are not known: there is none at any index. */
EXPORT CUresult cuFuncGetParamInfo(CUfunction function, size_t index, size_t *offset, size_t *bytes)
{
    (void)function, (void)index, (void)offset, (void)bytes;
    return CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuFuncIsLoaded(int *loaded, CUfunction function)
{
    TRY(driver_ready());
    if (!object_is(function, OBJECT_FUNCTION) || !loaded)
        return CUDA_ERROR_INVALID_HANDLE;
    *loaded = 1;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncLoad(CUfunction function)
{
    struct context *context;
    TRY(context_current(&context));
    return object_is(function, OBJECT_FUNCTION) ? module_load(function->module, context->device) : CUDA_ERROR_INVALID_HANDLE;
}

/* -------------------------------------------------------------------------------------------- globals */

static struct global *global_new(struct module *module, struct context *context, const char *name)
{
    struct global *global = calloc(1, sizeof *global);
    struct allocation *allocation = global ? allocation_new(GLOBAL_BYTES, ALLOCATION_GLOBAL, context) : NULL;
    if (!allocation) {
        free(global);
        return NULL;
    }
    global->name = strdup(name);
    global->allocation = allocation;
    global->next = module->globals;
    module->globals = global;
    return global;
}

/* A variable of any name, with room for 64 KiB: its bytes are counted with the module's. */
EXPORT CUresult cuModuleGetGlobal_v2(CUdeviceptr *address, size_t *bytes, CUmodule module, const char *name)
{
    struct context *context;
    TRY(context_current(&context));
    if (!object_is(module, OBJECT_MODULE))
        return CUDA_ERROR_INVALID_HANDLE;
    if (!name)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(module_load(module, context->device));
    memory_lock();
    struct global *global = module->globals;
    while (global && strcmp(global->name, name) != 0)
        global = global->next;
    if (!global)
        global = global_new(module, context, name);
    memory_unlock();
    if (global && address)
        *address = global->allocation->address;
    if (bytes)
        *bytes = GLOBAL_BYTES;
    return global ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuModuleGetGlobal(unsigned *address, unsigned *bytes, CUmodule module, const char *name)
{
    CUdeviceptr wide;
    size_t wide_bytes;
    TRY(cuModuleGetGlobal_v2(&wide, &wide_bytes, module, name));
    *address = (unsigned)wide;
    *bytes = (unsigned)wide_bytes;
    return CUDA_SUCCESS;
}
