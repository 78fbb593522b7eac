#define _GNU_SOURCE
#include "driver/driver.h"

#include <dlfcn.h>
#include <link.h>
#include <string.h>

#include "system/elf.h"
#include "system/os.h"

const struct gs_described gs_described[GS_FUNCTIONS] = {
#define HOOK(library, symbol, name, since, stream, parameters) {#symbol, name, true, since, library, stream},
#define BORROW(library, symbol, parameters) {#symbol, "", false, 0, library, EITHER},
#include "driver/hooks.def"
};

static const char *const file_names[GS_LIBRARIES] = {"libcuda.so", "libnvidia-ml.so"};

/* May be called with any arguments, since on our platforms the caller cleans up the stack. */
static int cuda_not_found(void) { return CUDA_ERROR_NOT_FOUND; }
static int nvml_not_found(void) { return NVML_ERROR_FUNCTION_NOT_FOUND; }

void *gs_driver[GS_FUNCTIONS];

bool gs_driver_has(enum gs_function function)
{
    void *address = __atomic_load_n(&gs_driver[function], __ATOMIC_RELAXED);
    return address && address != (void *)cuda_not_found && address != (void *)nvml_not_found;
}

/* libc's own dlsym, bypassing every library that overrides it, including this one. */
static void *libc_dlsym(void *handle, const char *name)
{
    static void *found;
    if (!__atomic_load_n(&found, __ATOMIC_RELAXED))
        __atomic_store_n(&found, gs_elf_function("dlsym"), __ATOMIC_RELAXED);
    void *(*find)(void *, const char *) = (void *(*)(void *, const char *))__atomic_load_n(&found, __ATOMIC_RELAXED);
    return find ? find(handle, name) : NULL;
}

static void *open_library(const char *path, int flags)
{
    void *(*open)(const char *, int) = (void *(*)(const char *, int))gs_elf_function("dlopen");
    return open && path && *path ? open(path, RTLD_LAZY | RTLD_LOCAL | flags) : NULL;
}

static void close_library(void *handle)
{
    int (*close)(void *) = (int (*)(void *))gs_elf_function("dlclose");
    if (close && handle)
        close(handle);
}

/* ---- candidates ---- */

/* Functions that fail until the library is initialised, change nothing and are not hooked. An old copy or a stub may lack some. */
static const char *const questions[GS_LIBRARIES][2] = {{"cuCtxGetCurrent", "cuDeviceGetCount"},
                                                       {"nvmlDeviceGetCount_v2", "nvmlDeviceGetCount"}};
static const char *const initialise[GS_LIBRARIES] = {"cuInit", "nvmlInit_v2"};
static const int uninitialized[GS_LIBRARIES] = {CUDA_ERROR_NOT_INITIALIZED, NVML_ERROR_UNINITIALIZED};

static int ask(enum gs_library library, const void *candidate)
{
    uint64_t answer;
    for (int i = 0; i < 2; i++) {
        int (*question)(void *) = (int (*)(void *))gs_elf_function_beside(candidate, questions[library][i]);
        if (question)
            return question(&answer);
    }
    return uninitialized[library];
}

static void *handles[GS_LIBRARIES]; /* the driver's; we hold it too: its functions stay valid if the program closes it */
static bool bound[GS_LIBRARIES];    /* and its functions are known */
static const void *inside[GS_LIBRARIES];

bool gs_driver_is_bound(enum gs_library library) { return __atomic_load_n(&bound[library], __ATOMIC_ACQUIRE); }

/* A driver may give a function through cuGetProcAddress that it does not export. */
static void *unexported(int function)
{
    void *found = NULL;
    gs_type_cuGetProcAddress ask_for = (gs_type_cuGetProcAddress)gs_driver[GS_cuGetProcAddress];
    uint64_t flags = gs_described[function].stream == OWN ? CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM : 0;
    if (!gs_described[function].name[0] || !ask_for ||
        ask_for(gs_described[function].name, &found, gs_described[function].since, flags) != CUDA_SUCCESS)
        return NULL;
    for (int i = 0; i < GS_FUNCTIONS; i++)
        if (gs_driver[i] == found)
            return NULL; /* another variant, which stands here instead of one that this driver lacks */
    return found;
}

/* No lock is held across what the loader does, which has a lock of its own. Several threads may do this: all look in the library
 * of the first one. */
static void bind(enum gs_library library, void *handle)
{
    void *first = NULL, *absent = library == CUDA ? (void *)cuda_not_found : (void *)nvml_not_found;
    if (!__atomic_compare_exchange_n(&handles[library], &first, handle, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
        close_library(handle);
        handle = first;
    }
    for (int round = 0; round < 2; round++)
        for (int i = 0; i < GS_FUNCTIONS; i++) {
            if (gs_described[i].library != library || gs_driver[i])
                continue;
            void *found = round == 0 ? libc_dlsym(handle, gs_described[i].symbol) : unexported(i);
            if (found || round)
                __atomic_store_n(&gs_driver[i], found ? found : absent, __ATOMIC_RELEASE);
        }
    __atomic_store_n(&inside[library], libc_dlsym(handle, initialise[library]), __ATOMIC_RELEASE);
    __atomic_store_n(&bound[library], true, __ATOMIC_RELEASE);
}

static bool start(enum gs_library library, void *handle)
{
    int (*init)(unsigned) = handle ? (int (*)(unsigned))libc_dlsym(handle, initialise[library]) : NULL;
    return init && init(0) == 0;
}

/* A reference to the candidate's file, so that it is not unloaded. */
static void *hold(const void *candidate)
{
    char path[4096];
    return gs_elf_path_of(candidate, path, sizeof path) ? open_library(path, RTLD_NOLOAD) : NULL;
}

/* A copy in another of dlmopen's namespaces may go with that: the same file in the program's own serves all. Where no further copy
 * can be loaded the copy itself, whose handle glibc's loader gives. */
static void *hold_here(struct link_map *elsewhere, enum gs_library library)
{
    void *handle = open_library(elsewhere->l_name, 0);
    if (handle && start(library, handle))
        return handle;
    close_library(handle);
    return elsewhere;
}

int gs_driver_prove(enum gs_library library, const void *candidate)
{
    if (candidate) {
        int result = ask(library, candidate);
        if (result != 0 || gs_driver_is_bound(library))
            return result;
        struct link_map *elsewhere = gs_elf_elsewhere(candidate);
        void *handle = elsewhere ? hold_here(elsewhere, library) : hold(candidate);
        if (handle)
            bind(library, handle);
        return handle ? 0 : uninitialized[library];
    }
    int first = uninitialized[library];
    for (int n = 0; !gs_driver_is_bound(library) && (candidate = gs_elf_nth_named(file_names[library], n)); n++) {
        void *handle = hold(candidate);
        int result = handle ? gs_driver_prove(library, candidate) : uninitialized[library];
        first = n ? first : result;
        close_library(handle);
    }
    for (int i = 0; !gs_driver_is_bound(library) && i < 2; i++) /* a library of another name that every lookup finds */
        if ((candidate = libc_dlsym(RTLD_NEXT, questions[library][i])))
            gs_driver_prove(library, candidate);
    return gs_driver_is_bound(library) ? 0 : first;
}

bool gs_driver_holds(enum gs_library library, const void *address)
{
    return gs_elf_together(address, gs_driver_is_bound(library) ? __atomic_load_n(&inside[library], __ATOMIC_ACQUIRE)
                                                                : gs_elf_nth_named(file_names[library], 0));
}

bool gs_driver_open_nvml(void)
{
    static bool absent;
    if (gs_driver_prove(NVML, NULL) == 0)
        return true;
    void *handle = __atomic_load_n(&absent, __ATOMIC_RELAXED) ? NULL : open_library("libnvidia-ml.so.1", 0);
    if (!handle)
        __atomic_store_n(&absent, true, __ATOMIC_RELAXED);
    bool started = start(NVML, handle);
    if (started)
        bind(NVML, handle);
    else
        close_library(handle);
    return started;
}

void *gs_driver_symbol(enum gs_library library, const char *name)
{
    return gs_driver_is_bound(library) ? libc_dlsym(handles[library], name) : NULL;
}

void *gs_candidate_symbol(enum gs_library library, const char *name)
{
    const void *candidate = gs_elf_nth_named(file_names[library], 0);
    return candidate ? (void *)gs_elf_function_beside(candidate, name) : libc_dlsym(RTLD_NEXT, name);
}
