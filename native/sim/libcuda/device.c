/* Devices and what they say about themselves. */
#include <stdlib.h>
#include <stdio.h>
#include <string.h>

#include "driver.h"

const struct sim_card *card_of(const struct device *device) { return &sim_state()->cards[device->card]; }

static const struct sim_card *whole_card_of(const struct device *device)
{
    const struct sim_card *card = card_of(device);
    return card->parent >= 0 ? &sim_state()->cards[card->parent] : card;
}

struct device *device_on(uint32_t card)
{
    for (unsigned i = 0; i < device_count; i++)
        if (devices[i].card == card)
            return &devices[i];
    return NULL;
}

CUresult device_of(CUdevice ordinal, struct device **device)
{
    TRY(driver_ready());
    if (ordinal < 0 || (unsigned)ordinal >= device_count)
        return CUDA_ERROR_INVALID_DEVICE;
    *device = &devices[ordinal];
    return CUDA_SUCCESS;
}

CUresult device_fault(const struct device *device)
{
    const struct sim_card *card = card_of(device);
    if (card->lost || whole_card_of(device)->lost)
        return CUDA_ERROR_UNKNOWN;
    return (CUresult)card->failing;
}

EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    struct device *found;
    if (!device)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(device_of(ordinal, &found));
    *device = ordinal;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetCount(int *count)
{
    TRY(driver_ready());
    if (!count)
        return CUDA_ERROR_INVALID_VALUE;
    *count = (int)device_count;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetName(char *name, int length, CUdevice ordinal)
{
    struct device *device;
    TRY(device_of(ordinal, &device));
    if (!name || length <= 0)
        return CUDA_ERROR_INVALID_VALUE;
    const struct sim_card *card = card_of(device);
    if (card->parent >= 0)
        snprintf(name, (size_t)length, "%s MIG %s", whole_card_of(device)->name, card->mig_profile);
    else
        snprintf(name, (size_t)length, "%s", card->name);
    return CUDA_SUCCESS;
}

static void uuid_bytes(const char *text, unsigned char *bytes)
{
    unsigned digits = 0;
    memset(bytes, 0, 16);
    for (const char *at = text + 4; *at && digits < 32; at++) {
        int digit = *at >= '0' && *at <= '9' ? *at - '0' : *at >= 'a' && *at <= 'f' ? *at - 'a' + 10 : -1;
        if (digit < 0)
            continue;
        bytes[digits / 2] = (unsigned char)(bytes[digits / 2] << 4 | digit);
        digits++;
    }
}

/* The first form names the whole card even for a MIG device. */
EXPORT CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice ordinal)
{
    struct device *device;
    TRY(device_of(ordinal, &device));
    if (!uuid)
        return CUDA_ERROR_INVALID_VALUE;
    uuid_bytes(whole_card_of(device)->uuid, (unsigned char *)uuid->bytes);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice ordinal)
{
    struct device *device;
    TRY(device_of(ordinal, &device));
    if (!uuid)
        return CUDA_ERROR_INVALID_VALUE;
    uuid_bytes(card_of(device)->uuid, (unsigned char *)uuid->bytes);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice ordinal)
{
    struct device *device;
    TRY(device_of(ordinal, &device));
    if (!bytes)
        return CUDA_ERROR_INVALID_VALUE;
    *bytes = sim_usable_bytes(device->card);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceTotalMem(unsigned *bytes, CUdevice ordinal)
{
    size_t wide;
    if (!bytes)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(cuDeviceTotalMem_v2(&wide, ordinal));
    *bytes = wide > UINT32_MAX ? UINT32_MAX : (unsigned)wide;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetPCIBusId(char *text, int length, CUdevice ordinal)
{
    struct device *device;
    TRY(device_of(ordinal, &device));
    if (!text || length < 13)
        return CUDA_ERROR_INVALID_VALUE;
    const struct sim_card *card = whole_card_of(device);
    snprintf(text, (size_t)length, "%04x:%02x:%02x.0", card->pci_domain, card->pci_bus, card->pci_device);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetByPCIBusId(CUdevice *found, const char *text)
{
    unsigned domain = 0, bus, slot;
    TRY(driver_ready());
    if (!found || !text)
        return CUDA_ERROR_INVALID_VALUE;
    if (sscanf(text, "%x:%x:%x", &domain, &bus, &slot) != 3) {
        domain = 0;
        if (sscanf(text, "%x:%x", &bus, &slot) != 2)
            return CUDA_ERROR_INVALID_VALUE;
    }
    for (unsigned i = 0; i < device_count; i++) {
        const struct sim_card *card = whole_card_of(&devices[i]);
        if (card->pci_domain == domain && card->pci_bus == bus && card->pci_device == slot) {
            *found = (CUdevice)i;
            return CUDA_SUCCESS;
        }
    }
    return CUDA_ERROR_INVALID_DEVICE;
}

EXPORT CUresult cuDeviceComputeCapability(int *major, int *minor, CUdevice ordinal)
{
    struct device *device;
    TRY(device_of(ordinal, &device));
    if (!major || !minor)
        return CUDA_ERROR_INVALID_VALUE;
    *major = (int)card_of(device)->capability_major;
    *minor = (int)card_of(device)->capability_minor;
    return CUDA_SUCCESS;
}

static int threads_per_multiprocessor(const struct sim_card *card)
{
    unsigned capability = card->capability_major * 10 + card->capability_minor;
    return capability == 75 ? 1024 : capability == 86 || capability == 89 ? 1536 : 2048;
}

/* Values that are the same on every card the simulation knows. */
static const int common_attributes[][2] = {
    {1, 1024},       {2, 1024},    {3, 1024},        {4, 64},       {5, 2147483647}, {6, 65535},  {7, 65535},  {8, 49152},
    {9, 65536},      {10, 32},     {11, 2147483647}, {12, 65536},   {14, 512},       {15, 1},     {17, 0},     {18, 0},
    {19, 1},         {21, 131072}, {22, 131072},     {23, 65536},   {24, 16384},     {25, 16384}, {26, 16384}, {27, 32768},
    {28, 32768},     {29, 2048},   {30, 512},        {31, 1},       {35, 0},         {41, 1},     {42, 32768}, {43, 2048},
    {44, 1},         {45, 32768},  {46, 32768},      {47, 8192},    {48, 8192},      {49, 32768}, {51, 32},    {52, 32768},
    {53, 32768},     {54, 2046},   {55, 32768},      {56, 131072},  {57, 65536},     {58, 16384}, {59, 16384}, {60, 16384},
    {61, 32768},     {62, 2048},   {63, 32768},      {64, 32768},   {65, 2048},      {66, 32768}, {67, 32768}, {68, 2046},
    {69, 268435456}, {70, 131072}, {71, 65000},      {72, 2097120}, {73, 32768},     {74, 32768}, {77, 32768}, {78, 1},
    {79, 1},         {80, 1},      {82, 65536},      {83, 1},       {84, 0},         {86, 0},     {87, 2},     {88, 0},
    {89, 1},         {90, 1},      {91, 1},          {92, 1},       {93, 1},         {94, 1},     {95, 1},     {96, 1},
    {98, 0},         {99, 1},      {100, 0},         {101, 0},      {102, 1},        {103, 1},    {104, 0},    {105, 0},
    {107, 0},        {110, 0},     {111, 1024},      {112, 1},      {113, 1},        {114, 1},    {115, 1},    {116, 0},
    {117, 1},        {118, 100},   {119, 1},         {121, 1},      {122, 1},        {123, 1},    {124, 0},    {125, 1},
    {126, 1},        {128, 0},     {129, 0},         {130, 0},      {131, -1},       {132, 0},    {133, 0},    {134, 0},
    {135, 0},        {136, 0},     {137, 0},         {138, 0},      {141, 0},        {142, 0},    {143, 0},    {144, 0},
    {145, 0},        {146, 0},     {147, 0},
};

static bool common_attribute(int attribute, int *value)
{
    for (size_t i = 0; i < sizeof common_attributes / sizeof *common_attributes; i++)
        if (common_attributes[i][0] == attribute) {
            *value = common_attributes[i][1];
            return true;
        }
    return false;
}

static bool card_attribute(const struct device *device, int attribute, int *value)
{
    const struct sim_card *card = card_of(device), *whole = whole_card_of(device);
    int capability = (int)(card->capability_major * 10 + card->capability_minor);
    switch (attribute) {
    case 13: *value = (int)whole->max_sm_clock_mhz * 1000; return true;
    case 16: *value = (int)card->multiprocessor_count; return true;
    case 20: *value = (int)whole->compute_mode; return true;
    case 32: *value = whole->ecc == 1; return true;
    case 33: *value = (int)whole->pci_bus; return true;
    case 34: *value = (int)whole->pci_device; return true;
    case 36: *value = (int)whole->max_memory_clock_mhz * 1000; return true;
    case 37: *value = (int)whole->memory_bus_bits; return true;
    case 38: *value = (int)whole->l2_bytes; return true;
    case 39: *value = threads_per_multiprocessor(whole); return true;
    case 40: *value = (int)whole->copy_engines; return true;
    case 50: *value = (int)whole->pci_domain; return true;
    case 75: *value = (int)card->capability_major; return true;
    case 76: *value = (int)card->capability_minor; return true;
    case 81: *value = (int)whole->shared_per_multiprocessor; return true;
    case 85: *value = device->ordinal; return true;
    case 97: *value = (int)whole->shared_per_multiprocessor - 1024; return true;
    case 106: *value = threads_per_multiprocessor(whole) / 64; return true;
    case 108: *value = capability >= 80 ? (int)(whole->l2_bytes / 4 * 3) : 0; return true;
    case 109: *value = capability >= 80 ? 134217728 : 0; return true;
    case 120: *value = capability >= 90; return true;
    case 127: *value = capability >= 90; return true;
    case 130: *value = getenv("GPUSLICE_SIM_COHERENT") != NULL; return true;
    case 131: *value = getenv("GPUSLICE_SIM_COHERENT") ? device->ordinal + 1 : -1; return true;
    case 139: *value = (int)whole->pci_device_id; return true;
    case 140: *value = (int)whole->pci_subsystem_id; return true;
    default: return false;
    }
}

EXPORT CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice ordinal)
{
    struct device *device;
    TRY(device_of(ordinal, &device));
    if (!value || (!card_attribute(device, attribute, value) && !common_attribute(attribute, value)))
        return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetProperties(CUdevprop *properties, CUdevice ordinal)
{
    struct device *device;
    TRY(device_of(ordinal, &device));
    if (!properties)
        return CUDA_ERROR_INVALID_VALUE;
    *properties = (CUdevprop){1024,
                              {1024, 1024, 64},
                              {2147483647, 65535, 65535},
                              49152,
                              65536,
                              32,
                              2147483647,
                              65536,
                              (int)whole_card_of(device)->max_sm_clock_mhz * 1000,
                              512};
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceCanAccessPeer(int *can, CUdevice from, CUdevice to)
{
    struct device *a, *b;
    TRY(device_of(from, &a));
    TRY(device_of(to, &b));
    if (!can)
        return CUDA_ERROR_INVALID_VALUE;
    *can = a != b && card_of(a)->parent < 0 && card_of(b)->parent < 0;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetP2PAttribute(int *value, int attribute, CUdevice from, CUdevice to)
{
    if (attribute < 1 || attribute > 4)
        return CUDA_ERROR_INVALID_VALUE;
    return cuDeviceCanAccessPeer(value, from, to);
}

/* Affinity by share of multiprocessors exists under MPS alone. */
EXPORT CUresult cuDeviceGetExecAffinitySupport(int *supported, int type, CUdevice ordinal)
{
    struct device *device;
    TRY(device_of(ordinal, &device));
    if (!supported || type != 0)
        return CUDA_ERROR_INVALID_VALUE;
    *supported = 0;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetTexture1DLinearMaxWidth(size_t *width, int format, unsigned channels, CUdevice ordinal)
{
    struct device *device;
    (void)format;
    TRY(device_of(ordinal, &device));
    if (!width || !channels || channels > 4)
        return CUDA_ERROR_INVALID_VALUE;
    *width = 268435456u / channels;
    return CUDA_SUCCESS;
}
