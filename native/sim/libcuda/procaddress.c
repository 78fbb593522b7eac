/* cuGetProcAddress: the newest form of a name that the asked version and this driver have. */
#include "driver.h"
#include "symbols.h"

static CUresult find(const char *name, void **address, int version, uint64_t flags, int *status)
{
    const struct sim_state *state = sim_attach();
    bool known = false;
    if (!name || !address || flags & ~UINT64_C(3) || flags == 3 || (state && version > (int)state->cuda_version))
        return CUDA_ERROR_INVALID_VALUE;
    const struct symbol *symbol = symbol_find(name, version, flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM, &known);
    *address = symbol ? symbol->address : NULL;
    *status = symbol  ? CU_GET_PROC_ADDRESS_SUCCESS
              : known ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
                      : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return CUDA_SUCCESS;
}

/* The form of 11.3 has no status: a name it does not find is an error. */
EXPORT CUresult cuGetProcAddress(const char *name, void **address, int version, uint64_t flags)
{
    int status = CU_GET_PROC_ADDRESS_SUCCESS;
    TRY(find(name, address, version, flags, &status));
    return status == CU_GET_PROC_ADDRESS_SUCCESS ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

EXPORT CUresult cuGetProcAddress_v2(const char *name, void **address, int version, uint64_t flags, int *status)
{
    int ignored;
    return find(name, address, version, flags, status ? status : &ignored);
}
