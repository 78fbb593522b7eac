/* nvmlDeviceGetFieldValues: many gauges in one call, each with a result of its own. */
#include "nvml.h"

enum { TYPE_UINT = 1, TYPE_ULONGLONG = 3 };

struct field {
    uint64_t value;
    int type;
    bool known;
};

static struct field wide(uint64_t value) { return (struct field){value, TYPE_ULONGLONG, value != SIM_ABSENT64}; }

static struct field narrow(uint32_t value) { return (struct field){value, TYPE_UINT, value != SIM_ABSENT}; }

static struct field if_ecc(const struct sim_card *card, uint64_t value) { return wide(card->ecc == 1 ? value : SIM_ABSENT64); }

static struct field links(const struct sim_card *card, uint64_t value)
{
    return wide(card->nvlink_count ? value : SIM_ABSENT64);
}

static struct field energy(const struct sim_card *card)
{
    uint64_t age_ms = (sim_monotonic_ns() - sim_state()->created_ns) / 1000000u;
    return wide(card->power_mw == SIM_ABSENT ? SIM_ABSENT64 : age_ms * card->power_mw / 1000u);
}

static struct field errors(const struct sim_card *card, unsigned id)
{
    switch (id) {
    case 3: return if_ecc(card, card->ecc_corrected_volatile);
    case 4: return if_ecc(card, card->ecc_uncorrected_volatile);
    case 5: return if_ecc(card, card->ecc_corrected_aggregate);
    case 6: return if_ecc(card, card->ecc_uncorrected_aggregate);
    case 29: return wide(card->retired_single);
    case 30: return wide(card->retired_double);
    case 31: return narrow(card->retired_pending);
    case 142: return wide(card->remapped_corrected);
    case 143: return wide(card->remapped_uncorrected);
    case 144: return narrow(card->remapped_corrected == SIM_ABSENT64 ? SIM_ABSENT : card->remap_pending);
    case 145: return narrow(card->remapped_corrected == SIM_ABSENT64 ? SIM_ABSENT : card->remap_failure);
    case 230: return narrow(driver_major() >= 560 ? card->recovery_action : SIM_ABSENT);
    default: return (struct field){.known = false};
    }
}

static struct field power_and_heat(const struct sim_card *card, unsigned id)
{
    switch (id) {
    case 74: return wide(card->throttled_power_ns);
    case 75:
    case 251:
    case 269: return wide(card->throttled_thermal_ns);
    case 76:
    case 77:
    case 78:
    case 79:
    case 80:
    case 81:
    case 252:
    case 253:
    case 270:
    case 271: return wide(0);
    case 82: return narrow(card->memory_temperature_c);
    case 83: return energy(card);
    case 185:
    case 186: return narrow(power_now_mw((uint32_t)(card - sim_state()->cards)));
    case 187: return narrow(card->power_min_limit_mw);
    case 188: return narrow(card->power_max_limit_mw);
    case 189: return narrow(card->power_default_limit_mw);
    case 190:
    case 192: return narrow(card->power_limit_mw);
    default: return (struct field){.known = false};
    }
}

static struct field traffic(const struct sim_card *card, unsigned id)
{
    switch (id) {
    case 91: return narrow(card->nvlink_count ? card->nvlink_count : SIM_ABSENT);
    case 94: return wide(card->pcie_replays);
    case 138: return links(card, card->nvlink_tx_kib);
    case 139: return links(card, card->nvlink_rx_kib);
    case 197: return wide((uint32_t)card->pcie_tx_bytes); /* an H100 begins anew after 4 GiB */
    case 198: return wide((uint32_t)card->pcie_rx_bytes);
    default: return (struct field){.known = false};
    }
}

static struct field look_up(const struct sim_card *card, unsigned id)
{
    struct field (*const groups[])(const struct sim_card *, unsigned) = {errors, power_and_heat, traffic};
    struct field field = {.known = false};
    for (unsigned i = 0; i < 3 && !field.known; i++)
        field = groups[i](card, id);
    return field;
}

EXPORT nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *values)
{
    struct place place;
    TRY(place_of(device, &place));
    if (!values || count < 1)
        return NVML_ERROR_INVALID_ARGUMENT;
    for (int i = 0; i < count; i++) {
        struct field field = look_up(place.whole, values[i].field);
        values[i].timestamp_us = (long long)sim_realtime_us();
        values[i].latency_us = 1;
        values[i].type = field.type;
        values[i].result = field.known ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
        values[i].value.ulonglong = field.known ? field.value : 0;
    }
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceClearFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *values)
{
    struct place place;
    TRY(place_of(device, &place));
    return values && count > 0 ? NVML_ERROR_NO_PERMISSION : NVML_ERROR_INVALID_ARGUMENT;
}
