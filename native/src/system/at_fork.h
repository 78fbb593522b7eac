/* What a forked child must forget: it has no context and holds no memory. Each source file registers, next to its own
 * state, a function that resets that state. All of them are collected in one section of the library and are called in
 * the child before anything else. */
#ifndef GPUSLICE_AT_FORK_H
#define GPUSLICE_AT_FORK_H

/* The order of the calls is not defined, so that no such function may depend on another file's state. */
#define GS_AT_FORK(forget) static void (*const forget##_at_fork)(void) __attribute__((used, section("gs_at_fork"))) = forget

/* Installs the fork handler; to be called once. */
void gs_watch_forks(void);

#endif
