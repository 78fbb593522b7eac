/* In a PID namespace NVML's samples may name processes by other PIDs than its memory lists, or there are no lists. The
 * samples themselves show which PID is ours: it is listed whenever we worked, and never among those that worked while
 * we did not. */
#include "policy/samples.h"

#include "accounts/slots.h"
#include "policy/usage_reports.h"
#include "system/at_fork.h"
#include "system/os.h"

#define HOST_PID_NAMESPACE UINT64_C(0xeffffffc) /* of the kernel's first namespace, on every machine */
#define SAMPLES 256u
#define SAMPLED_US 1000000u
#define NUMBERS 128u
/* Samples may be a second old. Our work is certain to be in them after this many samples with this much work for each
 * process listed, of which our part is then a percent of a sample; no work of ours is in them after this long without
 * any. */
#define BUSY_NS UINT64_C(2000000)
#define SURE_AFTER 8u
#define IDLE_NS UINT64_C(3000000000)

struct numbers {
    uint32_t of[NUMBERS];
    uint32_t count;
};

static struct gs_lock lock GS_PER_PROCESS;
static struct numbers strangers GS_PER_PROCESS;             /* worked while we did not */
static struct numbers suspects GS_PER_PROCESS;              /* one of them is us; empty: the search has not begun */
static uint32_t sure GS_PER_PROCESS, unseen GS_PER_PROCESS; /* consecutive samples with one suspect, with none */

/* ---- whose number is whose ---- */

static bool bears(const struct gpuslice_slot *slot, uint32_t pid)
{
    uint64_t host_pid = atomic_load(&slot->host_pid);
    if (!host_pid && atomic_load(&slot->pid_namespace) == HOST_PID_NAMESPACE)
        host_pid = atomic_load(&slot->pid);
    return host_pid == pid && gs_load(&slot->owner);
}

static bool is_ours(uint32_t pid)
{
    struct gs_attachment at = gs_accounts_at(&gs_accounts);
    if (pid)
        GS_FOR_EACH_SLOT(slot, at.region, at.slot)
            if (bears(slot, pid))
                return true;
    return false;
}

/* In that namespace samples always name us by our own PID. */
static bool in_host_namespace(void)
{
    struct gpuslice_slot *slot = gs_accounts_at(&gs_accounts).slot;
    return !slot || atomic_load(&slot->pid_namespace) == HOST_PID_NAMESPACE;
}

static bool holds(const struct numbers *numbers, uint32_t pid)
{
    for (uint32_t i = 0; i < numbers->count; i++)
        if (numbers->of[i] == pid)
            return true;
    return false;
}

struct list {
    nvmlProcessUtilizationSample_t samples[SAMPLES];
    unsigned int count;
};

/* By the PID that the memory lists taught us, or that we found here. */
static bool lists_us(const struct list *list)
{
    for (unsigned int i = 0; i < list->count; i++)
        if (bears(gs_accounts_at(&gs_accounts).slot, list->samples[i].pid))
            return true;
    return false;
}

static void add(struct numbers *numbers, uint32_t pid)
{
    if (!holds(numbers, pid) && numbers->count < NUMBERS)
        numbers->of[numbers->count++] = pid;
}

static void add_strangers(const struct list *list)
{
    for (unsigned int i = 0; i < list->count; i++)
        if (list->samples[i].smUtil)
            add(&strangers, list->samples[i].pid);
}

/* At first all that are listed, then only those that are listed again: one that appears later is a neighbour. */
static void narrow_suspects(const struct list *list)
{
    struct numbers left = {.count = 0};
    for (unsigned int i = 0; i < list->count; i++) {
        uint32_t pid = list->samples[i].pid;
        if (pid && !holds(&strangers, pid) && !is_ours(pid) && (!suspects.count || holds(&suspects, pid)))
            add(&left, pid);
    }
    suspects = left;
}

static void find_ourselves(const struct list *list)
{
    narrow_suspects(list);
    sure = suspects.count == 1 ? sure + 1 : 0;
    unseen = suspects.count ? 0 : unseen + 1;
    if (unseen >= SURE_AFTER) /* we were taken for a stranger, for instance because of copies before the first launch */
        strangers.count = unseen = 0;
    if (sure < SURE_AFTER || strangers.count == NUMBERS)
        return;
    gs_accounts_set_host_pid(&gs_accounts, suspects.of[0]);
}

/* ---- samples ---- */

static bool is_newest(const struct list *list, unsigned int i)
{
    for (unsigned int other = 0; other < list->count; other++)
        if (list->samples[other].pid == list->samples[i].pid &&
            (list->samples[other].timeStamp > list->samples[i].timeStamp ||
             (other < i && list->samples[other].timeStamp == list->samples[i].timeStamp)))
            return false;
    return true;
}

/* Each process counts with its newest sample. */
static struct gs_share_sample sum_of(const struct list *list)
{
    struct gs_share_sample sum = {0};
    for (unsigned int i = 0; i < list->count; i++) {
        const nvmlProcessUtilizationSample_t *sample = &list->samples[i];
        if (sample->timeStamp > sum.until_us)
            sum.until_us = sample->timeStamp;
        if (!is_newest(list, i) || sample->smUtil > 100)
            continue;
        *(is_ours(sample->pid) ? &sum.own_percent : &sum.others_percent) += (int32_t)sample->smUtil;
        sum.listed++;
    }
    return sum;
}

static bool read_samples(const struct gs_card *card, uint64_t after_us, struct list *list)
{
    nvmlDevice_t device;
    list->count = SAMPLES;
    if (!gs_open_device(card, &device) ||
        DRIVER(nvmlDeviceGetProcessUtilization)(device, list->samples, &list->count, after_us) != NVML_SUCCESS)
        return false;
    list->count = list->count < SAMPLES ? list->count : SAMPLES;
    return true;
}

/* Not on the stack, which may be small in the program's thread. */
static struct list *new_list(void) { return gs_map_private(sizeof(struct list)); }

static void drop_list(struct list *list)
{
    if (list)
        gs_unmap(list, sizeof *list);
}

void gs_samples_begin(const struct gs_card *card)
{
    struct list *list = in_host_namespace() ? NULL : new_list();
    if (list && read_samples(card, gs_realtime_us() - SAMPLED_US, list)) {
        gs_lock(&lock);
        add_strangers(list);
        gs_unlock(&lock);
    }
    drop_list(list);
}

static void compare(const struct list *list, const struct gs_activity *activity, bool whole)
{
    GS_GUARD(&lock);
    if (activity->idle_ns > IDLE_NS)
        add_strangers(list);
    else if (!lists_us(list) && whole && activity->busy_ns >= BUSY_NS * list->count)
        find_ourselves(list);
}

bool gs_sample(const struct gs_card *card, const struct gs_activity *activity, bool whole, struct gs_share_sample *sum)
{
    struct list *list = new_list();
    uint64_t now = gs_realtime_us(), earliest = now - SAMPLED_US;
    uint64_t seen = atomic_load(&gs_region_card(card)->sampled_us);
    /* A sample time later than now was seen before somebody set the clock back. */
    bool read = list && read_samples(card, seen > earliest && seen <= now ? seen : earliest, list);
    if (read && !in_host_namespace())
        compare(list, activity, whole);
    if (read)
        *sum = sum_of(list);
    drop_list(list);
    return read && sum->until_us != seen && sum->until_us <= gs_realtime_us();
}
