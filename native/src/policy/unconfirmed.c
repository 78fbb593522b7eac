#include "policy/unconfirmed.h"

#include <string.h>

#include "accounts/slots.h"
#include "system/at_fork.h"

uint64_t gs_measurement_due_ns[GPUSLICE_CARDS];
static bool provisional[GPUSLICE_CARDS];
/* Drivers may differ in which process they charge for what two have open. */
static _Atomic uint64_t unconfirmed[GPUSLICE_CARDS][GS_UNCONFIRMED_KINDS];

static void forget(void)
{
    memset(gs_measurement_due_ns, 0, sizeof gs_measurement_due_ns);
    memset(provisional, 0, sizeof provisional);
    memset((void *)unconfirmed, 0, sizeof unconfirmed);
}
GS_AT_FORK(forget);

uint64_t gs_unconfirmed(uint32_t card, enum gs_unconfirmed kind) { return atomic_load(&unconfirmed[card][kind]); }
bool gs_is_provisional(uint32_t card) { return __atomic_load_n(&provisional[card], __ATOMIC_RELAXED); }

/* Others may compare our slot with the driver's figure only while the figure contains all that we count. */
static void show(uint32_t card)
{
    bool comparable = gs_unconfirmed(card, GS_MAY_BE_UNLISTED) == 0 && gs_unconfirmed(card, GS_UNLISTED) == 0;
    gs_accounts_set_provisional(&gs_accounts, card, comparable && gs_is_provisional(card));
}

void gs_set_provisional(uint32_t card, bool now)
{
    __atomic_store_n(&provisional[card], now, __ATOMIC_RELAXED);
    show(card);
}

void gs_unconfirmed_add(uint32_t card, enum gs_unconfirmed kind, int64_t bytes)
{
    if (card >= GPUSLICE_CARDS)
        return;
    if (bytes >= 0)
        atomic_fetch_add(&unconfirmed[card][kind], (uint64_t)bytes);
    else
        gs_subtract(&unconfirmed[card][kind], (uint64_t)-bytes);
    if (gs_is_provisional(card))
        show(card);
}

void gs_loan_ended(uint32_t card)
{
    gs_accounts_imported(&gs_accounts, card, -1);
    if (card >= GPUSLICE_CARDS)
        return;
    uint64_t due = __atomic_load_n(&gs_measurement_due_ns[card], __ATOMIC_RELAXED), soon = gs_coarse_ns() + GS_MEASURE_EVERY_NS;
    if (due > soon)
        __atomic_compare_exchange_n(&gs_measurement_due_ns[card], &due, soon, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}
