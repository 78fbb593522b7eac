/* Our functions come first wherever the dynamic linker looks up the driver's names, which is how linked programs are held. A
 * library that has *variables* of these names, into which it writes what it finds by dlsym, gets the address of our code
 * instead of its own variable's. So what was bound to a hook is bound anew wherever it would be a variable without us.
 *
 * That is done when a library has been bound and none of its own code has run: see __gmon_start__ at the end. */
#define _GNU_SOURCE
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

/* ---- what is meant ---- */

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
    int passed_over;  /* wanted: the one behind so many */
    const void *code; /* wanted: the one that holds this */
    uintptr_t base;
    const ElfW(Dyn) * dynamic;
    char path[4096];
};

static void describe(struct object *object, const struct dl_phdr_info *info)
{
    size_t length = 0;
    object->base = info->dlpi_addr;
    object->dynamic = gs_elf_dynamic(info);
    while (length < sizeof object->path - 1 && (object->path[length] = info->dlpi_name[length]))
        length++;
    object->path[length] = 0;
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

/* Of an object that was opened: what it and the libraries that it needs have, which are its own to search. */
static void bind_opened(const struct object *object)
{
    void *handle = *object->path ? gs_real_dlopen(object->path, RTLD_LAZY | RTLD_NOLOAD) : NULL;
    int (*close)(void *) = handle ? (int (*)(void *))gs_elf_function("dlclose") : NULL;
    if (handle)
        bind_object(object, handle);
    if (close)
        close(handle);
}

/* ---- when ---- */

static unsigned long long loaded_at_start; /* objects; 0 before anybody looked */
static bool any; /* object seen so far has such variables: those that come later may mean them */

static bool has_variables(const struct dl_phdr_info *info)
{
    struct gs_elf_symbols symbols;
    return gs_elf_symbols(info->dlpi_addr, gs_elf_dynamic(info), &symbols) && gs_hook_is_variable_in(&symbols);
}

static int look_at_start(struct dl_phdr_info *info, size_t size, void *unused)
{
    (void)size, (void)unused;
    loaded_at_start = info->dlpi_adds;
    any |= has_variables(info);
    return 0;
}

static int describe_nth(struct dl_phdr_info *info, size_t size, void *context)
{
    (void)size;
    struct object *object = context;
    if (object->passed_over-- > 0)
        return 0;
    describe(object, info);
    return 1;
}

/* What a program starts with is searched as a whole. */
static void bind_all_at_start(struct object *object)
{
    gs_elf_each_object(look_at_start, NULL);
    for (int i = 0; any; i++) {
        object->passed_over = i;
        if (!gs_elf_each_object(describe_nth, object))
            return;
        bind_object(object, NULL);
    }
}

static int describe_opened(struct dl_phdr_info *info, size_t size, void *context)
{
    (void)size;
    struct object *object = context;
    if (info->dlpi_adds == loaded_at_start)
        return -1; /* nothing was opened: it is one of those that the program started with */
    if (!gs_elf_holds(info, object->code))
        return 0;
    any |= has_variables(info);
    describe(object, info);
    return 1;
}

/* The first call of every library and program that a compiler has linked with its own start files (_init in glibc's crti.o),
 * where there is a function of this name: meant for profilers. By then the object is bound, and so is all that it needs, whose
 * own code has run; its constructors come next. The linker's lock is held, so nobody closes anything. */
__attribute__((visibility("default"))) void __gmon_start__(void)
{
    struct object object; /* without memset(), which a sanitizer may stand in front of */
    int saved = errno;
    object.code = __builtin_return_address(0);
    if (!loaded_at_start)
        bind_all_at_start(&object);
    else if (gs_elf_each_object(describe_opened, &object) == 1 && any)
        bind_opened(&object);
    if (any) { /* what we looked up in vain is not the program's */
        char *(*forget_error)(void) = (char *(*)(void))gs_elf_function("dlerror");
        if (forget_error)
            forget_error();
    }
    errno = saved;
}
