#include "system/at_fork.h"

#include <string.h>

#include "system/elf.h"

/* The linker defines these symbols as the start and the end of each section. */
typedef void (*const function)(void);
extern function __start_gs_at_fork[] __attribute__((visibility("hidden")));
extern function __stop_gs_at_fork[] __attribute__((visibility("hidden")));
extern char __start_gs_per_process[] __attribute__((visibility("hidden")));
extern char __stop_gs_per_process[] __attribute__((visibility("hidden")));

static void forget_everything(void)
{
    memset(__start_gs_per_process, 0, (size_t)(__stop_gs_per_process - __start_gs_per_process));
    for (function *forget = __start_gs_at_fork; forget < __stop_gs_at_fork; forget++)
        (*forget)();
}

/* glibc links pthread_atfork() statically into its caller, and it calls a libc function that musl does not have. A library
 * that refers to that function cannot be loaded under musl, which ends a program whose preloaded library misses a
 * symbol. So both functions are looked up at run time. */
void gs_watch_forks(void)
{
    int (*glibc)(void *, void *, void (*)(void), void *) =
        (int (*)(void *, void *, void (*)(void), void *))gs_elf_function("__register_atfork");
    int (*other)(void *, void *, void (*)(void)) = (int (*)(void *, void *, void (*)(void)))gs_elf_function("pthread_atfork");
    if (glibc)
        glibc(NULL, NULL, forget_everything, NULL); /* NULL: not tied to a library that could be unloaded */
    else if (other)
        other(NULL, NULL, forget_everything);
}
