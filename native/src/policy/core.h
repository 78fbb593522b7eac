/* This process under its container's limits: which cards, how much is left, and who said so. */
#ifndef GPUSLICE_CORE_H
#define GPUSLICE_CORE_H

#include <stdbool.h>
#include <stdint.h>

#include "accounts/accounts.h"
#include "driver/driver.h"
#include "policy/limits.h"
#include "policy/share.h"
#include "system/table.h"

#define GS_PAGE_BYTES (UINT64_C(2) << 20) /* the driver hands out physical memory in these */

struct gs_card {
    uint32_t index;        /* in the region; GPUSLICE_CARDS for a card that is not ours */
    uint64_t limit_bytes;  /* GS_NO_LIMIT for none; 0 for a card that is not ours */
    struct gs_share share; /* of compute; weight 0: not limited */
    char uuid[GPUSLICE_UUID_BYTES];
};

extern struct gs_accounts gs_accounts;
/* Until the limits were read, and from then on without a limits file, hooks only pass through. */
extern bool gs_active;
bool gs_start(void);

static inline bool gs_enter(void) { return gs_likely(__atomic_load_n(&gs_active, __ATOMIC_ACQUIRE)) || gs_start(); }

/* First thing in every hook: whether there is anything to limit. From then on DRIVER() can be called. */
extern bool gs_cuda_ready, gs_nvml_ready;
bool gs_start_cuda(void);
bool gs_start_nvml(void);
static inline bool gs_enter_cuda(void)
{
    return gs_likely(__atomic_load_n(&gs_cuda_ready, __ATOMIC_ACQUIRE)) || gs_start_cuda();
}
static inline bool gs_enter_nvml(void)
{
    return gs_likely(__atomic_load_n(&gs_nvml_ready, __ATOMIC_ACQUIRE)) || gs_start_nvml();
}

/* NULL when the driver does not tell: then let the driver answer. */
struct gs_card *gs_card_of_device(CUdevice device);
struct gs_card *gs_card_of_uuid(const char *uuid);
struct gs_card *gs_card_numbered(uint32_t index); /* the region's index */
uint32_t gs_card_count(void);
struct gs_card *gs_card_at(uint32_t position); /* in the limits file's order */

struct gs_place {
    struct gs_card *card;
    CUcontext context;
    CUdevice device;
};
/* Where the calling thread allocates; card NULL without a current context. */
struct gs_place gs_current_place(void);
struct gs_place gs_stream_place(CUstream stream);
void gs_contexts_changed(void);

/* While a stream is being recorded, by this thread or another, calls that could disturb it are refused and spoil the
 * recording: what we ask beside a program's own call must not. */
static inline int gs_relax_capture(void)
{
    int mode = 2; /* relaxed */
    DRIVER(cuThreadExchangeStreamCaptureMode)(&mode);
    return mode;
}

static inline void gs_restore_capture(int mode) { DRIVER(cuThreadExchangeStreamCaptureMode)(&mode); }

uint64_t gs_round_up(uint64_t bytes, uint64_t step); /* UINT64_MAX on overflow */

/* Reserve, call, settle. */
bool gs_reserve(struct gs_card *card, uint64_t bytes);
bool gs_reserve_quietly(struct gs_card *card, uint64_t bytes); /* a refusal is not counted */
void gs_refuse(struct gs_card *card);
void gs_settle(struct gs_card *card, uint64_t reserved, uint64_t taken);
uint64_t gs_used(const struct gs_card *card);
bool gs_over_limit(const struct gs_card *card);

/* Everything this process holds. */
enum gs_kind {
    GS_LINEAR = 1, /* pages of its own: bytes are what is charged */
    GS_SMALL,      /* shares pages with others: bytes are its length */
    GS_STREAM_ORDERED,
    GS_ARRAY,
    GS_IMPORT,
    GS_EXTERNAL,
    GS_GROUP, /* of other objects, which it keeps alive */
    GS_EXPORTED = 0x100, /* added to the kind */
    GS_MANAGED = 0x200,  /* likewise */
    GS_LENT = 0x400,     /* of a pool's block that other processes may have opened */
};
extern struct gs_table gs_held;

/* Called in a forked child before anything else: it has no context and holds nothing. */
void gs_forget_everything(void);

#endif
