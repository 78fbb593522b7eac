/* Our functions come first wherever the dynamic linker looks up the driver's names, which is how linked programs are held. A
 * library that has *variables* of these names, into which it writes what it finds by dlsym, gets the address of our code
 * instead of its own variable's. So what was bound to a hook is bound anew wherever it would be a variable without us.
 *
 * By then the library's constructors have run, if it was opened by dlopen(); not if the program started with it. */
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
    int objects, known; /* of all, those that were looked at before */
    unsigned long long removed; /* at the last look; when more have gone, none is known */
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
    size_t bytes; /* found: its size */
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

/* What the linker would have found: in the program's own libraries, which are searched first, else in the object's. */
static struct variable without_us(void *handle, const char *name)
{
    struct variable variable = {.name = name, .address = gs_real_dlsym(RTLD_NEXT, name)};
    if (!variable.address && handle)
        variable.address = gs_real_dlsym(handle, name);
    if (variable.address)
        gs_elf_each_object(measure, &variable);
    return variable;
}

/* ---- binding anew ---- */

struct object {
    int index; /* wanted; below 0 once found */
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

/* The linker has made most such places read-only when all was bound. This one stays writable, which asks no other thread to wait.
 * A page of 4, 16 or 64 KiB, whichever the kernel takes for the start of one. */
static void write_at(uintptr_t *place, uintptr_t value)
{
    for (uintptr_t page = 4096; page <= 65536; page *= 4)
        if (syscall(SYS_mprotect, (uintptr_t)place / page * page, page, PROT_READ | PROT_WRITE) == 0) {
            __atomic_store_n(place, value, __ATOMIC_RELEASE);
            return;
        }
}

/* The program's own copy of a library's variable: of a symbol without size the linker has copied nothing, and the variable may begin
 * with another value. */
static void copy(char *place, const struct variable *variable)
{
    for (size_t i = 0; i < variable->bytes; i++)
        if (place[i])
            return; /* written since */
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
    struct object object; /* without memset(), which a sanitizer may stand in front of */
    object.index = index;
    if (!gs_elf_each_object(describe, &object))
        return;
    /* So that it stays as long as we look. */
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
    static bool found; /* since then libraries without variables of their own may mean another's */
    struct census census = {.known = __atomic_load_n(&known, __ATOMIC_RELAXED), .removed = __atomic_load_n(&removed, __ATOMIC_RELAXED)};
    int saved = errno;
    gs_elf_each_object(count, &census);
    if (census.found || __atomic_load_n(&found, __ATOMIC_RELAXED)) {
        for (int i = census.known; i < census.objects; i++)
            bind_nth(i, opened);
        char *(*forget_error)(void) = (char *(*)(void))gs_elf_function("dlerror");
        if (forget_error)
            forget_error(); /* what we looked up in vain is not the program's */
    }
    if (census.found)
        __atomic_store_n(&found, true, __ATOMIC_RELAXED);
    __atomic_store_n(&removed, census.removed, __ATOMIC_RELAXED);
    __atomic_store_n(&known, census.objects, __ATOMIC_RELAXED);
    errno = saved;
}

void gs_give_variables_back(void) { give_back(true); }

/* Before the constructors of all other libraries (-z initfirst), and so before libc's: dlopen() would run those, without an
 * environment. What a program starts with is searched as a whole anyway. */
__attribute__((constructor)) static void at_start(void) { give_back(false); }
