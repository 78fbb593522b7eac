/* What stands in each loaded object. For sources that define _GNU_SOURCE. */
#ifndef GPUSLICE_ELF_OBJECTS_H
#define GPUSLICE_ELF_OBJECTS_H

#include <elf.h>
#include <link.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef int (*gs_elf_visit)(struct dl_phdr_info *, size_t, void *);
/* In the order in which they were loaded, until a visit returns other than 0. Nothing may be loaded or looked up meanwhile. */
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
/* Its definition of the name, of this type (STT_FUNC, STT_OBJECT); NULL without one. */
const ElfW(Sym) * gs_elf_symbol(const struct gs_elf_symbols *symbols, const char *name, uint32_t hash, int type);
const void *gs_elf_function_in(uintptr_t base, const ElfW(Dyn) * dynamic, const char *name);
/* libc's own, not another preload library's: a program's tool that overrides dlsym would answer with our own hooks. */
bool gs_elf_is_libc(const char *path);

#endif
