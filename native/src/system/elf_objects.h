/* The dynamic section and the symbols of each loaded object. A source file that includes this must define _GNU_SOURCE. */
#ifndef GPUSLICE_ELF_OBJECTS_H
#define GPUSLICE_ELF_OBJECTS_H

#include <elf.h>
#include <link.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef int (*gs_elf_visit)(struct dl_phdr_info *, size_t, void *);
/* Visits the objects in load order until a visit returns nonzero. A visit must not load anything or look up a symbol. */
int gs_elf_each_object(gs_elf_visit visit, void *context);

struct gs_elf_symbols {
    const ElfW(Sym) * table;
    const char *names;
    const uint32_t *gnu_hash;
    const uint32_t *sysv_hash;
};

bool gs_elf_holds(const struct dl_phdr_info *object, const void *address);
const ElfW(Dyn) * gs_elf_dynamic(const struct dl_phdr_info *object);
const void *gs_elf_pointer(uintptr_t base, const ElfW(Dyn) * entry);
bool gs_elf_symbols(uintptr_t base, const ElfW(Dyn) * dynamic, struct gs_elf_symbols *symbols);
uint32_t gs_elf_hash(const char *name);
/* The object's definition of this name and type (STT_FUNC, STT_OBJECT); NULL if it has none. */
const ElfW(Sym) * gs_elf_symbol(const struct gs_elf_symbols *symbols, const char *name, uint32_t hash, int type);
const void *gs_elf_function_in(uintptr_t base, const ElfW(Dyn) * dynamic, const char *name);
/* Whether this is libc itself rather than another preloaded library: a tool that overrides dlsym would return our own
 * hooks. */
bool gs_elf_is_libc(const char *path);

#endif
