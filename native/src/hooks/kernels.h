/* Kernel code that is loaded onto the card at the first launch, measured where NVML has no figure for this process. */
#ifndef GPUSLICE_KERNELS_H
#define GPUSLICE_KERNELS_H

#include "policy/cards.h"

#define GS_KERNELS_AT_HAND 4096u

extern bool gs_kernels_watched;
extern CUfunction gs_kernels_seen[GS_KERNELS_AT_HAND];

static inline uint32_t gs_kernel_place(CUfunction function)
{
    return (uint32_t)(((uint64_t)(uintptr_t)function * UINT64_C(0x9e3779b97f4a7c15)) >> 52);
}

static inline bool gs_may_be_first(CUfunction function)
{
    return gs_unlikely(__atomic_load_n(&gs_kernels_watched, __ATOMIC_RELAXED)) &&
           __atomic_load_n(&gs_kernels_seen[gs_kernel_place(function)], __ATOMIC_RELAXED) != function;
}

/* To be called when a context was created and NVML does not show what this process holds. */
void gs_watch_kernels(void);

void gs_code_may_come(void);
int gs_code_came(int result);
void gs_first_launch(CUfunction function); /* code may be loaded, unless the function was launched before */

/* Wraps the driver's call. */
#define WATCHED(function, call)                                                                                                \
    (gs_likely(!gs_may_be_first(function)) ? (call) : (gs_first_launch(function), gs_code_came(call)))

#endif
