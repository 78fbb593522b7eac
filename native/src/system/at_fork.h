/* What a forked child must forget: it has no context and holds no memory. A variable says so where it is defined. */
#ifndef GPUSLICE_AT_FORK_H
#define GPUSLICE_AT_FORK_H

/* Zeros in a child, before anything else runs there. The linker gathers these variables in a section. */
#define GS_PER_PROCESS __attribute__((section("gs_per_process")))

/* A function that resets what zeros do not. The order of these calls is not defined, so that none may depend on another file's
 * state. */
#define GS_AT_FORK(forget) static void (*const forget##_at_fork)(void) __attribute__((used, section("gs_at_fork"))) = forget

/* Installs the fork handler; to be called once. */
void gs_watch_forks(void);

#endif
