/* A library linked with the driver, to be opened with RTLD_DEEPBIND: it prefers its own dependencies' symbols. */
#include <dlfcn.h>
#include <string.h>

#include "driver/driver_abi.h"

#define HOOK(library, symbol, name, since, stream, parameters) __attribute__((weak)) int symbol parameters;
#define BORROW(library, symbol, parameters) __attribute__((weak)) int symbol parameters;
#include "driver/hooks.def"

__attribute__((visibility("default"))) void *plug_function(const char *wanted)
{
    static const struct {
        const char *symbol;
        void *address;
    } functions[] = {
#define HOOK(library, symbol, name, since, stream, parameters) {#symbol, (void *)symbol},
#define BORROW(library, symbol, parameters) {#symbol, (void *)symbol},
#include "driver/hooks.def"
    };
    for (unsigned i = 0; i < sizeof functions / sizeof *functions; i++)
        if (strcmp(functions[i].symbol, wanted) == 0)
            return functions[i].address;
    return dlsym(RTLD_DEFAULT, wanted);
}
