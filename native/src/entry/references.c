/* Our functions come first wherever the dynamic linker looks up the driver's names; this is how linked programs are limited. Some
 * references must not be bound to them, and others to nothing else:
 * - A library may define *variables* of these names, into which it writes what it finds by dlsym: it would get the address of our
 *   code instead of that of its variable. So references that would be to a variable without us are bound to the variable again.
 * - A weak reference that would be null without us, since no driver is loaded, is null: the program asks thereby for CUDA.
 * - What is opened with RTLD_DEEPBIND finds libcuda's and libc's functions before ours: these references are bound to ours.
 *
 * This is done once a library has been bound and before any of its own code runs: see __gmon_start__ at the end. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "entry/entries.h"
#include "entry/hook_table.h"
#include "entry/symbol_lookup.h"
#include "system/elf.h"
#include "system/elf_objects.h"
#include "system/os.h"
#include "system/text.h"

#if defined(__x86_64__)
enum { POINTER = R_X86_64_64, SLOT = R_X86_64_GLOB_DAT, CALLED = R_X86_64_JUMP_SLOT, COPY = R_X86_64_COPY };
#elif defined(__aarch64__)
enum { POINTER = R_AARCH64_ABS64, SLOT = R_AARCH64_GLOB_DAT, CALLED = R_AARCH64_JUMP_SLOT, COPY = R_AARCH64_COPY };
#endif

/* ---- which variable is meant ---- */

struct variable {
    const char *name;
    const void *address;
    size_t bytes; /* its size, 0 if the address is no variable */
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

/* What the linker would have found without us: in the program's own libraries, which are searched first, else in the object's. */
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
    int passed_over;  /* to find: how many objects come before it */
    const void *code; /* to find: an address inside it */
    uintptr_t base;
    const ElfW(Dyn) * dynamic;
    bool is_deep;
    char path[4096];
};

static void describe(struct object *object, const struct dl_phdr_info *info)
{
    size_t length = 0;
    object->base = info->dlpi_addr;
    object->dynamic = gs_elf_dynamic(info);
    object->is_deep = false;
    while (length < sizeof object->path - 1 && (object->path[length] = info->dlpi_name[length]))
        length++;
    object->path[length] = 0;
}

/* The linker has made most such places read-only after binding. This one stays writable afterwards, so that no other thread has
 * to wait. Pages have 4, 16 or 64 KiB: the kernel refuses an address that is not the start of one. */
static void write_at(uintptr_t *place, uintptr_t value)
{
    for (uintptr_t page = 4096; page <= 65536; page *= 4)
        if (syscall(SYS_mprotect, (uintptr_t)place / page * page, page, PROT_READ | PROT_WRITE) == 0) {
            __atomic_store_n(place, value, __ATOMIC_RELEASE);
            return;
        }
}

/* Fills the program's own copy of a library's variable: our function's symbol has no size, so the linker has copied nothing, while
 * the variable may have an initial value. */
static void copy(char *place, const struct variable *variable)
{
    for (size_t i = 0; i < variable->bytes; i++)
        if (place[i])
            return; /* the program has written to it since */
    for (size_t i = 0; i < variable->bytes; i++)
        place[i] = ((const char *)variable->address)[i];
}

/* What was bound to a hook. */
static void bind_hooked(uintptr_t *place, const ElfW(Sym) * symbol, const char *name, uintptr_t added, void *handle)
{
    struct variable variable = without_us(handle, name);
    if (variable.bytes)
        write_at(place, (uintptr_t)variable.address + added);
    else if (!variable.address && ELF64_ST_BIND(symbol->st_info) == STB_WEAK && !gs_elf_nth_named(gs_driver_file(name), 0))
        write_at(place, added);
}

/* What was bound past ours, or will be when it is first called. */
static void bind_deep(const struct object *object, uintptr_t *place, const char *name, void *ours, void *handle)
{
    const void *found = (const void *)*place;
    if (gs_elf_together(found, object->dynamic))
        found = gs_real_dlsym(handle, name);
    if (gs_is_driver_name(name) ? gs_elf_is_in(found, gs_driver_file(name)) : found == gs_real_entry(name))
        write_at(place, (uintptr_t)ours);
}

static void bind_one(const struct object *object, const ElfW(Rela) * entry, const ElfW(Sym) * symbol, const char *name,
                     void *handle)
{
    uintptr_t *place = (uintptr_t *)(object->base + entry->r_offset);
    uint32_t type = (uint32_t)ELF64_R_TYPE(entry->r_info);
    int hook = gs_is_driver_name(name) ? gs_hook_named(name) : -1;
    void *ours = hook >= 0 ? gs_hook_address(hook) : gs_own_entry(name);
    uintptr_t added = type == POINTER ? (uintptr_t)entry->r_addend : 0;
    if (!ours || (type != POINTER && type != SLOT && type != CALLED && type != COPY))
        return;
    if (type == COPY && hook >= 0) {
        struct variable variable = without_us(handle, name);
        if (variable.bytes)
            copy((char *)place, &variable);
    } else if (hook >= 0 && type != CALLED && *place == (uintptr_t)ours + added)
        bind_hooked(place, symbol, name, added, handle);
    else if (object->is_deep && type != COPY && symbol->st_shndx == SHN_UNDEF && *place != (uintptr_t)ours)
        bind_deep(object, place, name, ours, handle);
}

struct relocations {
    const ElfW(Rela) * next, *end;
};

/* Without those at the beginning that refer to no symbol, as many as the linker has counted. */
static struct relocations relocations_of(uintptr_t base, const ElfW(Dyn) * dynamic, int64_t start, int64_t size,
                                         int64_t relative)
{
    const ElfW(Rela) *first = NULL;
    size_t count = 0, passed_over = 0;
    for (; dynamic && dynamic->d_tag != DT_NULL; dynamic++) {
        if (dynamic->d_tag == start)
            first = gs_elf_pointer(base, dynamic);
        else if (dynamic->d_tag == size)
            count = dynamic->d_un.d_val / sizeof *first;
        else if (dynamic->d_tag == relative)
            passed_over = dynamic->d_un.d_val;
    }
    if (!first || passed_over > count)
        return (struct relocations){NULL, NULL};
    return (struct relocations){&first[passed_over], &first[count]};
}

static void bind_table(const struct object *object, const struct gs_elf_symbols *symbols, struct relocations left, void *handle)
{
    for (; left.next < left.end; left.next++) {
        const ElfW(Sym) *symbol = &symbols->table[ELF64_R_SYM(left.next->r_info)];
        bind_one(object, left.next, symbol, symbols->names + symbol->st_name, handle);
    }
}

static void bind_object(const struct object *object, void *handle)
{
    struct gs_elf_symbols symbols;
    if (!gs_elf_symbols(object->base, object->dynamic, &symbols))
        return;
    bind_table(object, &symbols, relocations_of(object->base, object->dynamic, DT_RELA, DT_RELASZ, DT_RELACOUNT), handle);
    if (object->is_deep)
        bind_table(object, &symbols, relocations_of(object->base, object->dynamic, DT_JMPREL, DT_PLTRELSZ, DT_NULL), handle);
}

/* Our own failed lookups must not appear as the program's errors. */
static void forget_error(void)
{
    char *(*error)(void) = (char *(*)(void))gs_elf_function("dlerror");
    if (error)
        error();
}

/* For an object that was opened: variables are looked for in it and in the libraries that it needs. */
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

static unsigned long long loaded_at_start; /* number of objects; 0 until they are counted */
static bool any;                           /* some object seen so far has such variables, to which later objects may refer */

static bool has_variables(const struct dl_phdr_info *info)
{
    struct gs_elf_symbols symbols;
    return gs_elf_symbols(info->dlpi_addr, gs_elf_dynamic(info), &symbols) && gs_hook_is_variable_in(&symbols);
}

/* Found by what is to be bound: an object that defines nothing has a hash table of its symbols that does not count the others. */
static bool has_weak(const struct dl_phdr_info *info)
{
    struct gs_elf_symbols symbols;
    const ElfW(Dyn) *dynamic = gs_elf_dynamic(info);
    if (!gs_elf_symbols(info->dlpi_addr, dynamic, &symbols))
        return false;
    struct relocations left = relocations_of(info->dlpi_addr, dynamic, DT_RELA, DT_RELASZ, DT_RELACOUNT);
    for (; left.next < left.end; left.next++) {
        const ElfW(Sym) *symbol = &symbols.table[ELF64_R_SYM(left.next->r_info)];
        if (symbol->st_shndx == SHN_UNDEF && ELF64_ST_BIND(symbol->st_info) == STB_WEAK &&
            gs_is_driver_name(symbols.names + symbol->st_name))
            return true;
    }
    return false;
}

static int look_at_start(struct dl_phdr_info *info, size_t size, void *weak)
{
    (void)size;
    loaded_at_start = info->dlpi_adds;
    any |= has_variables(info);
    *(bool *)weak |= has_weak(info);
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

/* For all objects that the program starts with: variables are looked for in all of them. */
static bool bind_all_at_start(struct object *object)
{
    bool weak = false;
    gs_elf_each_object(look_at_start, &weak);
    for (int i = 0; any || weak; i++) {
        object->passed_over = i;
        if (!gs_elf_each_object(describe_nth, object))
            return true;
        bind_object(object, NULL);
    }
    return false;
}

static int describe_opened(struct dl_phdr_info *info, size_t size, void *context)
{
    (void)size;
    struct object *object = context;
    if (info->dlpi_adds == loaded_at_start)
        return -1; /* nothing was opened: the caller is one of the objects that the program started with */
    if (!gs_elf_holds(info, object->code))
        return 0;
    any |= has_variables(info);
    describe(object, info);
    object->is_deep = gs_opens_deep();
    return any || object->is_deep || has_weak(info) ? 1 : -1;
}

static int count(struct dl_phdr_info *info, size_t size, void *objects)
{
    (void)info, (void)size;
    ++*(int *)objects;
    return 0;
}

/* The objects loaded since so many ever were: the last ones. An object without start files does not call us (below). */
static void bind_deep_since(uint64_t loaded_before)
{
    struct object object;
    int objects = 0;
    GS_KEEP_ERRNO;
    gs_elf_each_object(count, &objects);
    uint64_t since = gs_elf_loaded_ever() - loaded_before;
    for (int i = since < (uint64_t)objects ? objects - (int)since : 1; i < objects; i++) {
        object.passed_over = i;
        if (!gs_elf_each_object(describe_nth, &object))
            break;
        object.is_deep = true;
        bind_opened(&object);
    }
    forget_error();
}

/* If a function of this name exists, which is meant for profilers, every library and program that was linked with the compiler's
 * start files calls it first (from _init in glibc's crti.o). By then the object and all that it needs are bound, what it needs
 * has run its constructors, and its own constructors come next. The linker's lock is held, so no object can be closed. */
__attribute__((visibility("default"))) void __gmon_start__(void)
{
    struct object object; /* not zeroed: a sanitizer may override memset() */
    GS_KEEP_ERRNO;
    object.code = __builtin_return_address(0);
    bool bound = false;
    gs_when_opened_deep(bind_deep_since);
    if (gs_opens_deep()) /* before the constructors of an object that does not call us, if what it needs does */
        gs_bind_what_was_opened_deep();
    if (!loaded_at_start)
        bound = bind_all_at_start(&object);
    else if (gs_elf_each_object(describe_opened, &object) == 1) {
        bind_opened(&object);
        bound = true;
    }
    if (bound)
        forget_error();
}
