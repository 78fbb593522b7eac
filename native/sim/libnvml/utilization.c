/* How busy cards and processes were, from the engine's samples. */
#include <stdlib.h>

#include "nvml.h"

/* Brings the samples up to now. */
static void advance(uint32_t index)
{
    sim_lock();
    sim_reap_unless_done(1000000);
    sim_engine_advance(index, sim_monotonic_ns());
    sim_unlock();
}

static const struct sim_sample *sample_before(const struct sim_card *card, uint64_t back)
{
    return &card->samples[(card->sample_count - back) % SIM_SAMPLES];
}

uint32_t gpu_percent(uint32_t index)
{
    const struct sim_card *card = &sim_state()->cards[index];
    if (card->gpu_percent != SIM_ABSENT)
        return card->gpu_percent;
    advance(index);
    return card->sample_count ? sample_before(card, 1)->percent : 0;
}

/* Idle power, and with the load up to 85 % of the way to the limit. */
uint32_t power_now_mw(uint32_t index)
{
    const struct sim_card *card = &sim_state()->cards[index];
    if (card->power_mw == SIM_ABSENT || card->power_limit_mw == SIM_ABSENT || card->power_limit_mw < card->power_mw)
        return card->power_mw;
    return card->power_mw + (uint32_t)((uint64_t)(card->power_limit_mw - card->power_mw) * gpu_percent(index) * 85u / 10000u);
}

EXPORT nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *rates)
{
    struct place place;
    TRY(whole_of(device, &place));
    if (!rates)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (place.card->mig_mode == 1)
        return NVML_ERROR_NOT_SUPPORTED;
    rates->gpu = gpu_percent(place.index);
    rates->memory = place.card->memory_percent != SIM_ABSENT ? place.card->memory_percent : rates->gpu / 2;
    return NVML_SUCCESS;
}

static nvmlReturn_t engine(nvmlDevice_t device, size_t field, unsigned *percent, unsigned *period_us)
{
    struct place place;
    TRY(whole_of(device, &place));
    if (!percent || !period_us)
        return NVML_ERROR_INVALID_ARGUMENT;
    uint32_t value = *(const uint32_t *)((const char *)place.card + field);
    if (value == SIM_ABSENT || place.card->mig_mode == 1)
        return NVML_ERROR_NOT_SUPPORTED;
    *percent = value;
    *period_us = (unsigned)(SIM_SAMPLE_PERIOD_NS / 1000u);
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetEncoderUtilization(nvmlDevice_t device, unsigned *percent, unsigned *period_us)
{
    return engine(device, offsetof(struct sim_card, encoder_percent), percent, period_us);
}

EXPORT nvmlReturn_t nvmlDeviceGetDecoderUtilization(nvmlDevice_t device, unsigned *percent, unsigned *period_us)
{
    return engine(device, offsetof(struct sim_card, decoder_percent), percent, period_us);
}

/* ------------------------------------------------------------------------------------- per process */

#define MOST 256u

struct found {
    nvmlProcessUtilizationInfo_t samples[MOST];
    unsigned count;
};

static void add(struct found *found, unsigned pid, uint64_t timestamp_us, uint32_t percent)
{
    for (unsigned i = 0; i < found->count; i++)
        if (found->samples[i].pid == pid)
            return; /* a newer one is there */
    if (found->count < MOST)
        found->samples[found->count++] =
            (nvmlProcessUtilizationInfo_t){.timestamp_us = timestamp_us, .pid = pid, .sm = percent, .memory = percent / 2};
}

static void add_ghosts(struct found *found, uint32_t index)
{
    const struct sim_state *state = sim_state();
    for (uint32_t i = 0; i < state->ghost_high; i++) {
        const struct sim_ghost *ghost = &state->ghosts[i];
        if (ghost->live && ghost->card == index && ghost->percent)
            add(found, (unsigned)ghost->pid, sim_realtime_us(), ghost->percent);
    }
}

/* In a PID namespace of its own the caller gets that one's numbers since 570 (kern_perf_ctrl.c of the open kernel modules),
 * the host's before. */
static int32_t number_of(const struct sim_sample_process *process)
{
    bool same = sim_state()->processes[process->slot].live && sim_state()->processes[process->slot].pid == process->pid;
    bool here = driver_major() >= 570 || !sim_in_own_namespace();
    return same && here ? sim_pid_here(process->slot) : process->pid;
}

/* Each process's newest sample after the moment given; who was idle has none. */
static void find(uint32_t index, uint64_t since_us, struct found *found)
{
    const struct sim_card *card = &sim_state()->cards[index];
    found->count = 0;
    advance(index);
    add_ghosts(found, index);
    sim_lock();
    for (uint64_t back = 1; back <= SIM_SAMPLES && back <= card->sample_count; back++) {
        const struct sim_sample *sample = sample_before(card, back);
        if (sample->timestamp_us <= since_us)
            break;
        for (uint32_t i = 0; i < sample->process_count; i++) {
            int32_t pid = number_of(&sample->processes[i]);
            if (pid)
                add(found, (unsigned)pid, sample->timestamp_us, sample->processes[i].percent);
        }
    }
    sim_unlock();
}

static nvmlReturn_t samples_of(nvmlDevice_t device, uint64_t since_us, struct found *found)
{
    struct place place;
    TRY(whole_of(device, &place));
    if (place.card->mig_mode == 1)
        return NVML_ERROR_NOT_SUPPORTED;
    find(place.index, since_us, found);
    return found->count ? NVML_SUCCESS : NVML_ERROR_NOT_FOUND;
}

EXPORT nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t device, nvmlProcessUtilizationSample_t *samples,
                                                    unsigned *count, unsigned long long since_us)
{
    struct found found;
    if (!count)
        return NVML_ERROR_INVALID_ARGUMENT;
    TRY(samples_of(device, since_us, &found));
    unsigned room = samples ? *count : 0;
    *count = found.count;
    if (room < found.count)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < found.count; i++)
        samples[i] = (nvmlProcessUtilizationSample_t){
            found.samples[i].pid, found.samples[i].timestamp_us, found.samples[i].sm, found.samples[i].memory, 0, 0};
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetProcessesUtilizationInfo(nvmlDevice_t device, nvmlProcessesUtilizationInfo_t *info)
{
    struct found found;
    if (!info)
        return NVML_ERROR_INVALID_ARGUMENT;
    TRY(nvml_ready());
    if (driver_major() < 550)
        return NVML_ERROR_FUNCTION_NOT_FOUND;
    if (info->version != NVML_STRUCT_VERSION(nvmlProcessesUtilizationInfo_t, 1))
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    TRY(samples_of(device, info->last_seen_us, &found));
    unsigned room = info->samples ? info->count : 0;
    info->count = found.count;
    if (room < found.count)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < found.count; i++)
        info->samples[i] = found.samples[i];
    return NVML_SUCCESS;
}
