/* What the parts of libnvidia-ml share. */
#ifndef GPUSLICE_SIM_NVML_H
#define GPUSLICE_SIM_NVML_H

#include "../state/state.h"
#include "nvml_abi.h"

#define MIB (1024u * 1024u)
#define TRY(call)                                                                                                              \
    do {                                                                                                                       \
        nvmlReturn_t try_result = (call);                                                                                      \
        if (try_result != NVML_SUCCESS)                                                                                        \
            return try_result;                                                                                                 \
    } while (0)

/* A card, or a MIG device of one. */
struct place {
    uint32_t index;
    struct sim_card *card;
    struct sim_card *whole; /* the card itself, or the one a MIG device is part of */
};

extern struct sim_view view; /* fixed by nvmlInit */

nvmlReturn_t nvml_ready(void);
nvmlReturn_t place_for(const char *call, nvmlDevice_t device, struct place *place);
nvmlReturn_t whole_for(const char *call, nvmlDevice_t device, struct place *place);
#define place_of(device, place) place_for(__func__, device, place) /* ready, known, not lost, and not to refuse this call */
#define whole_of(device, place) whole_for(__func__, device, place) /* as above; MIG devices are not supported */
nvmlDevice_t handle_of(uint32_t index);
unsigned driver_major(void);
nvmlReturn_t copy_text(char *to, unsigned length, const char *text);
uint32_t gpu_percent(uint32_t index); /* over the last finished sample */
uint32_t power_now_mw(uint32_t index);

#endif
