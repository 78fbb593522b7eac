#include "entry/proc_address.h"

#include "entry/entries.h"
#include "entry/hook_table.h"

enum { CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT = 2 };

/* False if the function that was found is newer than this library. The program is told that it does not exist, as an older driver
 * would. */
static bool replace(const char *name, void **function, int version, uint64_t flags)
{
    if (!name || !*function)
        return true;
    int hook = gs_hook_variant(name, version, flags, *function);
    bool known = hook >= 0 || !gs_is_unknown_form(name, *function);
    void *entry = known ? gs_entry_for(CUDA, hook, hook < 0 ? name : gs_hook_symbol(hook), *function) : NULL;
    if (entry || !known)
        *function = entry;
    return known;
}

static int ask(gs_type_cuGetProcAddress own, const char *name, void **function, int version, uint64_t flags)
{
    int result = own(name, function, version, flags);
    bool known = result != CUDA_SUCCESS || !function || replace(name, function, version, flags);
    return known ? result : CUDA_ERROR_NOT_FOUND;
}

static int ask_v2(gs_type_cuGetProcAddress_v2 own, const char *name, void **function, int version, uint64_t flags, int *status)
{
    int result = own(name, function, version, flags, status);
    if (result != CUDA_SUCCESS || !function || replace(name, function, version, flags))
        return result;
    if (status)
        *status = CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT;
    return CUDA_ERROR_NOT_FOUND;
}

int cuGetProcAddress(const char *name, void **function, int version, uint64_t flags)
{
    return ask(DRIVER(cuGetProcAddress), name, function, version, flags);
}

int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status)
{
    return ask_v2(DRIVER(cuGetProcAddress_v2), name, function, version, flags, status);
}

int gs_candidate_proc_address(const char *name, void **function, int version, uint64_t flags)
{
    return ask((gs_type_cuGetProcAddress)gs_entry_own(), name, function, version, flags);
}

int gs_candidate_proc_address_v2(const char *name, void **function, int version, uint64_t flags, int *status)
{
    return ask_v2((gs_type_cuGetProcAddress_v2)gs_entry_own(), name, function, version, flags, status);
}
