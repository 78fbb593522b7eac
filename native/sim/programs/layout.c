/* Prints where every field of the shared state lies, for the test that compares it with the Python mirror. */
#include <stddef.h>
#include <stdio.h>

#include "../state/layout.h"

#define FIELD(type, field)                                                                                                     \
    printf(#type " " #field " %zu %zu\n", offsetof(struct type, field), sizeof(((struct type *)0)->field))
#define SIZE(type) printf(#type " sizeof %zu 0\n", sizeof(struct type))

int main(void)
{
    SIZE(sim_state);
    SIZE(sim_card);
    SIZE(sim_process);
    SIZE(sim_record);
    SIZE(sim_event);
    SIZE(sim_ghost);
    SIZE(sim_limit);
    SIZE(sim_sample);
    SIZE(sim_queue);
    SIZE(sim_item);
    FIELD(sim_queue, made);
    FIELD(sim_queue, items);
    FIELD(sim_item, stream);
    FIELD(sim_state, driver_unloaded);
    FIELD(sim_state, driver_version);
    FIELD(sim_state, created_ns);
    FIELD(sim_state, lock);
    FIELD(sim_state, record_high);
    FIELD(sim_state, event_count);
    FIELD(sim_state, events);
    FIELD(sim_state, ghosts);
    FIELD(sim_state, accounting);
    FIELD(sim_state, cgroup_root);
    FIELD(sim_state, limits);
    FIELD(sim_state, cards);
    FIELD(sim_state, processes);
    FIELD(sim_state, records);
    FIELD(sim_state, queues);
    FIELD(sim_card, uuid);
    FIELD(sim_card, parent);
    FIELD(sim_card, gpm);
    FIELD(sim_card, total_bytes);
    FIELD(sim_card, temperature_c);
    FIELD(sim_card, nvlink_count);
    FIELD(sim_card, lost);
    FIELD(sim_card, resets);
    FIELD(sim_card, recovery_action);
    FIELD(sim_card, clock_event_reasons);
    FIELD(sim_card, kernel_ns);
    FIELD(sim_card, used_bytes);
    FIELD(sim_card, sample_count);
    FIELD(sim_card, samples);
    FIELD(sim_process, start_time);
    FIELD(sim_process, cgroups);
    FIELD(sim_process, context_count);
    FIELD(sim_process, host_bytes);
    FIELD(sim_process, used_bytes);
    FIELD(sim_process, done_ns);
    FIELD(sim_process, queues);
    FIELD(sim_process, launches);
    FIELD(sim_record, bytes);
    FIELD(sim_record, next_free);
    FIELD(sim_event, card);
    FIELD(sim_ghost, name);
    FIELD(sim_limit, hard);
    FIELD(sim_limit, path);
    return 0;
}
