#define _GNU_SOURCE
#include "driver/driver.h"

#include <dlfcn.h>
#include <string.h>

#include "system/elf.h"
#include "system/os.h"

enum library { CUDA, NVML, LIBRARIES };

static const struct {
    const char *symbol;
    enum library library;
} functions[GS_FUNCTIONS] = {
#define HOOK(library, symbol, name, since, stream, parameters) {#symbol, library},
#define BORROW(library, symbol, parameters) {#symbol, library},
#include "driver/hooks.def"
};

static const char *const file_names[LIBRARIES] = {"libcuda.so.1", "libnvidia-ml.so.1"};
static const int not_found[LIBRARIES] = {CUDA_ERROR_NOT_FOUND, NVML_ERROR_FUNCTION_NOT_FOUND};

/* May be called with any arguments, since on our platforms the caller cleans up the stack. */
static int cuda_not_found(void) { return not_found[CUDA]; }
static int nvml_not_found(void) { return not_found[NVML]; }

void *gs_driver[GS_FUNCTIONS] = {
#define HOOK(library, symbol, name, since, stream, parameters) [GS_##symbol] = NULL,
#define BORROW(library, symbol, parameters) [GS_##symbol] = NULL,
#include "driver/hooks.def"
};

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

static void *open_library(const char *path)
{
    void *(*open)(const char *, int) = (void *(*)(const char *, int))gs_elf_function("dlopen");
    return open ? open(path, RTLD_LAZY | RTLD_LOCAL) : NULL;
}

/* A program may close the driver that we found through its handle and open it again: a reference of our own keeps it loaded,
 * so that our pointers stay valid. `known` is a function that was found through the handle. The object that contains it is the
 * driver; the handle itself may be that of another library, with functions of the same names. If that object is a copy in another
 * of dlmopen's namespaces, this opens the same file in the program's own namespace. */
static void *hold_library(enum library library, void *handle, const void *known)
{
    char path[4096];
    if (!handle)
        return open_library(file_names[library]);
    const char *elsewhere = gs_elf_path_elsewhere(known);
    void *opened = elsewhere                                           ? open_library(elsewhere)
                   : gs_elf_path_of(known, path, sizeof path) && *path ? open_library(path)
                                                                       : NULL;
    return opened ? opened : handle;
}

static void *handles[LIBRARIES];

static void bind(enum library library, void *handle, const void *known)
{
    void *absent = library == CUDA ? (void *)cuda_not_found : (void *)nvml_not_found;
    handle = hold_library(library, handle, known);
    __atomic_store_n(&handles[library], handle, __ATOMIC_RELEASE);
    for (int i = 0; i < GS_FUNCTIONS; i++) {
        if (functions[i].library != library)
            continue;
        void *found = handle ? libc_dlsym(handle, functions[i].symbol) : NULL;
        __atomic_store_n(&gs_driver[i], found ? found : absent, __ATOMIC_RELEASE);
    }
}

/* Two threads may both do this, with the same result. No lock is held across dlopen(), which has a lock of its own. */
static void bind_once(enum library library, void *handle, const void *known)
{
    static bool bound[LIBRARIES];
    if (__atomic_load_n(&bound[library], __ATOMIC_ACQUIRE))
        return;
    bind(library, handle, known);
    __atomic_store_n(&bound[library], true, __ATOMIC_RELEASE);
}

void gs_bind_cuda(void *handle, const void *known) { bind_once(CUDA, handle, known); }
void gs_bind_nvml(void *handle, const void *known) { bind_once(NVML, handle, known); }

void *gs_driver_symbol(const char *name)
{
    void *handle = __atomic_load_n(&handles[name[0] == 'n' ? NVML : CUDA], __ATOMIC_ACQUIRE);
    return handle ? libc_dlsym(handle, name) : NULL;
}
