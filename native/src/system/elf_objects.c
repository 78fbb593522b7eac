#define _GNU_SOURCE
#include "system/elf_objects.h"

#include "system/text.h"

bool gs_elf_holds(const struct dl_phdr_info *object, const void *address)
{
    uintptr_t at = (uintptr_t)address;
    for (int i = 0; i < object->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &object->dlpi_phdr[i];
        uintptr_t start = object->dlpi_addr + part->p_vaddr;
        if (part->p_type == PT_LOAD && at >= start && at < start + part->p_memsz)
            return true;
    }
    return false;
}

const ElfW(Dyn) * gs_elf_dynamic(const struct dl_phdr_info *object)
{
    for (int i = 0; i < object->dlpi_phnum; i++)
        if (object->dlpi_phdr[i].p_type == PT_DYNAMIC)
            return (const ElfW(Dyn) *)(object->dlpi_addr + object->dlpi_phdr[i].p_vaddr);
    return NULL;
}

/* glibc relocates the addresses in the dynamic section; musl and the vdso leave them as they were linked. The vdso of
 * gVisor, and of old x86-64 kernels (VDSO_PRELINK), is linked in the kernel's half of the address space. */
const void *gs_elf_pointer(uintptr_t base, const ElfW(Dyn) * entry)
{
    uintptr_t at = entry->d_un.d_ptr;
    return (const void *)(at < base || at > INTPTR_MAX ? at + base : at);
}

bool gs_elf_symbols(uintptr_t base, const ElfW(Dyn) * entry, struct gs_elf_symbols *symbols)
{
    *symbols = (struct gs_elf_symbols){0};
    for (; entry && entry->d_tag != DT_NULL; entry++) {
        if (entry->d_tag == DT_SYMTAB)
            symbols->table = gs_elf_pointer(base, entry);
        else if (entry->d_tag == DT_STRTAB)
            symbols->names = gs_elf_pointer(base, entry);
        else if (entry->d_tag == DT_GNU_HASH)
            symbols->gnu_hash = gs_elf_pointer(base, entry);
        else if (entry->d_tag == DT_HASH)
            symbols->sysv_hash = gs_elf_pointer(base, entry);
    }
    return symbols->table && symbols->names;
}

static bool defines(const struct gs_elf_symbols *symbols, uint32_t index, const char *name, int type)
{
    const ElfW(Sym) *symbol = &symbols->table[index];
    return symbol->st_shndx != SHN_UNDEF && ELF64_ST_TYPE(symbol->st_info) == type &&
           gs_text_equal(symbols->names + symbol->st_name, name);
}

uint32_t gs_elf_hash(const char *name)
{
    uint32_t hash = 5381;
    for (const unsigned char *c = (const unsigned char *)name; *c; c++)
        hash = hash * 33 + *c;
    return hash;
}

/* The table's Bloom filter quickly excludes most names that the object does not define. */
static bool may_define(const uint32_t *header, uint32_t hash)
{
    const ElfW(Addr) *filter = (const ElfW(Addr) *)(header + 4);
    ElfW(Addr) word = filter[hash / 64 % header[2]];
    return word >> hash % 64 & word >> (hash >> header[3]) % 64 & 1;
}

static uint32_t find_by_gnu_hash(const struct gs_elf_symbols *symbols, const char *name, uint32_t hash, int type)
{
    const uint32_t *header = symbols->gnu_hash;
    uint32_t bucket_count = header[0], first = header[1], filter_words = header[2];
    const uint32_t *buckets = header + 4 + filter_words * (sizeof(ElfW(Addr)) / sizeof(uint32_t));
    const uint32_t *chain = buckets + bucket_count;
    if (!bucket_count || !filter_words || !may_define(header, hash))
        return 0;
    uint32_t index = buckets[hash % bucket_count];
    if (index < first)
        return 0;
    do
        if ((chain[index - first] | 1) == (hash | 1) && defines(symbols, index, name, type))
            return index;
    while (!(chain[index++ - first] & 1));
    return 0;
}

static uint32_t find_by_count(const struct gs_elf_symbols *symbols, const char *name, int type)
{
    for (uint32_t index = 1; index < symbols->sysv_hash[1]; index++)
        if (defines(symbols, index, name, type))
            return index;
    return 0;
}

const ElfW(Sym) * gs_elf_symbol(const struct gs_elf_symbols *symbols, const char *name, uint32_t hash, int type)
{
    uint32_t index = symbols->gnu_hash    ? find_by_gnu_hash(symbols, name, hash, type)
                     : symbols->sysv_hash ? find_by_count(symbols, name, type)
                                          : 0;
    return index ? &symbols->table[index] : NULL;
}

const void *gs_elf_function_in(uintptr_t base, const ElfW(Dyn) * dynamic, const char *name)
{
    struct gs_elf_symbols symbols;
    const ElfW(Sym) *symbol =
        gs_elf_symbols(base, dynamic, &symbols) ? gs_elf_symbol(&symbols, name, gs_elf_hash(name), STT_FUNC) : NULL;
    return symbol ? (const void *)(base + symbol->st_value) : NULL;
}

bool gs_elf_is_libc(const char *path)
{
    static const char *const names[] = {"libc.so", "libdl.so", "libc.musl-", "ld-musl-", "libc-2.", "libdl-2."};
    const char *file = gs_text_file_name(path);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (gs_text_starts(file, names[i]))
            return true;
    return false;
}

typedef int (*iterate_function)(gs_elf_visit, void *);

/* glibc's loader exports the list of objects for debuggers. It starts with the program, and libc comes before any object
 * that could be unloaded while we read the list. musl does not have this symbol. */
extern struct r_debug _r_debug __attribute__((weak));

static iterate_function find_iterate(void)
{
    struct link_map *object = &_r_debug ? _r_debug.r_map : NULL;
    const void *found = NULL;
    for (; object && !found; object = object->l_next)
        if (gs_elf_is_libc(object->l_name))
            found = gs_elf_function_in(object->l_addr, object->l_ld, "dl_iterate_phdr");
    return found ? (iterate_function)found : dl_iterate_phdr;
}

/* This must also be libc's own function: a tool that overrides it either looks up the original by dlsym, which leads back
 * to us, or reports the objects that were loaded when it started. */
int gs_elf_each_object(gs_elf_visit visit, void *context)
{
    static iterate_function libc;
    iterate_function iterate = __atomic_load_n(&libc, __ATOMIC_RELAXED);
    if (!iterate) {
        iterate = find_iterate();
        __atomic_store_n(&libc, iterate, __ATOMIC_RELAXED);
    }
    return iterate(visit, context);
}
