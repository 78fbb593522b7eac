/* What the dynamic linker has loaded, read from its own tables: the way to the real dlsym that needs no dlsym. */
#ifndef GPUSLICE_ELF_H
#define GPUSLICE_ELF_H

#include <stdbool.h>
#include <stddef.h>

/* The first definition of a function in a loaded object other than this library; NULL if there is none. */
void *gs_elf_function(const char *name);

/* The path this library was loaded from, as the dynamic linker spells it. */
bool gs_elf_own_path(char *path, size_t room);

/* The path of the object that holds this address; false where none does, or the room is too small. */
bool gs_elf_path_of(const void *address, char *path, size_t room);
/* The same where it lies in another of dlmopen's namespaces, whose objects we do not see; NULL for one that we see. As long as that
 * is loaded. */
const char *gs_elf_path_elsewhere(const void *address);

/* Whether an object whose file name begins so is loaded, e.g. "libcuda.so". */
bool gs_elf_is_loaded(const char *file_name);

/* Whether this address lies in an object that was loaded after this library. */
bool gs_elf_is_behind(const void *address);

/* Whether this address lies in an object whose file name, or the one that it bears in itself, begins so; and whether it lies
 * in another. Neither, where it is in none that we see: of another of dlmopen's namespaces, say. */
bool gs_elf_is_in(const void *address, const char *file_name);
bool gs_elf_is_elsewhere(const void *address, const char *file_name);

#endif
