/* Prints every field of the shared region with its place and size, for the test that compares it with layout.py. */
#include <stddef.h>
#include <stdio.h>

#include "../include/region.h"

#define FIELD(type, field)                                                                                                     \
    printf(#type " " #field " %zu %zu\n", offsetof(struct type, field), sizeof(((struct type *)0)->field))

int main(void)
{
    FIELD(gpuslice_card, key);
    FIELD(gpuslice_card, uuid);
    FIELD(gpuslice_card, limit_bytes);
    FIELD(gpuslice_card, compute_percent);
    FIELD(gpuslice_card, peak_bytes);
    FIELD(gpuslice_card, refused);
    FIELD(gpuslice_card, throttled_ns);
    FIELD(gpuslice_card, orphaned_bytes);
    FIELD(gpuslice_card, context_bytes);
    FIELD(gpuslice_card, wanted_bytes);
    FIELD(gpuslice_card, asked_at_ns);
    FIELD(gpuslice_card, sampled_us);
    FIELD(gpuslice_card, unsettled_ns);
    FIELD(gpuslice_card, cap);
    FIELD(gpuslice_card, due);
    FIELD(gpuslice_card, virtual_ns);
    FIELD(gpuslice_card, active_at_ns);
    FIELD(gpuslice_card, finished_at_ns);
    FIELD(gpuslice_card, charged_ns);
    FIELD(gpuslice_card, busy_ns);
    FIELD(gpuslice_card, billed_ns);
    FIELD(gpuslice_card, recent_busy_ns);
    FIELD(gpuslice_card, recent_own_ns);
    FIELD(gpuslice_card, learned_at_ns);
    FIELD(gpuslice_usage, used_bytes);
    FIELD(gpuslice_usage, pending_bytes);
    FIELD(gpuslice_usage, own_bytes);
    FIELD(gpuslice_usage, exported_bytes);
    FIELD(gpuslice_usage, imports);
    FIELD(gpuslice_usage, in_flight_ns);
    FIELD(gpuslice_usage, unknown);
    FIELD(gpuslice_usage, changed_ns);
    FIELD(gpuslice_slot, owner);
    FIELD(gpuslice_slot, start_time);
    FIELD(gpuslice_slot, start_stack);
    FIELD(gpuslice_slot, pid_namespace);
    FIELD(gpuslice_slot, pid);
    FIELD(gpuslice_slot, host_pid);
    FIELD(gpuslice_slot, provisional);
    FIELD(gpuslice_slot, in_flight);
    FIELD(gpuslice_slot, usage);
    FIELD(gpuslice_figure, card);
    FIELD(gpuslice_figure, pid);
    FIELD(gpuslice_figure, start_time);
    FIELD(gpuslice_figure, bytes);
    FIELD(gpuslice_figures, magic);
    FIELD(gpuslice_figures, check);
    FIELD(gpuslice_figures, at_ns);
    FIELD(gpuslice_figures, count);
    FIELD(gpuslice_figures, of);
    FIELD(gpuslice_region, magic);
    FIELD(gpuslice_region, slots_high);
    FIELD(gpuslice_region, swept);
    FIELD(gpuslice_driver_file, inode);
    FIELD(gpuslice_driver_file, device);
    FIELD(gpuslice_driver_file, check);
    FIELD(gpuslice_driver_file, path);
    FIELD(gpuslice_region, driver_file);
    FIELD(gpuslice_region, cards);
    FIELD(gpuslice_region, slots);
    printf("constants %llu %llu %u %u %zu\n", (unsigned long long)GPUSLICE_REGION_MAGIC,
           (unsigned long long)GPUSLICE_REGION_VERSION, GPUSLICE_CARDS, GPUSLICE_SLOTS, sizeof(struct gpuslice_region));
    return 0;
}
