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

static int read_adds(struct dl_phdr_info *object, size_t size, void *adds)
{
    (void)size;
    *(uint64_t *)adds = object->dlpi_adds;
    return 1;
}

uint64_t gs_elf_loaded_ever(void)
{
    uint64_t adds = 0;
    gs_elf_each_object(read_adds, &adds);
    return adds;
}

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

/* ---- what holds an address ---- */

struct holder {
    const void *address, *other;
    const char *file_name, *function; /* asked for; or NULL, as `other` and `path` */
    char *path;
    size_t room;
    bool found, is_named, holds_other, has_path, is_behind_us;
    const void *function_at;
};

static int look(struct dl_phdr_info *object, size_t size, void *context)
{
    (void)size;
    struct holder *holder = context;
    if (!gs_elf_holds(object, holder->address)) {
        holder->is_behind_us |= gs_elf_holds(object, (const void *)gs_elf_function);
        return 0;
    }
    holder->found = true;
    holder->is_named = holder->file_name && is_named(object, holder->file_name);
    holder->holds_other = holder->other && gs_elf_holds(object, holder->other);
    holder->function_at =
        holder->function ? gs_elf_function_in(object->dlpi_addr, gs_elf_dynamic(object), holder->function) : NULL;
    holder->has_path = holder->path && gs_text_join(holder->path, holder->room, object->dlpi_name, "", "");
    return 1;
}

static struct holder holder_of(struct holder asked)
{
    gs_elf_each_object(look, &asked);
    return asked;
}

bool gs_elf_path_of(const void *address, char *path, size_t room)
{
    return holder_of((struct holder){.address = address, .path = path, .room = room}).has_path;
}

bool gs_elf_own_path(char *path, size_t room) { return gs_elf_path_of((const void *)gs_elf_function, path, room); }

bool gs_elf_together(const void *one, const void *other)
{
    return holder_of((struct holder){.address = one, .other = other}).holds_other;
}

struct link_map *gs_elf_elsewhere(const void *address)
{
    Dl_info unused;
    struct link_map *object = NULL;
    if (holder_of((struct holder){.address = address}).found)
        return NULL;
    int (*find)(const void *, Dl_info *, void **, int) =
        (int (*)(const void *, Dl_info *, void **, int))gs_elf_function("dladdr1");
    return find && find(address, &unused, (void **)&object, 2 /* RTLD_DL_LINKMAP */) ? object : NULL;
}

const void *gs_elf_function_beside(const void *address, const char *name)
{
    struct holder holder = holder_of((struct holder){.address = address, .function = name});
    const struct link_map *elsewhere = holder.found ? NULL : gs_elf_elsewhere(address);
    return elsewhere ? gs_elf_function_in(elsewhere->l_addr, elsewhere->l_ld, name) : holder.function_at;
}

bool gs_elf_is_in(const void *address, const char *file_name)
{
    return holder_of((struct holder){.address = address, .file_name = file_name}).is_named;
}

bool gs_elf_is_elsewhere(const void *address, const char *file_name)
{
    struct holder holder = holder_of((struct holder){.address = address, .file_name = file_name});
    return holder.found && !holder.is_named;
}

bool gs_elf_is_behind(const void *address)
{
    struct holder holder = holder_of((struct holder){.address = address});
    return holder.found && holder.is_behind_us;
}

/* ---- the n-th of a name ---- */

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
