/* GPM: averages between two samples, on cards from Hopper on. How busy the multiprocessors were is simulated; what
 * they computed is not, so of the pipes only a share of that is told. */
#include <stdlib.h>

#include "nvml.h"

struct sample {
    uint32_t index;
    uint64_t time_ns, busy_ns;
    uint64_t pcie_tx_bytes, pcie_rx_bytes, nvlink_tx_kib, nvlink_rx_kib;
};

typedef struct {
    unsigned id;
    nvmlReturn_t result;
    double value;
    struct {
        const char *short_name, *long_name, *unit;
    } about;
} nvmlGpmMetric_t;

typedef struct {
    unsigned version, count;
    struct sample *first, *second;
    nvmlGpmMetric_t metrics[]; /* as many as the caller's header has room for */
} nvmlGpmMetricsGet_t;

typedef struct {
    unsigned version, supported;
} nvmlGpmSupport_t;

EXPORT nvmlReturn_t nvmlGpmQueryDeviceSupport(nvmlDevice_t device, nvmlGpmSupport_t *support)
{
    struct place place;
    TRY(place_of(device, &place));
    if (!support)
        return NVML_ERROR_INVALID_ARGUMENT;
    support->supported = place.whole->gpm && driver_major() >= 520;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlGpmSampleAlloc(struct sample **sample)
{
    TRY(nvml_ready());
    if (!sample)
        return NVML_ERROR_INVALID_ARGUMENT;
    *sample = calloc(1, sizeof **sample);
    return *sample ? NVML_SUCCESS : NVML_ERROR_MEMORY;
}

EXPORT nvmlReturn_t nvmlGpmSampleFree(struct sample *sample)
{
    if (!sample)
        return NVML_ERROR_INVALID_ARGUMENT;
    free(sample);
    return NVML_SUCCESS;
}

static nvmlReturn_t take(const struct place *place, struct sample *sample)
{
    if (!sample)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (!place->whole->gpm)
        return NVML_ERROR_NOT_SUPPORTED;
    sim_lock();
    sim_reap_unless_done(1000000);
    sample->time_ns = sim_monotonic_ns();
    sim_engine_advance(place->index, sample->time_ns);
    sample->busy_ns = place->card->busy_ns;
    sim_unlock();
    sample->index = place->index;
    sample->pcie_tx_bytes = place->whole->pcie_tx_bytes;
    sample->pcie_rx_bytes = place->whole->pcie_rx_bytes;
    sample->nvlink_tx_kib = place->whole->nvlink_tx_kib;
    sample->nvlink_rx_kib = place->whole->nvlink_rx_kib;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlGpmSampleGet(nvmlDevice_t device, struct sample *sample)
{
    struct place place;
    TRY(place_of(device, &place));
    return take(&place, sample);
}

EXPORT nvmlReturn_t nvmlGpmMigSampleGet(nvmlDevice_t device, unsigned gpu_instance, struct sample *sample)
{
    struct place place;
    TRY(whole_of(device, &place));
    for (uint32_t index = 0; index < sim_state()->card_count; index++) {
        struct sim_card *card = &sim_state()->cards[index];
        if (card->parent == (int32_t)place.index && card->gpu_instance == gpu_instance)
            return take(&(struct place){index, card, place.whole}, sample);
    }
    return NVML_ERROR_INVALID_ARGUMENT;
}

static double busy_percent(const struct sample *from, const struct sample *to)
{
    const struct sim_card *card = &sim_state()->cards[to->index];
    if (card->gpu_percent != SIM_ABSENT)
        return card->gpu_percent;
    return 100.0 * (double)(to->busy_ns - from->busy_ns) / (double)(to->time_ns - from->time_ns);
}

static double rate_mib(uint64_t from, uint64_t to, double seconds) { return (double)(to - from) / MIB / seconds; }

static nvmlReturn_t measure(nvmlGpmMetric_t *metric, const struct sample *from, const struct sample *to)
{
    double seconds = (double)(to->time_ns - from->time_ns) / 1e9;
    double busy = busy_percent(from, to);
    switch (metric->id) {
    case 1:
    case 2: metric->value = busy; break;
    case 3: metric->value = busy * 0.5; break;
    case 5:
    case 7: metric->value = busy * 0.3; break;
    case 10: metric->value = busy * 0.4; break;
    case 4:
    case 12: metric->value = busy * 0.2; break;
    case 6:
    case 9:
    case 11:
    case 13: metric->value = 0; break;
    case 20: metric->value = rate_mib(from->pcie_tx_bytes, to->pcie_tx_bytes, seconds); break;
    case 21: metric->value = rate_mib(from->pcie_rx_bytes, to->pcie_rx_bytes, seconds); break;
    case 60: metric->value = rate_mib(from->nvlink_rx_kib * 1024, to->nvlink_rx_kib * 1024, seconds); break;
    case 61: metric->value = rate_mib(from->nvlink_tx_kib * 1024, to->nvlink_tx_kib * 1024, seconds); break;
    default: return NVML_ERROR_NOT_SUPPORTED;
    }
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlGpmMetricsGet(nvmlGpmMetricsGet_t *get)
{
    TRY(nvml_ready());
    if (!get || !get->first || !get->second || get->second->time_ns <= get->first->time_ns)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (get->version != 1)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    for (unsigned i = 0; i < get->count; i++)
        get->metrics[i].result = measure(&get->metrics[i], get->first, get->second);
    return NVML_SUCCESS;
}
