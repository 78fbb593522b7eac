/* The objects that the dynamic linker has loaded, read from its own tables. This is how libc's dlsym is found without
 * calling dlsym. */
#ifndef GPUSLICE_ELF_H
#define GPUSLICE_ELF_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct link_map;

/* The first definition of a function in a loaded object other than this library; NULL if there is none. */
void *gs_elf_function(const char *name);

/* The path this library was loaded from, as recorded by the dynamic linker. */
bool gs_elf_own_path(char *path, size_t room);

/* The path of the object that contains this address; false if no object does, or if `room` is too small. */
bool gs_elf_path_of(const void *address, char *path, size_t room);
/* The object that contains it where that is in another of dlmopen's namespaces, whose objects we do not see; NULL for one that we
 * see. As long as it is loaded. */
struct link_map *gs_elf_elsewhere(const void *address);

/* A function of this name in the object that contains the address, in whatever namespace. */
const void *gs_elf_function_beside(const void *address, const char *name);
/* Whether one object of ours contains both addresses. */
bool gs_elf_together(const void *one, const void *other);
/* An address in the n-th loaded object whose file name or SONAME starts with this prefix; NULL if there are fewer. */
const void *gs_elf_nth_named(const char *file_name, int n);

/* How many objects were ever loaded. */
uint64_t gs_elf_loaded_ever(void);

/* Whether this address is in an object that was loaded after this library. */
bool gs_elf_is_behind(const void *address);

/* Whether this address is in an object whose file name or SONAME starts with this prefix; and whether it is in an object
 * of another name. Both are false for an object that we cannot see, such as one in another dlmopen() namespace. */
bool gs_elf_is_in(const void *address, const char *file_name);
bool gs_elf_is_elsewhere(const void *address, const char *file_name);

#endif
