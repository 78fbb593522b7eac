#include "system/at_fork.h"

#include "system/elf.h"

/* The linker gives these names to where the section begins and ends. */
extern void (*const __start_gs_at_fork[])(void) __attribute__((visibility("hidden")));
extern void (*const __stop_gs_at_fork[])(void) __attribute__((visibility("hidden")));

static void forget_everything(void)
{
    for (void (*const *forget)(void) = __start_gs_at_fork; forget < __stop_gs_at_fork; forget++)
        (*forget)();
}

/* In glibc pthread_atfork() is linked into its caller and leads to a function of libc's that musl lacks: a library
 * that named it could not be loaded there, and musl ends a program whose preloaded library lacks a symbol. */
void gs_watch_forks(void)
{
    int (*glibc)(void *, void *, void (*)(void), void *) =
        (int (*)(void *, void *, void (*)(void), void *))gs_elf_function("__register_atfork");
    int (*other)(void *, void *, void (*)(void)) =
        (int (*)(void *, void *, void (*)(void)))gs_elf_function("pthread_atfork");
    if (glibc)
        glibc(NULL, NULL, forget_everything, NULL); /* of no library that could be unloaded */
    else if (other)
        other(NULL, NULL, forget_everything);
}
