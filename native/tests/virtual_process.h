/* Processes whose launches the library throttles, in virtual time, for tests of shares (tests/shares). */
#ifndef GPUSLICE_VIRTUAL_PROCESS_H
#define GPUSLICE_VIRTUAL_PROCESS_H

#include <stdbool.h>
#include <stdint.h>

#include "policy/cards.h"

/* Why a call comes back. */
enum stop { RETURNS, SLEEPS, SAMPLES, LAUNCHES, STEPS };

struct virtual_call {
    const char *name; /* of a function in tests/virtual_launch.c */
    void (*enter)(const struct virtual_call *);
    struct gs_card *card;
    uint64_t key;
    uint32_t stream;
    double own_ns; /* what is launched */
};

int virtual_launch(const struct virtual_call *what);
void virtual_is_timed(void);
void virtual_is_cleared(void);

#endif
