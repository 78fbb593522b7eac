#include "system/at_fork.h"

#include "system/elf.h"

/* The linker defines these symbols as the start and the end of the section. */
extern void (*const __start_gs_at_fork[])(void) __attribute__((visibility("hidden")));
extern void (*const __stop_gs_at_fork[])(void) __attribute__((visibility("hidden")));

static void forget_everything(void)
{
    for (void (*const *forget)(void) = __start_gs_at_fork; forget < __stop_gs_at_fork; forget++)
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
