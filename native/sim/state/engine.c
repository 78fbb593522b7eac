/* How a card executes: the processes with work share it evenly, each works through its own queue in order.
 *
 * Nothing runs: whoever looks first computes what happened since the last look. A piece of work is finished when the
 * process's done_ns has reached the mark that enqueueing it returned.
 */
#include <errno.h>
#include <time.h>

#include "state.h"

#define LONG_TIME_NS UINT64_C(3600000000000)

struct active {
    uint32_t count;
    uint32_t slots[SIM_PROCESSES];
    uint64_t least_ns; /* the shortest backlog */
};

static void find_active(const struct sim_state *state, uint32_t card, struct active *active)
{
    active->count = 0;
    active->least_ns = LONG_TIME_NS;
    for (uint32_t slot = 0; slot < state->process_high; slot++) {
        uint64_t backlog = state->processes[slot].live ? state->processes[slot].backlog_ns[card] : 0;
        if (!backlog)
            continue;
        active->slots[active->count++] = slot;
        if (backlog < active->least_ns)
            active->least_ns = backlog;
    }
}

static uint64_t at_least(uint64_t value, uint64_t floor)
{
    return value < floor ? floor : value;
}

static uint64_t at_most(uint64_t value, uint64_t ceiling)
{
    return value > ceiling ? ceiling : value;
}

/* One sample says what share of its period the card and each process was at work. */
static void write_sample(struct sim_state *state, struct sim_card *it, uint32_t card)
{
    struct sim_sample *sample = &it->samples[it->sample_count % SIM_SAMPLES];
    uint64_t ago_ns = sim_monotonic_ns() - at_most(it->sample_end_ns, sim_monotonic_ns());
    sample->timestamp_us = sim_realtime_us() - ago_ns / 1000u;
    sample->percent = (uint32_t)((it->sample_busy_ns * 100 + SIM_SAMPLE_PERIOD_NS / 2) / SIM_SAMPLE_PERIOD_NS);
    sample->process_count = 0;
    for (uint32_t slot = 0; it->sample_busy_ns && slot < state->process_high; slot++) {
        struct sim_process *process = &state->processes[slot];
        if (!process->live || !process->sample_ns[card])
            continue;
        if (sample->process_count < SIM_SAMPLE_PROCESSES)
            sample->processes[sample->process_count++] = (struct sim_sample_process){
                .pid = process->pid,
                .percent = (uint32_t)((process->sample_ns[card] * 100 + SIM_SAMPLE_PERIOD_NS / 2) /
                                      SIM_SAMPLE_PERIOD_NS)};
        process->sample_ns[card] = 0;
    }
    it->sample_busy_ns = 0;
    it->sample_count++;
}

static void end_sample_if_due(struct sim_state *state, struct sim_card *it, uint32_t card)
{
    if (it->engine_ns < it->sample_end_ns)
        return;
    write_sample(state, it, card);
    it->sample_end_ns += SIM_SAMPLE_PERIOD_NS;
}

/* Says when each mark in between was passed: `count` processes share the time since `from_ns`. */
static void pass_marks(struct sim_process *process, uint32_t card, uint64_t from_ns, uint64_t count, uint64_t each_ns)
{
    uint64_t done = process->done_ns[card];
    while (process->marks_reached[card] < process->marks_made[card]) {
        struct sim_mark *next = &process->marks[card][process->marks_reached[card] % SIM_MARKS];
        if (next->mark > done + each_ns)
            return;
        next->time_ns = from_ns + (next->mark > done ? next->mark - done : 0) * count;
        process->marks_reached[card]++;
    }
}

static void serve(struct sim_state *state, uint32_t card, const struct active *active, uint64_t each_ns)
{
    for (uint32_t i = 0; i < active->count; i++) {
        struct sim_process *process = &state->processes[active->slots[i]];
        pass_marks(process, card, state->cards[card].engine_ns, active->count, each_ns);
        process->backlog_ns[card] -= each_ns;
        process->done_ns[card] += each_ns;
        process->sample_ns[card] += each_ns;
    }
}

/* After long idleness only the samples that the ring can hold are worth writing. */
static void skip_idle_time(struct sim_card *it, uint64_t now_ns)
{
    uint64_t kept_ns = SIM_SAMPLE_PERIOD_NS * SIM_SAMPLES;
    if (now_ns - it->engine_ns < 2 * kept_ns)
        return;
    it->engine_ns = now_ns - kept_ns;
    it->sample_end_ns = it->engine_ns + SIM_SAMPLE_PERIOD_NS;
    it->sample_busy_ns = 0;
}

void sim_engine_advance(uint32_t card, uint64_t now_ns)
{
    struct sim_state *state = sim_state();
    struct sim_card *it = &state->cards[card];
    struct active active;
    find_active(state, card, &active);
    if (active.count == 0 && now_ns > it->engine_ns)
        skip_idle_time(it, now_ns);
    while (it->engine_ns < now_ns) {
        uint64_t step = at_most(now_ns, it->sample_end_ns) - it->engine_ns;
        if (active.count == 0) {
            it->engine_ns += step;
        } else {
            uint64_t each_ns = at_most(at_least(step / active.count, 1), active.least_ns);
            step = each_ns * active.count;
            serve(state, card, &active, each_ns);
            it->engine_ns += step;
            it->busy_ns += step;
            it->sample_busy_ns += step;
            find_active(state, card, &active);
        }
        end_sample_if_due(state, it, card);
    }
}

void sim_count_launch(enum sim_launch how)
{
    static _Atomic uint32_t threads;
    static _Thread_local uint32_t number SIM_NEAR;
    if (!number)
        number = 1 + atomic_fetch_add(&threads, 1) % SIM_STRIPES;
    struct sim_launches *launches = &sim_state()->processes[sim_self_if_any()].launches[number - 1];
    uint64_t *counter = how == SIM_LAUNCH_LEGACY       ? &launches->legacy
                        : how == SIM_LAUNCH_PER_THREAD ? &launches->per_thread
                                                       : &launches->graphs;
    __atomic_store_n(counter, *counter + 1, __ATOMIC_RELAXED); /* more than 16 threads may blur it */
}

static uint64_t mark_locked(uint32_t card)
{
    const struct sim_process *self = &sim_state()->processes[sim_self_if_any()];
    return self->done_ns[card] + self->backlog_ns[card];
}

uint64_t sim_engine_enqueue(uint32_t card, uint64_t duration_ns)
{
    uint32_t self = sim_self();
    if (self == SIM_PROCESSES)
        return 0;
    sim_lock();
    sim_engine_advance(card, sim_monotonic_ns());
    sim_state()->processes[self].backlog_ns[card] += duration_ns;
    uint64_t mark = mark_locked(card);
    sim_unlock();
    return mark;
}

static uint64_t add_mark(struct sim_process *self, uint32_t card, uint64_t mark)
{
    uint64_t made = self->marks_made[card];
    if (made - self->marks_reached[card] == SIM_MARKS)
        self->marks_reached[card]++; /* more are wanted than there is room: the oldest is forgotten */
    self->marks[card][made % SIM_MARKS] = (struct sim_mark){.mark = mark};
    self->marks_made[card] = made + 1;
    return made + 1;
}

uint64_t sim_engine_ticket(uint32_t card, uint64_t *mark)
{
    uint64_t ticket = 0;
    struct sim_process *self = &sim_state()->processes[sim_self_if_any()];
    if (sim_self_if_any() == SIM_PROCESSES || !self->backlog_ns[card]) {
        *mark = 0;
        return 0;
    }
    sim_lock();
    sim_engine_advance(card, sim_monotonic_ns());
    *mark = mark_locked(card);
    if (self->backlog_ns[card])
        ticket = add_mark(self, card, *mark);
    sim_unlock();
    return ticket;
}

uint64_t sim_engine_ticket_time(uint32_t card, uint64_t ticket)
{
    struct sim_process *self = &sim_state()->processes[sim_self_if_any()];
    sim_lock();
    bool kept = self->marks_made[card] - ticket < SIM_MARKS && ticket <= self->marks_reached[card];
    uint64_t time_ns = kept ? self->marks[card][(ticket - 1) % SIM_MARKS].time_ns : 0;
    sim_unlock();
    return time_ns;
}

uint64_t sim_engine_mark(uint32_t card)
{
    if (sim_self_if_any() == SIM_PROCESSES)
        return 0;
    sim_lock();
    uint64_t mark = mark_locked(card);
    sim_unlock();
    return mark;
}

/* How long until the mark at the least, 0 when it is reached. */
static uint64_t remaining_ns(uint32_t card, uint64_t mark)
{
    uint32_t self = sim_self_if_any();
    if (self == SIM_PROCESSES || mark <= sim_state()->processes[self].done_ns[card])
        return 0;
    sim_reap_sometimes(); /* the work of the dead is nobody's */
    sim_lock();
    sim_engine_advance(card, sim_monotonic_ns());
    uint64_t done = sim_state()->processes[self].done_ns[card];
    sim_unlock();
    return mark > done ? mark - done : 0;
}

bool sim_engine_reached(uint32_t card, uint64_t mark)
{
    return remaining_ns(card, mark) == 0;
}

bool sim_engine_idle(uint32_t card)
{
    return sim_engine_reached(card, sim_engine_mark(card));
}

void sim_engine_wait(uint32_t card, uint64_t mark)
{
    for (;;) {
        uint64_t wait_ns = remaining_ns(card, mark);
        if (wait_ns == 0)
            return;
        struct timespec pause = {.tv_sec = (time_t)(wait_ns / 1000000000u), .tv_nsec = (long)(wait_ns % 1000000000u)};
        clock_nanosleep(CLOCK_MONOTONIC, 0, &pause, NULL);
    }
}
