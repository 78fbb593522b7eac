/* Events put into the state from outside: XIDs and the like. A set sees what happens after it was registered. */
#include <stdlib.h>
#include <time.h>

#include "nvml.h"

#define SUPPORTED 0xc1ffu
#define LOOK_AGAIN_MS 50

struct event_set {
    uint64_t types[SIM_CARDS];
    uint64_t seen; /* events up to this number were delivered or missed */
};

EXPORT nvmlReturn_t nvmlEventSetCreate(struct event_set **set)
{
    TRY(nvml_ready());
    if (!set)
        return NVML_ERROR_INVALID_ARGUMENT;
    *set = calloc(1, sizeof **set);
    if (!*set)
        return NVML_ERROR_MEMORY;
    (*set)->seen = atomic_load(&sim_state()->event_count);
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlEventSetFree(struct event_set *set)
{
    TRY(nvml_ready());
    free(set);
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types)
{
    struct place place;
    TRY(place_of(device, &place));
    if (!types)
        return NVML_ERROR_INVALID_ARGUMENT;
    *types = SUPPORTED;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, struct event_set *set)
{
    struct place place;
    TRY(whole_of(device, &place));
    if (!set)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (types & ~(unsigned long long)SUPPORTED)
        return NVML_ERROR_NOT_SUPPORTED;
    set->types[place.index] |= types;
    return NVML_SUCCESS;
}

/* A MIG device's events reach those who registered for its card. */
static uint32_t whole_index(uint32_t card)
{
    int32_t parent = sim_state()->cards[card].parent;
    return parent >= 0 ? (uint32_t)parent : card;
}

static void write_out(const struct sim_event *event, nvmlEventData_t *data)
{
    const struct sim_card *card = &sim_state()->cards[event->card];
    *data = (nvmlEventData_t){.device = handle_of(whole_index(event->card)),
                              .type = event->type,
                              .data = event->data,
                              .gpu_instance = card->parent >= 0 ? card->gpu_instance : ~0u,
                              .compute_instance = card->parent >= 0 ? card->compute_instance : ~0u};
}

static bool take_next(struct event_set *set, nvmlEventData_t *data)
{
    struct sim_state *state = sim_state();
    uint64_t count = atomic_load_explicit(&state->event_count, memory_order_acquire);
    if (count - set->seen > SIM_EVENTS)
        set->seen = count - SIM_EVENTS; /* the ring has gone round */
    while (set->seen < count) {
        const struct sim_event *event = &state->events[set->seen++ % SIM_EVENTS];
        if (event->sequence != set->seen || event->card >= state->card_count ||
            !(set->types[whole_index(event->card)] & event->type))
            continue;
        write_out(event, data);
        return true;
    }
    return false;
}

EXPORT nvmlReturn_t nvmlEventSetWait_v2(struct event_set *set, nvmlEventData_t *data, unsigned timeout_ms)
{
    TRY(nvml_ready());
    if (!set || !data)
        return NVML_ERROR_INVALID_ARGUMENT;
    uint64_t until_ns = sim_monotonic_ns() + (uint64_t)timeout_ms * 1000000u;
    while (!take_next(set, data)) {
        if (sim_monotonic_ns() >= until_ns)
            return NVML_ERROR_TIMEOUT;
        nanosleep(&(struct timespec){.tv_nsec = LOOK_AGAIN_MS * 1000000}, NULL);
    }
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlEventSetWait(struct event_set *set, nvmlEventData_t *data, unsigned timeout_ms)
{
    return nvmlEventSetWait_v2(set, data, timeout_ms);
}
