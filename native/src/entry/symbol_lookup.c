/* A program finds the driver's functions through dlsym, dlvsym or cuGetProcAddress (entries.c), or is linked against them and gets our
 * exported symbols first. Every other lookup goes to libc as if we were not there: the stubs below jump instead of calling,
 * so that libc sees the real caller, on which RTLD_NEXT, RTLD_DEFAULT and $ORIGIN depend. */
#define _GNU_SOURCE
#include "entry/symbol_lookup.h"

#include <dlfcn.h>
#include <link.h>

#include "entry/entries.h"
#include "entry/hook_table.h"
#include "policy/start.h"
#include "system/elf.h"
#include "system/text.h"

void *dlvsym(void *, const char *, const char *); /* which musl does not declare */

typedef void *(*dlsym_function)(void *, const char *);
typedef void *(*dlopen_function)(const char *, int);
typedef void *(*dlvsym_function)(void *, const char *, const char *);

__attribute__((visibility("hidden"))) void *gs_libc_dlsym, *gs_libc_dlvsym, *gs_libc_dlopen;

/* Means "not found": the stubs turn its address into NULL. Also called instead of a function that libc does not have. */
__attribute__((visibility("hidden"))) void *gs_absent(void) { return NULL; }

static void *find(void **where, const char *name)
{
    void *found = __atomic_load_n(where, __ATOMIC_ACQUIRE);
    if (!found) {
        found = gs_elf_function(name);
        if (!found)
            found = (void *)gs_absent;
        __atomic_store_n(where, found, __ATOMIC_RELEASE);
    }
    return found;
}

void *gs_real_dlsym(void *handle, const char *name) { return ((dlsym_function)find(&gs_libc_dlsym, "dlsym"))(handle, name); }

void *gs_real_dlopen(const char *path, int flags) { return ((dlopen_function)find(&gs_libc_dlopen, "dlopen"))(path, flags); }

void *gs_real_entry(const char *name)
{
    return gs_text_equal(name, "dlsym")    ? find(&gs_libc_dlsym, name)
           : gs_text_equal(name, "dlvsym") ? find(&gs_libc_dlvsym, name)
                                           : find(&gs_libc_dlopen, name);
}

bool gs_is_driver_name(const char *name) { return (name[0] == 'c' && name[1] == 'u') || gs_text_starts(name, "nvml"); }

static bool is_nvml_name(const char *name) { return name[0] == 'n'; }
static enum gs_library library_of(const char *name) { return is_nvml_name(name) ? NVML : CUDA; }
const char *gs_driver_file(const char *name) { return is_nvml_name(name) ? "libnvidia-ml.so" : "libcuda.so"; }

/* WSL's libcuda.so.1 looks up its functions in a second libcuda. If it got our hooks, it would call itself forever. */
static bool is_driver(const void *caller)
{
    return gs_elf_is_in(caller, "libcuda.so") || gs_elf_is_in(caller, "libnvidia-ml.so");
}

/* What to return instead of libc's result, or NULL to leave that as it is. */
static void *replacement(void *handle, const char *name, void *found, const void *caller)
{
    int hook = gs_hook_named(name);
    if (hook < 0 && found && gs_is_unknown_variant(name) && !is_driver(caller) && gs_enter())
        return (void *)gs_absent; /* newer than this library: nobody would count the memory that it takes */
    if (!found || is_driver(caller))
        return NULL;
    if (hook < 0)
        return gs_enter() ? gs_entry_for(library_of(name), -1, name, found) : NULL;
    void *address = gs_hook_address(hook);
    const char *driver = gs_driver_file(name);
    bool global = handle == RTLD_DEFAULT || found == address;
    /* Our symbols are visible to the whole program. While no driver is loaded they must not be found, though a variable of the
     * same name must. */
    if (global && !gs_elf_nth_named(driver, 0)) {
        void *behind_us = gs_real_dlsym(RTLD_NEXT, name); /* usually finds nothing, and sets dlerror() */
        if (!behind_us || gs_elf_is_elsewhere(behind_us, driver))
            return behind_us ? behind_us : (void *)gs_absent;
    }
    if (!gs_enter())
        return NULL;
    return global ? address : gs_entry_for(library_of(name), hook, name, found);
}

/* Some tools define functions with the driver's names, to trace calls or to work without a driver. A program that asks such a
 * tool for them must get the tool's functions, which in turn call ours. */
static void *replacement_for(void *handle, const char *name, void *found, const void *caller)
{
    int number = gs_hook_named(name);
    bool ours = number >= 0 && found == gs_hook_address(number);
    if (!ours && gs_elf_is_elsewhere(found, gs_driver_file(name)))
        return NULL;
    const struct link_map *elsewhere = number < 0 && found ? gs_elf_elsewhere(found) : NULL;
    if (elsewhere && !gs_text_starts(gs_text_file_name(elsewhere->l_name), gs_driver_file(name)))
        return NULL;
    return replacement(handle, name, found, caller);
}

/* RTLD_NEXT looks behind the caller. For a caller loaded before us, libc finds our symbol by itself, so that another tool in
 * front of us works as it should. For a caller loaded after us, such as a communication library that looks for the function
 * it wraps, libc would find the driver's. */
static void *next(const char *name, const void *caller)
{
    if (!gs_is_driver_name(name) || gs_hook_named(name) < 0 || !gs_elf_is_behind(caller))
        return NULL;
    return replacement(RTLD_DEFAULT, name, gs_real_dlsym(RTLD_NEXT, name), caller);
}

/* A program that looks up dlsym itself, by whatever handle or version, would bypass ours. It gets ours, which calls libc's. */
void *gs_own_entry(const char *name)
{
    return gs_text_equal(name, "dlsym")    ? (void *)dlsym
           : gs_text_equal(name, "dlvsym") ? (void *)dlvsym
           : gs_text_equal(name, "dlopen") ? (void *)dlopen
                                           : NULL;
}

/* Called by the stubs. Returns what the stub returns, or NULL to continue in libc. `version`: NULL for dlsym. */
static void *choose(void *handle, const char *name, const char *version, const void *caller)
{
    if (gs_unlikely(gs_opens_deep()))
        gs_bind_what_was_opened_deep();
    if (name && name[0] == 'd' && name[1] == 'l')
        return gs_own_entry(name);
    if (!name || !gs_is_driver_name(name))
        return NULL;
    if (handle == RTLD_NEXT)
        return next(name, caller);
    void *found =
        version ? ((dlvsym_function)find(&gs_libc_dlvsym, "dlvsym"))(handle, name, version) : gs_real_dlsym(handle, name);
    return replacement_for(handle, name, found, caller);
}

__attribute__((visibility("hidden"))) void *gs_choose_dlsym(void *handle, const char *name, const void *caller)
{
    find(&gs_libc_dlsym, "dlsym");
    return choose(handle, name, NULL, caller);
}

__attribute__((visibility("hidden"))) void *gs_choose_dlvsym(void *handle, const char *name, const char *version,
                                                             const void *caller)
{
    find(&gs_libc_dlvsym, "dlvsym");
    return version ? choose(handle, name, version, caller) : NULL;
}

/* ---- RTLD_DEEPBIND ---- */

static bool opens_deep;
static void (*bind_deep)(uint64_t loaded_before); /* NULL until the program has started */
/* What was opened with RTLD_DEEPBIND, if it is not bound yet: how many objects were ever loaded before that, and one. */
static uint64_t unbound_since;

bool gs_opens_deep(void) { return __atomic_load_n(&opens_deep, __ATOMIC_RELAXED); }
void gs_when_opened_deep(void (*bind)(uint64_t)) { __atomic_store_n(&bind_deep, bind, __ATOMIC_RELEASE); }

static void bind_since(uint64_t loaded_before)
{
    void (*bind)(uint64_t) = __atomic_load_n(&bind_deep, __ATOMIC_ACQUIRE);
    if (bind)
        bind(loaded_before);
}

/* Another thread may not have loaded anything yet. */
void gs_bind_what_was_opened_deep(void)
{
    uint64_t since = __atomic_load_n(&unbound_since, __ATOMIC_ACQUIRE);
    if (!since || gs_elf_loaded_ever() == since - 1)
        return;
    bind_since(since - 1);
    __atomic_compare_exchange_n(&unbound_since, &since, 0, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
}

static bool is_path(const char *name)
{
    bool path = false;
    for (; name && *name && *name != '$'; name++)
        path |= *name == '/';
    return path && !*name;
}

/* Called by the stub of dlopen; NULL to continue in libc. What is opened with RTLD_DEEPBIND is bound to ours as soon as it is loaded.
 * libc wants to know its real caller only for a name that it has to search for, or with a $ in it: then when the program looks for
 * something in it. */
__attribute__((visibility("hidden"))) void *gs_choose_dlopen(const char *path, int flags)
{
    find(&gs_libc_dlopen, "dlopen");
#ifdef RTLD_DEEPBIND
    if (!(flags & RTLD_DEEPBIND))
        return NULL;
    uint64_t none = 0, before = gs_elf_loaded_ever();
    __atomic_compare_exchange_n(&unbound_since, &none, before + 1, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
    __atomic_store_n(&opens_deep, true, __ATOMIC_RELAXED);
    void *handle = is_path(path) ? gs_real_dlopen(path, flags) : NULL;
    if (handle)
        bind_since(before);
    return handle;
#else
    (void)path, (void)flags;
    return NULL;
#endif
}

/* Jumps into libc with all arguments, unless gs_choose_… has an answer. It gets the caller's address as one argument more. */
#if defined(__x86_64__)
#define STUB(name, one_more)                                                                                                   \
    ".globl " name "\n.type " name ",@function\n" name ":\n"                                                                   \
    "  endbr64\n  movq (%rsp), %" one_more "\n  pushq %rdi\n  pushq %rsi\n  pushq %rdx\n"                                      \
    "  call gs_choose_" name "\n"                                                                                              \
    "  popq %rdx\n  popq %rsi\n  popq %rdi\n"                                                                                  \
    "  testq %rax, %rax\n  jne 1f\n  jmp *gs_libc_" name "(%rip)\n"                                                            \
    "1: leaq gs_absent(%rip), %rdx\n  xorl %ecx, %ecx\n  cmpq %rdx, %rax\n  cmoveq %rcx, %rax\n"                               \
    "  ret\n.size " name ",.-" name "\n"
__asm__(".text\n" STUB("dlsym", "rdx") STUB("dlvsym", "rcx") STUB("dlopen", "rdx"));
#elif defined(__aarch64__)
#define STUB(name, one_more)                                                                                                   \
    ".globl " name "\n.type " name ",%function\n" name ":\n"                                                                   \
    "  stp x29, x30, [sp, #-48]!\n  mov x29, sp\n  stp x0, x1, [sp, #16]\n  str x2, [sp, #32]\n  mov " one_more ", x30\n"      \
    "  bl gs_choose_" name "\n  mov x9, x0\n"                                                                                  \
    "  ldp x0, x1, [sp, #16]\n  ldr x2, [sp, #32]\n  ldp x29, x30, [sp], #48\n"                                                \
    "  cbnz x9, 1f\n  adrp x9, gs_libc_" name "\n  ldr x9, [x9, :lo12:gs_libc_" name "]\n  br x9\n"                            \
    "1: adrp x10, gs_absent\n  add x10, x10, :lo12:gs_absent\n  cmp x9, x10\n  csel x0, xzr, x9, eq\n"                         \
    "  ret\n.size " name ",.-" name "\n"
__asm__(".text\n" STUB("dlsym", "x2") STUB("dlvsym", "x3") STUB("dlopen", "x2"));
#else
#error "dlsym must be entered without a frame of its own: write the stub for this architecture"
#endif
