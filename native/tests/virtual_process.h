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

/* The process whose call runs, and where that may come back. */
struct card *virtual_card(void);
uint32_t virtual_number(void); /* on the card */
void virtual_stop(enum stop why);
void virtual_step(void); /* another thread or process may get in between here */

int virtual_launch(const struct virtual_call *what); /* tests/virtual_driver.c */
void virtual_is_timed(void);
void virtual_is_cleared(void);

#endif
