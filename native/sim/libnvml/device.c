/* What a card is. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "nvml.h"

/* A gauge that a card may lack. */
static nvmlReturn_t gauge(unsigned *out, uint32_t value)
{
    if (!out)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (value == SIM_ABSENT)
        return NVML_ERROR_NOT_SUPPORTED;
    *out = value;
    return NVML_SUCCESS;
}

#define CARD_GAUGE(function, field)                                                                                            \
    EXPORT nvmlReturn_t function(nvmlDevice_t device, unsigned *out)                                                           \
    {                                                                                                                          \
        struct place place;                                                                                                    \
        TRY(place_of(device, &place));                                                                                         \
        return gauge(out, place.whole->field);                                                                                 \
    }
CARD_GAUGE(nvmlDeviceGetMinorNumber, minor)
CARD_GAUGE(nvmlDeviceGetBrand, brand)
CARD_GAUGE(nvmlDeviceGetArchitecture, architecture)
CARD_GAUGE(nvmlDeviceGetMemoryBusWidth, memory_bus_bits)
CARD_GAUGE(nvmlDeviceGetPersistenceMode, persistence)
CARD_GAUGE(nvmlDeviceGetComputeMode, compute_mode)
CARD_GAUGE(nvmlDeviceGetDisplayMode, display_mode)
CARD_GAUGE(nvmlDeviceGetDisplayActive, display_active)
CARD_GAUGE(nvmlDeviceGetPowerManagementLimit, power_limit_mw)
CARD_GAUGE(nvmlDeviceGetEnforcedPowerLimit, power_limit_mw)
CARD_GAUGE(nvmlDeviceGetPowerManagementDefaultLimit, power_default_limit_mw)
CARD_GAUGE(nvmlDeviceGetFanSpeed, fan_percent)
CARD_GAUGE(nvmlDeviceGetPerformanceState, performance_state)
CARD_GAUGE(nvmlDeviceGetPowerState, performance_state)
CARD_GAUGE(nvmlDeviceGetCurrPcieLinkGeneration, pcie_generation)
CARD_GAUGE(nvmlDeviceGetCurrPcieLinkWidth, pcie_width)
CARD_GAUGE(nvmlDeviceGetMaxPcieLinkGeneration, pcie_max_generation)
CARD_GAUGE(nvmlDeviceGetGpuMaxPcieLinkGeneration, pcie_max_generation)
CARD_GAUGE(nvmlDeviceGetMaxPcieLinkWidth, pcie_max_width)
CARD_GAUGE(nvmlDeviceGetPcieReplayCounter, pcie_replays)
CARD_GAUGE(nvmlDeviceGetRetiredPagesPendingStatus, retired_pending)

#define CARD_TEXT(function, field)                                                                                             \
    EXPORT nvmlReturn_t function(nvmlDevice_t device, char *text, unsigned length)                                             \
    {                                                                                                                          \
        struct place place;                                                                                                    \
        TRY(place_of(device, &place));                                                                                         \
        return *place.whole->field ? copy_text(text, length, place.whole->field) : NVML_ERROR_NOT_SUPPORTED;                   \
    }
CARD_TEXT(nvmlDeviceGetSerial, serial)
CARD_TEXT(nvmlDeviceGetBoardPartNumber, part_number)
CARD_TEXT(nvmlDeviceGetVbiosVersion, vbios)

EXPORT nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned length)
{
    char text[160];
    struct place place;
    TRY(place_of(device, &place));
    if (place.card == place.whole)
        snprintf(text, sizeof text, "%s", place.card->name);
    else
        snprintf(text, sizeof text, "%s MIG %s", place.whole->name, place.card->mig_profile);
    return copy_text(name, length, text);
}

EXPORT nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned length)
{
    struct place place;
    TRY(place_of(device, &place));
    return copy_text(uuid, length, place.card->uuid);
}

EXPORT nvmlReturn_t nvmlDeviceGetBoardId(nvmlDevice_t device, unsigned *board)
{
    struct place place;
    TRY(whole_of(device, &place));
    return gauge(board, place.whole->pci_domain << 16 | place.whole->pci_bus << 8 | place.whole->pci_device);
}

EXPORT nvmlReturn_t nvmlDeviceGetMultiGpuBoard(nvmlDevice_t device, unsigned *multi)
{
    struct place place;
    TRY(place_of(device, &place));
    return gauge(multi, 0);
}

EXPORT nvmlReturn_t nvmlDeviceGetNumGpuCores(nvmlDevice_t device, unsigned *cores)
{
    struct place place;
    TRY(place_of(device, &place));
    return gauge(cores, place.card->multiprocessor_count * place.whole->cores_per_multiprocessor);
}

EXPORT nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor)
{
    struct place place;
    TRY(place_of(device, &place));
    if (!major || !minor)
        return NVML_ERROR_INVALID_ARGUMENT;
    *major = (int)place.whole->capability_major;
    *minor = (int)place.whole->capability_minor;
    return NVML_SUCCESS;
}

/* ----------------------------------------------------------------------------------------------- PCI */

static void bus_id(const struct sim_card *card, char *text, size_t length, int domain_digits)
{
    snprintf(text, length, "%0*X:%02X:%02X.0", domain_digits, card->pci_domain, card->pci_bus, card->pci_device);
}

EXPORT nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
    struct place place;
    TRY(place_of(device, &place));
    if (!pci)
        return NVML_ERROR_INVALID_ARGUMENT;
    const struct sim_card *card = place.whole;
    *pci = (nvmlPciInfo_t){.domain = card->pci_domain,
                           .bus = card->pci_bus,
                           .device = card->pci_device,
                           .device_id = card->pci_device_id,
                           .subsystem_id = card->pci_subsystem_id};
    bus_id(card, pci->bus_id_legacy, sizeof pci->bus_id_legacy, 4);
    bus_id(card, pci->bus_id, sizeof pci->bus_id, 8);
    return NVML_SUCCESS;
}

/* The older forms end earlier and carry the short bus id alone. */
EXPORT nvmlReturn_t nvmlDeviceGetPciInfo_v2(nvmlDevice_t device, nvmlPciInfo_v2_legacy_t *pci)
{
    nvmlPciInfo_t now;
    TRY(nvmlDeviceGetPciInfo_v3(device, &now));
    if (!pci)
        return NVML_ERROR_INVALID_ARGUMENT;
    memset(pci, 0, sizeof *pci);
    memcpy(pci, &now, offsetof(nvmlPciInfo_t, bus_id));
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetPciInfo(nvmlDevice_t device, nvmlPciInfo_v2_legacy_t *pci)
{
    return nvmlDeviceGetPciInfo_v2(device, pci);
}

EXPORT nvmlReturn_t nvmlDeviceGetPciInfoExt(nvmlDevice_t device, nvmlPciInfoExt_t *pci)
{
    struct place place;
    TRY(place_of(device, &place));
    if (!pci)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (pci->version != NVML_STRUCT_VERSION(nvmlPciInfoExt_t, 1))
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    const struct sim_card *card = place.whole;
    *pci = (nvmlPciInfoExt_t){.version = pci->version,
                              .domain = card->pci_domain,
                              .bus = card->pci_bus,
                              .device = card->pci_device,
                              .device_id = card->pci_device_id,
                              .subsystem_id = card->pci_subsystem_id,
                              .base_class = 3,
                              .sub_class = 2};
    bus_id(card, pci->bus_id, sizeof pci->bus_id, 8);
    return NVML_SUCCESS;
}

/* --------------------------------------------------------------------------------- power, heat, clocks */

EXPORT nvmlReturn_t nvmlDeviceGetPowerManagementMode(nvmlDevice_t device, unsigned *mode)
{
    struct place place;
    TRY(whole_of(device, &place));
    return gauge(mode, place.card->power_limit_mw != SIM_ABSENT);
}

EXPORT nvmlReturn_t nvmlDeviceGetPowerManagementLimitConstraints(nvmlDevice_t device, unsigned *least, unsigned *most)
{
    struct place place;
    TRY(whole_of(device, &place));
    TRY(gauge(least, place.card->power_min_limit_mw));
    return gauge(most, place.card->power_max_limit_mw);
}

EXPORT nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned *milliwatts)
{
    struct place place;
    TRY(place_of(device, &place));
    return gauge(milliwatts, power_now_mw((uint32_t)(place.whole - sim_state()->cards)));
}

/* As if the card had been idle since the machine came up. */
EXPORT nvmlReturn_t nvmlDeviceGetTotalEnergyConsumption(nvmlDevice_t device, unsigned long long *millijoules)
{
    struct place place;
    TRY(whole_of(device, &place));
    if (!millijoules)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (place.card->power_mw == SIM_ABSENT || place.card->architecture < 5)
        return NVML_ERROR_NOT_SUPPORTED;
    uint64_t age_ms = (sim_monotonic_ns() - sim_state()->created_ns) / 1000000u;
    *millijoules = age_ms * place.card->power_mw / 1000u;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, int sensor, unsigned *celsius)
{
    struct place place;
    TRY(place_of(device, &place));
    return sensor == 0 ? gauge(celsius, place.whole->temperature_c) : NVML_ERROR_INVALID_ARGUMENT;
}

EXPORT nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t device, nvmlTemperature_t *temperature)
{
    struct place place;
    TRY(place_of(device, &place));
    if (driver_major() < 560)
        return NVML_ERROR_FUNCTION_NOT_FOUND;
    if (!temperature)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (temperature->version != NVML_STRUCT_VERSION(nvmlTemperature_t, 1))
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    if (temperature->sensor != 0)
        return NVML_ERROR_INVALID_ARGUMENT;
    temperature->celsius = (int)place.whole->temperature_c;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetTemperatureThreshold(nvmlDevice_t device, int threshold, unsigned *celsius)
{
    struct place place;
    TRY(place_of(device, &place));
    if (threshold == 0)
        return gauge(celsius, place.whole->shutdown_c);
    return threshold == 1 ? gauge(celsius, place.whole->slowdown_c) : NVML_ERROR_NOT_SUPPORTED;
}

EXPORT nvmlReturn_t nvmlDeviceGetNumFans(nvmlDevice_t device, unsigned *count)
{
    struct place place;
    TRY(whole_of(device, &place));
    return gauge(count, place.card->fan_percent != SIM_ABSENT);
}

EXPORT nvmlReturn_t nvmlDeviceGetFanSpeed_v2(nvmlDevice_t device, unsigned fan, unsigned *percent)
{
    return fan == 0 ? nvmlDeviceGetFanSpeed(device, percent) : NVML_ERROR_INVALID_ARGUMENT;
}

static nvmlReturn_t clock_of(const struct sim_card *card, int which, bool highest, unsigned *mhz)
{
    switch (which) {
    case 0:
    case 1: return gauge(mhz, highest ? card->max_sm_clock_mhz : card->sm_clock_mhz);
    case 2: return gauge(mhz, highest ? card->max_memory_clock_mhz : card->memory_clock_mhz);
    case 3: return gauge(mhz, highest ? card->max_video_clock_mhz : card->video_clock_mhz);
    default: return NVML_ERROR_INVALID_ARGUMENT;
    }
}

#define CARD_CLOCK(function, highest)                                                                                          \
    EXPORT nvmlReturn_t function(nvmlDevice_t device, int which, unsigned *mhz)                                                \
    {                                                                                                                          \
        struct place place;                                                                                                    \
        TRY(place_of(device, &place));                                                                                         \
        return clock_of(place.whole, which, highest, mhz);                                                                     \
    }
CARD_CLOCK(nvmlDeviceGetClockInfo, false)
CARD_CLOCK(nvmlDeviceGetMaxClockInfo, true)
CARD_CLOCK(nvmlDeviceGetApplicationsClock, true)
CARD_CLOCK(nvmlDeviceGetDefaultApplicationsClock, true)
CARD_CLOCK(nvmlDeviceGetMaxCustomerBoostClock, true)

EXPORT nvmlReturn_t nvmlDeviceGetClock(nvmlDevice_t device, int which, int id, unsigned *mhz)
{
    struct place place;
    TRY(place_of(device, &place));
    return clock_of(place.whole, which, id != 0, mhz);
}

static nvmlReturn_t reasons(nvmlDevice_t device, unsigned long long *bits, bool supported)
{
    struct place place;
    TRY(place_of(device, &place));
    if (!bits)
        return NVML_ERROR_INVALID_ARGUMENT;
    *bits = supported ? 0x1ff : place.whole->clock_event_reasons;
    return NVML_SUCCESS;
}

#define CARD_REASONS(function, supported)                                                                                      \
    EXPORT nvmlReturn_t function(nvmlDevice_t device, unsigned long long *bits) { return reasons(device, bits, supported); }
CARD_REASONS(nvmlDeviceGetCurrentClocksEventReasons, false)
CARD_REASONS(nvmlDeviceGetCurrentClocksThrottleReasons, false)
CARD_REASONS(nvmlDeviceGetSupportedClocksEventReasons, true)
CARD_REASONS(nvmlDeviceGetSupportedClocksThrottleReasons, true)

EXPORT nvmlReturn_t nvmlDeviceGetPcieThroughput(nvmlDevice_t device, int counter, unsigned *kib_per_s)
{
    struct place place;
    TRY(whole_of(device, &place));
    return counter == 0 || counter == 1 ? gauge(kib_per_s, 0) : NVML_ERROR_INVALID_ARGUMENT;
}

/* ----------------------------------------------------------------------------------------------- ECC */

EXPORT nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t device, unsigned *current, unsigned *pending)
{
    struct place place;
    TRY(place_of(device, &place));
    TRY(gauge(current, place.whole->ecc));
    return gauge(pending, place.whole->ecc);
}

static uint64_t ecc_count(const struct sim_card *card, int uncorrected, int aggregate)
{
    if (uncorrected)
        return aggregate ? card->ecc_uncorrected_aggregate : card->ecc_uncorrected_volatile;
    return aggregate ? card->ecc_corrected_aggregate : card->ecc_corrected_volatile;
}

EXPORT nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, int uncorrected, int aggregate, unsigned long long *count)
{
    struct place place;
    TRY(place_of(device, &place));
    if (!count || (uncorrected & ~1) || (aggregate & ~1))
        return NVML_ERROR_INVALID_ARGUMENT;
    if (place.whole->ecc != 1)
        return NVML_ERROR_NOT_SUPPORTED;
    *count = ecc_count(place.whole, uncorrected, aggregate);
    return NVML_SUCCESS;
}

/* All errors are the memory's (location 2): caches and registers have had none. */
EXPORT nvmlReturn_t nvmlDeviceGetMemoryErrorCounter(nvmlDevice_t device, int uncorrected, int aggregate, int location,
                                                    unsigned long long *count)
{
    TRY(nvmlDeviceGetTotalEccErrors(device, uncorrected, aggregate, count));
    if (location != 2)
        *count = 0;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetRetiredPages(nvmlDevice_t device, int cause, unsigned *count, unsigned long long *addresses)
{
    struct place place;
    TRY(whole_of(device, &place));
    if (!count || (cause & ~1))
        return NVML_ERROR_INVALID_ARGUMENT;
    if (place.card->retired_single == SIM_ABSENT64)
        return NVML_ERROR_NOT_SUPPORTED;
    unsigned room = *count;
    *count = (unsigned)(cause ? place.card->retired_double : place.card->retired_single);
    for (unsigned i = 0; addresses && i < *count && i < room; i++)
        addresses[i] = 0x1000u * (i + 1);
    return *count > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned *corrected, unsigned *uncorrected,
                                              unsigned *pending, unsigned *failure)
{
    struct place place;
    TRY(place_of(device, &place));
    if (!corrected || !uncorrected || !pending || !failure)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (place.whole->remapped_corrected == SIM_ABSENT64)
        return NVML_ERROR_NOT_SUPPORTED;
    *corrected = (unsigned)place.whole->remapped_corrected;
    *uncorrected = (unsigned)place.whole->remapped_uncorrected;
    *pending = place.whole->remap_pending;
    *failure = place.whole->remap_failure;
    return NVML_SUCCESS;
}

/* Banks by how many spare rows they have left: all of them, while nothing was remapped. */
EXPORT nvmlReturn_t nvmlDeviceGetRowRemapperHistogram(nvmlDevice_t device, unsigned *banks)
{
    unsigned corrected, uncorrected, pending, failure;
    TRY(nvmlDeviceGetRemappedRows(device, &corrected, &uncorrected, &pending, &failure));
    if (!banks)
        return NVML_ERROR_INVALID_ARGUMENT;
    memset(banks, 0, 5 * sizeof *banks);
    banks[1] = corrected + uncorrected;
    banks[0] = 640 - banks[1];
    return NVML_SUCCESS;
}
