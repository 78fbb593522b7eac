/* Libraries: modules that belong to no context and load where they are first used. And the linker before them. */
#include <stdlib.h>
#include <string.h>

#include "driver.h"

EXPORT CUresult cuLibraryLoadData(CUlibrary *made, const void *image, int *jit, void **jit_values, unsigned jit_count,
                                  int *options, void **values, unsigned count)
{
    struct module measured;
    (void)jit, (void)jit_values, (void)jit_count, (void)options, (void)values, (void)count;
    TRY(driver_ready());
    if (!made || !image)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(module_measure(&measured, image));
    struct module *module = object_new(OBJECT_MODULE, sizeof *module, NULL);
    if (!module)
        return CUDA_ERROR_OUT_OF_MEMORY;
    module->library = true;
    module->bytes = measured.bytes;
    module->ptx = measured.ptx;
    *made = module;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuLibraryLoadFromFile(CUlibrary *made, const char *path, int *jit, void **jit_values, unsigned jit_count,
                                      int *options, void **values, unsigned count)
{
    char *image = NULL;
    CUresult result = module_read_file(path, &image);
    if (result == CUDA_SUCCESS)
        result = cuLibraryLoadData(made, image, jit, jit_values, jit_count, options, values, count);
    free(image);
    return result;
}

static CUresult library_known(CUlibrary library)
{
    TRY(driver_ready());
    return object_is(library, OBJECT_MODULE) && library->library ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

EXPORT CUresult cuLibraryUnload(CUlibrary library)
{
    TRY(library_known(library));
    return module_unload(library);
}

EXPORT CUresult cuLibraryGetKernel(CUkernel *found, CUlibrary library, const char *name)
{
    TRY(library_known(library));
    return cuModuleGetFunction(found, library, name);
}

EXPORT CUresult cuLibraryGetKernelCount(unsigned *count, CUlibrary library)
{
    TRY(library_known(library));
    return cuModuleGetFunctionCount(count, library);
}

EXPORT CUresult cuLibraryEnumerateKernels(CUkernel *kernels, unsigned room, CUlibrary library)
{
    unsigned count = 0;
    TRY(library_known(library));
    for (struct function *function = library->functions; function && count < room; function = function->next)
        kernels[count++] = function;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuLibraryGetModule(CUmodule *module, CUlibrary library)
{
    struct context *context;
    TRY(library_known(library));
    TRY(context_current(&context));
    TRY(module_load(library, context->device));
    *module = library;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuLibraryGetGlobal(CUdeviceptr *address, size_t *bytes, CUlibrary library, const char *name)
{
    TRY(library_known(library));
    return cuModuleGetGlobal_v2(address, bytes, library, name);
}

EXPORT CUresult cuLibraryGetManaged(CUdeviceptr *address, size_t *bytes, CUlibrary library, const char *name)
{
    return cuLibraryGetGlobal(address, bytes, library, name);
}

static CUresult kernel_known(CUkernel kernel)
{
    TRY(driver_ready());
    return object_is(kernel, OBJECT_FUNCTION) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

EXPORT CUresult cuKernelGetFunction(CUfunction *function, CUkernel kernel)
{
    struct context *context;
    TRY(kernel_known(kernel));
    TRY(context_current(&context));
    TRY(module_load(kernel->module, context->device));
    *function = kernel;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuKernelGetLibrary(CUlibrary *library, CUkernel kernel)
{
    TRY(kernel_known(kernel));
    *library = kernel->module;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuKernelGetName(const char **name, CUkernel kernel) { return cuFuncGetName(name, kernel); }

EXPORT CUresult cuKernelGetParamInfo(CUkernel kernel, size_t index, size_t *offset, size_t *bytes)
{
    (void)index, (void)offset, (void)bytes;
    TRY(kernel_known(kernel));
    return CUDA_ERROR_INVALID_VALUE;
}

/* --------------------------------------------------------------------------------------- the linker */

struct link {
    struct object object;
};

EXPORT CUresult cuLinkCreate_v2(unsigned count, int *options, void **values, struct link **made)
{
    (void)count, (void)options, (void)values;
    TRY(driver_ready());
    if (!made)
        return CUDA_ERROR_INVALID_VALUE;
    *made = object_new(OBJECT_LINK, sizeof **made, NULL);
    return *made ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult link_known(const struct link *link)
{
    TRY(driver_ready());
    return object_is(link, OBJECT_LINK) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

EXPORT CUresult cuLinkAddData_v2(struct link *link, int type, void *data, size_t bytes, const char *name, unsigned count,
                                 int *options, void **values)
{
    (void)type, (void)data, (void)bytes, (void)name, (void)count, (void)options, (void)values;
    return link_known(link);
}

EXPORT CUresult cuLinkAddFile_v2(struct link *link, int type, const char *path, unsigned count, int *options, void **values)
{
    (void)type, (void)path, (void)count, (void)options, (void)values;
    return link_known(link);
}

/* What comes out is accepted by cuModuleLoadData and has kernels of any name. */
EXPORT CUresult cuLinkComplete(struct link *link, void **image, size_t *bytes)
{
    static char linked[] = "// linked by the simulated driver\n";
    TRY(link_known(link));
    if (image)
        *image = linked;
    if (bytes)
        *bytes = sizeof linked;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuLinkDestroy(struct link *link)
{
    TRY(link_known(link));
    object_free(link);
    return CUDA_SUCCESS;
}
