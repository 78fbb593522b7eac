/* Our functions come first wherever the dynamic linker looks up the driver's names, which is how linked programs are limited.
 * But some libraries have *variables* of these names, in which they store what dlsym returns, and they would get the address
 * of our code instead of that of their own variable. So a reference that was bound to a hook is bound again if, without us, it
 * would refer to a variable.
 *
 * If a library was opened by dlopen(), its constructors have already run by then; if the program was started with it, not. */
#define _GNU_SOURCE
#include "entry/variables.h"

#include <dlfcn.h>
#include <errno.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "entry/hook_table.h"
#include "entry/symbol_lookup.h"
#include "system/elf.h"
#include "system/elf_objects.h"
#include "system/text.h"

#if defined(__x86_64__)
enum { POINTER = R_X86_64_64, SLOT = R_X86_64_GLOB_DAT, COPY = R_X86_64_COPY };
#elif defined(__aarch64__)
enum { POINTER = R_AARCH64_ABS64, SLOT = R_AARCH64_GLOB_DAT, COPY = R_AARCH64_COPY };
#endif

/* ---- which objects have such variables ---- */

struct census {
    int objects, known; /* loaded objects; how many of them were examined before */
    unsigned long long removed; /* objects unloaded until the last time; once more are unloaded, `known` is void */
    bool found;
};

static int count(struct dl_phdr_info *object, size_t size, void *context)
{
    (void)size;
    struct census *census = context;
    struct gs_elf_symbols symbols;
    if (census->objects++ == 0 && object->dlpi_subs != census->removed) {
        census->removed = object->dlpi_subs;
        census->known = 0;
    }
    if (census->objects > census->known && !census->found && gs_elf_symbols(object->dlpi_addr, gs_elf_dynamic(object), &symbols))
        census->found = gs_hook_is_variable_in(&symbols);
    return 0;
}

struct variable {
    const char *name;
    const void *address;
    size_t bytes; /* its size; 0 if it is not a variable */
};

static int measure(struct dl_phdr_info *object, size_t size, void *context)
{
    (void)size;
    struct variable *variable = context;
    struct gs_elf_symbols symbols;
    const ElfW(Sym) *symbol = gs_elf_symbols(object->dlpi_addr, gs_elf_dynamic(object), &symbols)
                                  ? gs_elf_symbol(&symbols, variable->name, gs_elf_hash(variable->name), STT_OBJECT)
                                  : NULL;
    bool same = symbol && (const void *)(object->dlpi_addr + symbol->st_value) == variable->address;
    variable->bytes = same ? symbol->st_size : 0;
    return same;
}

/* What the linker would have found without us: in the program's libraries, which are searched first, else in the object's. */
static struct variable without_us(void *handle, const char *name)
{
    struct variable variable = {.name = name, .address = gs_real_dlsym(RTLD_NEXT, name)};
    if (!variable.address && handle)
        variable.address = gs_real_dlsym(handle, name);
    if (variable.address)
        gs_elf_each_object(measure, &variable);
    return variable;
}

/* ---- binding again ---- */

struct object {
    int index; /* of the object to find; negative once found */
    uintptr_t base;
    const ElfW(Dyn) * dynamic;
    char path[4096];
};

static int describe(struct dl_phdr_info *info, size_t size, void *context)
{
    (void)size;
    struct object *object = context;
    if (object->index-- > 0)
        return 0;
    size_t length = 0;
    object->base = info->dlpi_addr;
    object->dynamic = gs_elf_dynamic(info);
    while (length < sizeof object->path - 1 && (object->path[length] = info->dlpi_name[length]))
        length++;
    object->path[length] = 0;
    return 1;
}

/* The linker made most such places read-only after binding (RELRO). The page stays writable afterwards, so that no other
 * thread can be in the way. Pages are 4, 16 or 64 KiB: mprotect() accepts the address when it is the start of a page. */
static void write_at(uintptr_t *place, uintptr_t value)
{
    for (uintptr_t page = 4096; page <= 65536; page *= 4)
        if (syscall(SYS_mprotect, (uintptr_t)place / page * page, page, PROT_READ | PROT_WRITE) == 0) {
            __atomic_store_n(place, value, __ATOMIC_RELEASE);
            return;
        }
}

/* Initializes the program's own copy of a library's variable (copy relocation). The linker bound it to our function, which has
 * no size, and so copied nothing. */
static void copy(char *place, const struct variable *variable)
{
    for (size_t i = 0; i < variable->bytes; i++)
        if (place[i])
            return; /* it has been written since */
    for (size_t i = 0; i < variable->bytes; i++)
        place[i] = ((const char *)variable->address)[i];
}

static void bind_one(const struct object *object, const ElfW(Rela) * entry, const char *name, void *handle)
{
    uintptr_t *place = (uintptr_t *)(object->base + entry->r_offset);
    uint32_t type = (uint32_t)ELF64_R_TYPE(entry->r_info);
    int hook = type == POINTER || type == SLOT || type == COPY ? gs_hook_named(name) : -1;
    if (hook < 0)
        return;
    uintptr_t added = type == POINTER ? (uintptr_t)entry->r_addend : 0;
    if (type != COPY && *place != (uintptr_t)gs_hook_address((enum gs_function)hook) + added)
        return;
    struct variable variable = without_us(handle, name);
    if (variable.bytes && type == COPY)
        copy((char *)place, &variable);
    else if (variable.bytes)
        write_at(place, (uintptr_t)variable.address + added);
}

static void bind_object(const struct object *object, void *handle)
{
    struct gs_elf_symbols symbols;
    const ElfW(Rela) *entries = NULL;
    size_t bytes = 0;
    if (!gs_elf_symbols(object->base, object->dynamic, &symbols))
        return;
    for (const ElfW(Dyn) *entry = object->dynamic; entry->d_tag != DT_NULL; entry++) {
        if (entry->d_tag == DT_RELA)
            entries = gs_elf_pointer(object->base, entry);
        else if (entry->d_tag == DT_RELASZ)
            bytes = entry->d_un.d_val;
    }
    for (size_t i = 0; entries && i < bytes / sizeof *entries; i++) {
        const char *name = symbols.names + symbols.table[ELF64_R_SYM(entries[i].r_info)].st_name;
        if (gs_is_driver_name(name))
            bind_one(object, &entries[i], name, handle);
    }
}

static void bind_nth(int index, bool opened)
{
    struct object object; /* not zeroed: a sanitizer may override memset() */
    object.index = index;
    if (!gs_elf_each_object(describe, &object))
        return;
    /* Keeps the object loaded while we examine it. */
    void *handle = opened && *object.path ? gs_real_dlopen(object.path, RTLD_LAZY | RTLD_NOLOAD) : NULL;
    if (handle || !opened)
        bind_object(&object, handle);
    int (*close)(void *) = handle ? (int (*)(void *))gs_elf_function("dlclose") : NULL;
    if (close)
        close(handle);
}

static void give_back(bool opened)
{
    static int known;
    static unsigned long long removed;
    static bool found; /* from then on, any library may refer to another's variable */
    struct census census = {.known = __atomic_load_n(&known, __ATOMIC_RELAXED), .removed = __atomic_load_n(&removed, __ATOMIC_RELAXED)};
    int saved = errno;
    gs_elf_each_object(count, &census);
    if (census.found || __atomic_load_n(&found, __ATOMIC_RELAXED)) {
        for (int i = census.known; i < census.objects; i++)
            bind_nth(i, opened);
        char *(*forget_error)(void) = (char *(*)(void))gs_elf_function("dlerror");
        if (forget_error)
            forget_error(); /* our own failed lookups must not appear as the program's errors */
    }
    if (census.found)
        __atomic_store_n(&found, true, __ATOMIC_RELAXED);
    __atomic_store_n(&removed, census.removed, __ATOMIC_RELAXED);
    __atomic_store_n(&known, census.objects, __ATOMIC_RELAXED);
    errno = saved;
}

void gs_give_variables_back(void) { give_back(true); }

/* Runs before the constructors of all other libraries (-z initfirst), including libc's, so that dlopen() must not be called: it
 * would run those constructors without an environment. It is not needed either: lookups search all libraries that the program
 * was started with. */
__attribute__((constructor)) static void at_start(void) { give_back(false); }
