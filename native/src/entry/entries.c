/* Programs look up all functions before they call cuInit, perhaps in several libraries, of which some turn out not to fit the kernel
 * module. So what they get for a hook is an entry: a jump to where the function leads at the time of the call. As long as the
 * library is not initialised, that is its own refusal; then, for good, it is the hook, or the driver's own function where there are
 * no limits.
 *
 * Each hook has one entry that stands for the driver, or for any candidate before there is one: the address that is exported under
 * the driver's name. What is found in a certain candidate gets an entry of its own from a pool; where several are loaded, functions
 * without a hook do as well. Should a candidate be initialised when there is a driver already, all of them lead to the driver,
 * whose contexts a second copy does not know. */
#include "entry/entries.h"

#include <stdatomic.h>

#include "entry/hook_table.h"
#include "policy/start.h"
#include "system/elf.h"
#include "system/text.h"

#define POOL 1024
#define TEXT_OF(number) #number
#define TEXT(number) TEXT_OF(number)

struct function {
    const void *_Atomic own; /* NULL: free */
    int hook;
    enum gs_library library;
    char name[64];
};

static struct function pool[POOL]; /* of entry GS_FUNCTIONS + i */
#define TAKEN ((const void *)pool)

extern const char gs_entry_pool[] __attribute__((visibility("hidden")));
extern void gs_entry_undecided(void) __attribute__((visibility("hidden")));
__attribute__((visibility("hidden"))) void *gs_entry_targets[GS_FUNCTIONS + POOL] = {[0 ... GS_FUNCTIONS - 1] =
                                                                                         (void *)gs_entry_undecided};

/* Of the call that this thread has begun at an entry that is undecided. */
static _Thread_local struct {
    const struct function *function;
    void *own;
    int refusal;
} call __attribute__((tls_model("initial-exec")));

static int refuse(void) { return call.refusal; }

/* A second copy of the driver: if it can be initialised the driver is once more, which all calls reach from then on. */
static int initialise_both(unsigned int flags)
{
    const struct function *function = call.function;
    int result = ((int (*)(unsigned int))call.own)(flags);
    int (*drivers)(unsigned int) = (int (*)(unsigned int))gs_driver_symbol(function->library, function->name);
    return result == 0 && drivers ? drivers(flags) : result;
}

static int candidate_proc_address(const char *name, void **function, int version, uint64_t flags);
static int candidate_proc_address_v2(const char *name, void **function, int version, uint64_t flags, int *status);

#define HOOK(library, symbol, name, since, stream, parameters)                                                                 \
    extern const char entry_##symbol[] __asm__("gs_hook_" #symbol) __attribute__((visibility("hidden")));
#define BORROW(library, symbol, parameters)
#include "driver/hooks.def"

static const struct {
    struct function function;
    const void *address;
    void *hook;
} entries[GS_FUNCTIONS] = {
#define HOOK(library, symbol, name, since, stream, parameters)                                                                 \
    {{NULL, GS_##symbol, library, #symbol}, entry_##symbol, (void *)symbol},
#define BORROW(library, symbol, parameters) {{NULL, -1, library, #symbol}, NULL, NULL},
#include "driver/hooks.def"
};

void *gs_hook_address(int hook) { return (void *)entries[hook].address; }

/* A call that could take memory never reaches a library that may be initialised at this moment by another thread: it gets the
 * answer that the library gave to a question. */
static void *before_the_driver(const struct function *function, void *own, int refusal)
{
    call.function = function;
    call.own = own;
    call.refusal = refusal;
    if (gs_text_starts(function->name, "cuInit") || gs_text_starts(function->name, "nvmlInit"))
        return (void *)initialise_both;
    if (function->hook == GS_cuGetProcAddress && own)
        return (void *)candidate_proc_address;
    if (function->hook == GS_cuGetProcAddress_v2 && own)
        return (void *)candidate_proc_address_v2;
    return own && (function->hook < 0 || !gs_enter()) ? own : (void *)refuse;
}

static void *settled(const struct function *function, void *own)
{
    if (function->hook >= 0)
        return gs_enter() ? entries[function->hook].hook : gs_driver[function->hook];
    void *drivers = gs_driver_holds(function->library, own) ? own : gs_driver_symbol(function->library, function->name);
    return drivers ? drivers : own;
}

/* Called by an entry. Returns where the call goes. */
__attribute__((visibility("hidden"))) void *gs_entry_target(uint32_t entry)
{
    const struct function *function = entry < GS_FUNCTIONS ? &entries[entry].function : &pool[entry - GS_FUNCTIONS];
    void *own = (void *)function->own;
    int result = gs_driver_prove(function->library, own);
    if (result != 0)
        return before_the_driver(function, own ? own : gs_candidate_symbol(function->library, function->name), result);
    void *target = settled(function, own);
    __atomic_store_n(&gs_entry_targets[entry], target, __ATOMIC_RELEASE);
    return target;
}

/* ---- entries of other candidates ---- */

static bool is_loaded(const void *address) { return gs_elf_together(address, address) || gs_elf_elsewhere(address); }

static void *entry_at(int place) { return (void *)(gs_entry_pool + 16 * place); }

/* No lock: this is on the way of dlsym, in whatever state the loader is. */
static void *claim(int place, const void *before, enum gs_library library, int hook, const char *name, const void *own)
{
    struct function *function = &pool[place];
    if (!atomic_compare_exchange_strong(&function->own, &before, TAKEN))
        return NULL;
    function->library = library;
    function->hook = hook;
    for (size_t i = 0; i < sizeof function->name; i++)
        if (!(function->name[i] = name[i]))
            break;
    __atomic_store_n(&gs_entry_targets[GS_FUNCTIONS + place], (void *)gs_entry_undecided, __ATOMIC_RELEASE);
    atomic_store(&function->own, own);
    return entry_at(place);
}

static void *pooled(enum gs_library library, int hook, const char *name, const void *own)
{
    void *entry = NULL;
    for (int i = 0; i < POOL && atomic_load(&pool[i].own); i++)
        if (atomic_load(&pool[i].own) == own && gs_text_equal(pool[i].name, name))
            return entry_at(i);
    for (int i = 0; i < POOL && !entry; i++)
        entry = claim(i, NULL, library, hook, name, own);
    for (int i = 0; i < POOL && !entry; i++) { /* entries of what was closed */
        const void *other = atomic_load(&pool[i].own);
        entry = other != TAKEN && !is_loaded(other) ? claim(i, other, library, hook, name, own) : NULL;
    }
    return entry;
}

void *gs_entry_for(enum gs_library library, int hook, const char *name, void *own)
{
    bool usual =
        (hook >= 0 && gs_driver[hook] == own) || ((hook < 0 || gs_driver_is_bound(library)) && gs_driver_holds(library, own));
    size_t length = 0;
    while (name[length])
        length++;
    void *entry = usual || length >= sizeof pool->name ? NULL : pooled(library, hook, name, own);
    return entry || hook < 0 ? entry : gs_hook_address(hook);
}

/* ---- cuGetProcAddress ---- */

enum { CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT = 2 };

static bool is_entry(const void *found)
{
    for (int i = 0; i < GS_FUNCTIONS; i++)
        if (entries[i].address == found)
            return true;
    return false;
}

/* False if the function that was found is newer than this library. The program is told that it does not exist, as an older driver
 * would. */
static bool replace(const char *name, void **function, int version, uint64_t flags)
{
    if (!name || !*function)
        return true;
    int hook = gs_hook_variant(name, version, flags, *function);
    bool known = hook >= 0 || !gs_is_unknown_form(name) || is_entry(*function);
    void *entry = known ? gs_entry_for(CUDA, hook, hook < 0 ? name : gs_hook_symbol(hook), *function) : NULL;
    if (entry || !known)
        *function = entry;
    return known;
}

/* The first version has no status, which costs it nothing to be given. */
static int ask(void *own, const char *name, void **function, int version, uint64_t flags, int *status)
{
    int result = ((gs_type_cuGetProcAddress_v2)own)(name, function, version, flags, status);
    if (result != CUDA_SUCCESS || !function || replace(name, function, version, flags))
        return result;
    if (status)
        *status = CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT;
    return CUDA_ERROR_NOT_FOUND;
}

int cuGetProcAddress(const char *name, void **function, int version, uint64_t flags)
{
    return ask((void *)DRIVER(cuGetProcAddress), name, function, version, flags, NULL);
}

int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status)
{
    return ask((void *)DRIVER(cuGetProcAddress_v2), name, function, version, flags, status);
}

static int candidate_proc_address(const char *name, void **function, int version, uint64_t flags)
{
    return ask(call.own, name, function, version, flags, NULL);
}

static int candidate_proc_address_v2(const char *name, void **function, int version, uint64_t flags, int *status)
{
    return ask(call.own, name, function, version, flags, status);
}

/* ---- the code ---- */

#if defined(__x86_64__)
#define ENTRY "  endbr64\n  movl $gs_n, %r11d\n  jmp *gs_entry_targets+8*gs_n(%rip)\n  .set gs_n, gs_n+1\n"
#elif defined(__aarch64__)
#define ENTRY                                                                                                                  \
    "  mov w16, #gs_n\n  adrp x17, gs_entry_targets+8*gs_n\n  ldr x17, [x17, :lo12:gs_entry_targets+8*gs_n]\n"                 \
    "  br x17\n  .set gs_n, gs_n+1\n"
#endif

#define HOOK(library, symbol, name, since, stream, parameters)                                                                 \
    ".balign 16\n.globl gs_hook_" #symbol "\n.type gs_hook_" #symbol ",%function\n"                                            \
    "gs_hook_" #symbol ":\n" ENTRY ".size gs_hook_" #symbol ",.-gs_hook_" #symbol "\n"
#define BORROW(library, symbol, parameters) ".set gs_n, gs_n+1\n"
__asm__(".text\n.set gs_n, 0\n"
#include "driver/hooks.def"
        ".balign 16\n.globl gs_entry_pool\n.hidden gs_entry_pool\ngs_entry_pool:\n"
        ".rept " TEXT(POOL) "\n" ENTRY ".endr\n");

/* Keeps every register that may hold an argument. */
#if defined(__x86_64__)
__asm__(".globl gs_entry_undecided\n.hidden gs_entry_undecided\n.type gs_entry_undecided,@function\n"
        "gs_entry_undecided:\n"
        "  endbr64\n"
        "  pushq %rdi\n  pushq %rsi\n  pushq %rdx\n  pushq %rcx\n  pushq %r8\n  pushq %r9\n  pushq %rax\n  subq $128, %rsp\n"
        "  movups %xmm0, (%rsp)\n  movups %xmm1, 16(%rsp)\n  movups %xmm2, 32(%rsp)\n  movups %xmm3, 48(%rsp)\n"
        "  movups %xmm4, 64(%rsp)\n  movups %xmm5, 80(%rsp)\n  movups %xmm6, 96(%rsp)\n  movups %xmm7, 112(%rsp)\n"
        "  movl %r11d, %edi\n  call gs_entry_target\n  movq %rax, %r11\n"
        "  movups (%rsp), %xmm0\n  movups 16(%rsp), %xmm1\n  movups 32(%rsp), %xmm2\n  movups 48(%rsp), %xmm3\n"
        "  movups 64(%rsp), %xmm4\n  movups 80(%rsp), %xmm5\n  movups 96(%rsp), %xmm6\n  movups 112(%rsp), %xmm7\n"
        "  addq $128, %rsp\n  popq %rax\n  popq %r9\n  popq %r8\n  popq %rcx\n  popq %rdx\n  popq %rsi\n  popq %rdi\n"
        "  jmp *%r11\n.size gs_entry_undecided,.-gs_entry_undecided\n");
#elif defined(__aarch64__)
__asm__(
    ".globl gs_entry_undecided\n.hidden gs_entry_undecided\n.type gs_entry_undecided,%function\n"
    "gs_entry_undecided:\n"
    "  stp x29, x30, [sp, #-224]!\n  mov x29, sp\n"
    "  stp x0, x1, [sp, #16]\n  stp x2, x3, [sp, #32]\n  stp x4, x5, [sp, #48]\n  stp x6, x7, [sp, #64]\n  str x8, [sp, #80]\n"
    "  stp q0, q1, [sp, #96]\n  stp q2, q3, [sp, #128]\n  stp q4, q5, [sp, #160]\n  stp q6, q7, [sp, #192]\n"
    "  mov w0, w16\n  bl gs_entry_target\n  mov x16, x0\n"
    "  ldp q0, q1, [sp, #96]\n  ldp q2, q3, [sp, #128]\n  ldp q4, q5, [sp, #160]\n  ldp q6, q7, [sp, #192]\n"
    "  ldp x0, x1, [sp, #16]\n  ldp x2, x3, [sp, #32]\n  ldp x4, x5, [sp, #48]\n  ldp x6, x7, [sp, #64]\n  ldr x8, [sp, #80]\n"
    "  ldp x29, x30, [sp], #224\n"
    "  br x16\n.size gs_entry_undecided,.-gs_entry_undecided\n");
#else
#error "write the entries for this architecture"
#endif
