/* What a forked child must forget: it has no context and holds nothing. Each source says beside its own state how that is
 * forgotten, and all of these stand in one section of the library, which is walked in the child before anything else. */
#ifndef GPUSLICE_AT_FORK_H
#define GPUSLICE_AT_FORK_H

/* In no order: none of them may need another's state. */
#define GS_AT_FORK(forget)                                                                                             \
    static void (*const forget##_at_fork)(void) __attribute__((used, section("gs_at_fork"))) = forget

/* From now on, once. */
void gs_watch_forks(void);

#endif
