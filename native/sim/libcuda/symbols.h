/* Names, versions and stream modes of the driver's entry points. */
#ifndef GPUSLICE_SIM_SYMBOLS_H
#define GPUSLICE_SIM_SYMBOLS_H

#include <stdbool.h>

struct symbol {
    const char *name;
    int since; /* CUDA version, 11020 for 11.2 */
    bool per_thread;
    void *address;
};

/* The newest form up to the version; NULL when there is none, and then whether the name is known at all. */
const struct symbol *symbol_find(const char *name, int version, bool per_thread, bool *known);

#endif
