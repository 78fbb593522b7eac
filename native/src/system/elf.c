#define _GNU_SOURCE
#include "system/elf.h"

#include <elf.h>
#include <link.h>
#include <stdint.h>

#include "system/text.h"

struct symbols {
    const ElfW(Sym) * table;
    const char *names;
    const uint32_t *gnu_hash;
    const uint32_t *sysv_hash;
};

static bool holds(const struct dl_phdr_info *object, const void *address)
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

static const ElfW(Dyn) * dynamic_section(const struct dl_phdr_info *object)
{
    for (int i = 0; i < object->dlpi_phnum; i++)
        if (object->dlpi_phdr[i].p_type == PT_DYNAMIC)
            return (const ElfW(Dyn) *)(object->dlpi_addr + object->dlpi_phdr[i].p_vaddr);
    return NULL;
}

/* glibc leaves absolute addresses in the section, musl and the vdso relative ones. */
static const void *pointer(uintptr_t base, const ElfW(Dyn) * entry)
{
    uintptr_t at = entry->d_un.d_ptr;
    return (const void *)(at < base ? at + base : at);
}

static bool find_symbols(uintptr_t base, const ElfW(Dyn) * entry, struct symbols *symbols)
{
    *symbols = (struct symbols){0};
    for (; entry && entry->d_tag != DT_NULL; entry++) {
        if (entry->d_tag == DT_SYMTAB)
            symbols->table = pointer(base, entry);
        else if (entry->d_tag == DT_STRTAB)
            symbols->names = pointer(base, entry);
        else if (entry->d_tag == DT_GNU_HASH)
            symbols->gnu_hash = pointer(base, entry);
        else if (entry->d_tag == DT_HASH)
            symbols->sysv_hash = pointer(base, entry);
    }
    return symbols->table && symbols->names;
}

static bool defines(const struct symbols *symbols, uint32_t index, const char *name)
{
    const ElfW(Sym) *symbol = &symbols->table[index];
    return symbol->st_shndx != SHN_UNDEF && ELF64_ST_TYPE(symbol->st_info) == STT_FUNC &&
           gs_text_equal(symbols->names + symbol->st_name, name);
}

static uint32_t find_by_gnu_hash(const struct symbols *symbols, const char *name)
{
    const uint32_t *header = symbols->gnu_hash;
    uint32_t bucket_count = header[0], first = header[1], bloom_words = header[2];
    const uint32_t *buckets = header + 4 + bloom_words * (sizeof(ElfW(Addr)) / sizeof(uint32_t));
    const uint32_t *chain = buckets + bucket_count;
    uint32_t hash = 5381;
    for (const unsigned char *c = (const unsigned char *)name; *c; c++)
        hash = hash * 33 + *c;
    uint32_t index = bucket_count ? buckets[hash % bucket_count] : 0;
    if (index < first)
        return 0;
    do
        if ((chain[index - first] | 1) == (hash | 1) && defines(symbols, index, name))
            return index;
    while (!(chain[index++ - first] & 1));
    return 0;
}

static uint32_t find_by_count(const struct symbols *symbols, const char *name)
{
    for (uint32_t index = 1; index < symbols->sysv_hash[1]; index++)
        if (defines(symbols, index, name))
            return index;
    return 0;
}

static const void *function_in(uintptr_t base, const ElfW(Dyn) * dynamic, const char *name)
{
    struct symbols symbols;
    if (!find_symbols(base, dynamic, &symbols))
        return NULL;
    uint32_t index = symbols.gnu_hash    ? find_by_gnu_hash(&symbols, name)
                     : symbols.sysv_hash ? find_by_count(&symbols, name)
                                         : 0;
    return index ? (const void *)(base + symbols.table[index].st_value) : NULL;
}

/* libc's own, not another preload library's: a program's tool that overrides dlsym would answer with our own hooks. */
static bool is_libc(const char *path)
{
    static const char *const names[] = {"libc.so", "libdl.so", "libc.musl-", "ld-musl-", "libc-2.", "libdl-2."};
    const char *file = gs_text_file_name(path);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (gs_text_starts(file, names[i]))
            return true;
    return false;
}

typedef int (*visit_function)(struct dl_phdr_info *, size_t, void *);
typedef int (*iterate_function)(visit_function, void *);

/* glibc's loader exports its list to debuggers, from the first program on and libc among the first of it, before anything that
 * may be unloaded under our eyes. musl has no such name. */
extern struct r_debug _r_debug __attribute__((weak));

static iterate_function find_iterate(void)
{
    struct link_map *object = &_r_debug ? _r_debug.r_map : NULL;
    const void *found = NULL;
    for (; object && !found; object = object->l_next)
        if (is_libc(object->l_name))
            found = function_in(object->l_addr, object->l_ld, "dl_iterate_phdr");
    return found ? (iterate_function)found : dl_iterate_phdr;
}

/* libc's own too: a tool in front of it looks that up by dlsym, which is us, or shows what was loaded when it started. */
static int each_object(visit_function visit, void *context)
{
    static iterate_function libc;
    iterate_function iterate = __atomic_load_n(&libc, __ATOMIC_RELAXED);
    if (!iterate) {
        iterate = find_iterate();
        __atomic_store_n(&libc, iterate, __ATOMIC_RELAXED);
    }
    return iterate(visit, context);
}

struct search {
    const char *name;
    const void *found;
};

static int search_object(struct dl_phdr_info *object, size_t size, void *context)
{
    (void)size;
    struct search *search = context;
    if (holds(object, (const void *)gs_elf_function))
        return 0;
    search->found = function_in(object->dlpi_addr, dynamic_section(object), search->name);
    return search->found != NULL;
}

static int search_libc(struct dl_phdr_info *object, size_t size, void *context)
{
    return is_libc(object->dlpi_name) ? search_object(object, size, context) : 0;
}

void *gs_elf_function(const char *name)
{
    struct search search = {name, NULL};
    if (!each_object(search_libc, &search))
        each_object(search_object, &search);
    return (void *)search.found;
}

struct path_search {
    const void *address;
    char *path;
    size_t room;
};

static int copy_path(struct dl_phdr_info *object, size_t size, void *context)
{
    (void)size;
    struct path_search *search = context;
    if (!holds(object, search->address))
        return 0;
    size_t length = 0;
    while (length < search->room && (search->path[length] = object->dlpi_name[length]))
        length++;
    return length < search->room ? 1 : -1;
}

bool gs_elf_path_of(const void *address, char *path, size_t room)
{
    struct path_search search = {address, path, room};
    return each_object(copy_path, &search) == 1;
}

bool gs_elf_own_path(char *path, size_t room) { return gs_elf_path_of((const void *)gs_elf_function, path, room); }

static int compare_file_name(struct dl_phdr_info *object, size_t size, void *context)
{
    (void)size;
    return gs_text_starts(gs_text_file_name(object->dlpi_name), context);
}

bool gs_elf_is_loaded(const char *file_name)
{
    return each_object(compare_file_name, (void *)file_name) == 1;
}

/* A copy under another name says in its file what it is. */
static bool is_named(const struct dl_phdr_info *object, const char *file_name)
{
    const char *names = NULL;
    uintptr_t soname = 0;
    if (gs_text_starts(gs_text_file_name(object->dlpi_name), file_name))
        return true;
    for (const ElfW(Dyn) *entry = dynamic_section(object); entry && entry->d_tag != DT_NULL; entry++) {
        if (entry->d_tag == DT_STRTAB)
            names = pointer(object->dlpi_addr, entry);
        else if (entry->d_tag == DT_SONAME)
            soname = entry->d_un.d_val;
    }
    return names && soname && gs_text_starts(names + soname, file_name);
}

struct whereabouts {
    const void *address;
    const char *file_name;
    bool found, named;
};

static int compare_holder(struct dl_phdr_info *object, size_t size, void *context)
{
    (void)size;
    struct whereabouts *it = context;
    it->found = holds(object, it->address);
    it->named = it->found && is_named(object, it->file_name);
    return it->found;
}

bool gs_elf_is_in(const void *address, const char *file_name)
{
    struct whereabouts it = {address, file_name, false, false};
    each_object(compare_holder, &it);
    return it.named;
}

bool gs_elf_is_elsewhere(const void *address, const char *file_name)
{
    struct whereabouts it = {address, file_name, false, false};
    each_object(compare_holder, &it);
    return it.found && !it.named;
}

struct order {
    const void *address;
    bool passed_us;
};

static int stop_at_holder(struct dl_phdr_info *object, size_t size, void *context)
{
    (void)size;
    struct order *order = context;
    if (holds(object, order->address))
        return 1;
    order->passed_us |= holds(object, (const void *)gs_elf_function);
    return 0;
}

bool gs_elf_is_behind(const void *address)
{
    struct order order = {address, false};
    return each_object(stop_at_holder, &order) == 1 && order.passed_us;
}
