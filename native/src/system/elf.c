#define _GNU_SOURCE
#include "system/elf.h"

#include <dlfcn.h>

#include "system/elf_objects.h"
#include "system/text.h"

struct search {
    const char *name;
    const void *found;
};

static int search_object(struct dl_phdr_info *object, size_t size, void *context)
{
    (void)size;
    struct search *search = context;
    if (gs_elf_holds(object, (const void *)gs_elf_function))
        return 0;
    search->found = gs_elf_function_in(object->dlpi_addr, gs_elf_dynamic(object), search->name);
    return search->found != NULL;
}

static int search_libc(struct dl_phdr_info *object, size_t size, void *context)
{
    return gs_elf_is_libc(object->dlpi_name) ? search_object(object, size, context) : 0;
}

void *gs_elf_function(const char *name)
{
    struct search search = {name, NULL};
    if (!gs_elf_each_object(search_libc, &search))
        gs_elf_each_object(search_object, &search);
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
    if (!gs_elf_holds(object, search->address))
        return 0;
    size_t length = 0;
    while (length < search->room && (search->path[length] = object->dlpi_name[length]))
        length++;
    return length < search->room ? 1 : -1;
}

bool gs_elf_path_of(const void *address, char *path, size_t room)
{
    struct path_search search = {address, path, room};
    return gs_elf_each_object(copy_path, &search) == 1;
}

static int is_holder(struct dl_phdr_info *object, size_t size, void *address)
{
    (void)size;
    return gs_elf_holds(object, address);
}

struct link_map *gs_elf_elsewhere(const void *address)
{
    Dl_info unused;
    struct link_map *object = NULL;
    if (gs_elf_each_object(is_holder, (void *)address))
        return NULL;
    int (*find)(const void *, Dl_info *, void **, int) =
        (int (*)(const void *, Dl_info *, void **, int))gs_elf_function("dladdr1");
    return find && find(address, &unused, (void **)&object, 2 /* RTLD_DL_LINKMAP */) ? object : NULL;
}

struct pair {
    const void *one, *other;
    const char *name;
};

static int compare_pair(struct dl_phdr_info *object, size_t size, void *context)
{
    (void)size;
    const struct pair *pair = context;
    return gs_elf_holds(object, pair->one) && gs_elf_holds(object, pair->other);
}

bool gs_elf_together(const void *one, const void *other)
{
    return gs_elf_each_object(compare_pair, &(struct pair){one, other, NULL});
}

static int find_beside(struct dl_phdr_info *object, size_t size, void *context)
{
    (void)size;
    struct pair *pair = context;
    if (!gs_elf_holds(object, pair->one))
        return 0;
    pair->other = gs_elf_function_in(object->dlpi_addr, gs_elf_dynamic(object), pair->name);
    return 1;
}

const void *gs_elf_function_beside(const void *address, const char *name)
{
    struct pair pair = {address, NULL, name};
    if (gs_elf_each_object(find_beside, &pair))
        return pair.other;
    const struct link_map *elsewhere = gs_elf_elsewhere(address);
    return elsewhere ? gs_elf_function_in(elsewhere->l_addr, elsewhere->l_ld, name) : NULL;
}

bool gs_elf_own_path(char *path, size_t room) { return gs_elf_path_of((const void *)gs_elf_function, path, room); }

static int compare_file_name(struct dl_phdr_info *object, size_t size, void *context)
{
    (void)size;
    return gs_text_starts(gs_text_file_name(object->dlpi_name), context);
}

bool gs_elf_is_loaded(const char *file_name) { return gs_elf_each_object(compare_file_name, (void *)file_name) == 1; }

/* A copy of the library under another file name still has its SONAME. */
static bool is_named(const struct dl_phdr_info *object, const char *file_name)
{
    const char *names = NULL;
    uintptr_t soname = 0;
    if (gs_text_starts(gs_text_file_name(object->dlpi_name), file_name))
        return true;
    for (const ElfW(Dyn) *entry = gs_elf_dynamic(object); entry && entry->d_tag != DT_NULL; entry++) {
        if (entry->d_tag == DT_STRTAB)
            names = gs_elf_pointer(object->dlpi_addr, entry);
        else if (entry->d_tag == DT_SONAME)
            soname = entry->d_un.d_val;
    }
    return names && soname && gs_text_starts(names + soname, file_name);
}

struct count {
    const char *file_name;
    int left;
    const void *found;
};

static int count_named(struct dl_phdr_info *object, size_t size, void *context)
{
    (void)size;
    struct count *count = context;
    if (is_named(object, count->file_name) && count->left-- == 0)
        count->found = gs_elf_dynamic(object);
    return count->found != NULL;
}

const void *gs_elf_nth_named(const char *file_name, int n)
{
    struct count count = {file_name, n, NULL};
    gs_elf_each_object(count_named, &count);
    return count.found;
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
    it->found = gs_elf_holds(object, it->address);
    it->named = it->found && is_named(object, it->file_name);
    return it->found;
}

bool gs_elf_is_in(const void *address, const char *file_name)
{
    struct whereabouts it = {address, file_name, false, false};
    gs_elf_each_object(compare_holder, &it);
    return it.named;
}

bool gs_elf_is_elsewhere(const void *address, const char *file_name)
{
    struct whereabouts it = {address, file_name, false, false};
    gs_elf_each_object(compare_holder, &it);
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
    if (gs_elf_holds(object, order->address))
        return 1;
    order->passed_us |= gs_elf_holds(object, (const void *)gs_elf_function);
    return 0;
}

bool gs_elf_is_behind(const void *address)
{
    struct order order = {address, false};
    return gs_elf_each_object(stop_at_holder, &order) == 1 && order.passed_us;
}
