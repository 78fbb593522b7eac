/* How a card executes.
 *
 * Between processes: those with work take turns, each gets an even part of the time. (CUDA C++ Programming Guide,
 * "Compute Modes" and "Multi-Process Service": without MPS, kernels of different contexts do not run at the same time.)
 *
 * Within a process: streams reach the card over a few work queues ("connections", CUDA_DEVICE_MAX_CONNECTIONS, 8 unless
 * said otherwise). A queue runs what it was given in order; the heads of different queues run at the same time. Each
 * takes as much of the card as its grid fills; together they never get more than the whole. (Same guide, "Concurrent
 * Kernel Execution"; "CUDA Environment Variables" for the queues.)
 *
 * Nothing runs: the first to look computes what happened since the last look.
 */
#include <errno.h>
#include <sched.h>
#include <string.h>
#include <time.h>

#include "state.h"

#define LONG_TIME_NS 3600e9
#define LEAST_NS 0.5      /* what is left of an item that rounding did not finish */
#define LOOKING_NS 100000 /* the last part of a wait, in which the waiter looks all the time */
#define POLL_NS 1e5       /* how often a waiter looks for what no clock foretells: a host function's end */

/* The work at the heads of the queues, by process. Under the lock, so one of each process is enough. */
static struct active {
    uint32_t count, process_count;
    uint32_t queues[SIM_QUEUES];
    uint32_t width[SIM_PROCESSES]; /* of a process's heads together; 0 for those without work */
    uint32_t processes[SIM_PROCESSES];
} active;

static uint64_t at_most(uint64_t value, uint64_t ceiling) { return value > ceiling ? ceiling : value; }

/* Not libm's: the driver needs no library beside the C library. */
static double larger(double one, double other) { return one > other ? one : other; }
static double smaller(double one, double other) { return one < other ? one : other; }
static uint64_t rounded_up(double value) { return (uint64_t)value + (value > (double)(uint64_t)value); }

/* ------------------------------------------------------------------------------------------- queues and marks */

/* A mark names an item: its queue above, its number below. */
static uint64_t mark_of(uint32_t queue, uint64_t number) { return (uint64_t)(queue + 1) << 48 | number; }
static struct sim_queue *queue_of(uint64_t mark) { return &sim_state()->queues[(mark >> 48) - 1]; }
static uint64_t number_of(uint64_t mark) { return mark & ((UINT64_C(1) << 48) - 1); }

static struct sim_item *item_at(struct sim_queue *queue, uint64_t number)
{
    return &queue->items[(number - 1) % SIM_QUEUE_ITEMS];
}

static bool is_finished(uint64_t mark) { return !mark || number_of(mark) <= queue_of(mark)->finished; }

/* What ends without taking time: a wait for something finished, a host function that has returned. */
static bool ends_at_once(const struct sim_item *item)
{
    return item->awaited ? is_finished(item->awaited) : item->remaining_ns < LEAST_NS;
}

static void finish_head(struct sim_queue *queue, uint64_t now_ns)
{
    item_at(queue, queue->finished + 1)->finished_ns = now_ns;
    queue->finished++;
}

/* One queue's end may let another go on, on another card too; so again until nothing moves. */
static void finish_heads(struct sim_state *state, uint32_t card)
{
    for (bool moved = true; moved;) {
        moved = false;
        for (uint32_t i = 0; i < state->queue_high; i++) {
            struct sim_queue *queue = &state->queues[i];
            while (queue->live && queue->card == card && queue->finished < queue->made &&
                   ends_at_once(item_at(queue, queue->finished + 1))) {
                finish_head(queue, state->cards[card].engine_ns);
                moved = true;
            }
        }
    }
}

static void add_active(struct sim_state *state, uint32_t index)
{
    const struct sim_queue *queue = &state->queues[index];
    const struct sim_item *head = item_at(&state->queues[index], queue->finished + 1);
    if (head->awaited || head->held)
        return;
    active.queues[active.count++] = index;
    if (!active.width[queue->process])
        active.processes[active.process_count++] = queue->process;
    active.width[queue->process] += head->width;
}

static void find_active(struct sim_state *state, uint32_t card)
{
    finish_heads(state, card);
    for (uint32_t i = 0; i < active.process_count; i++)
        active.width[active.processes[i]] = 0;
    active.count = active.process_count = 0;
    for (uint32_t i = 0; i < state->queue_high; i++)
        if (state->queues[i].live && state->queues[i].card == card && state->queues[i].finished < state->queues[i].made)
            add_active(state, i);
}

/* Nanoseconds of time for one of a head's own. */
static double slowness(const struct sim_queue *queue)
{
    uint32_t width = active.width[queue->process];
    return (double)active.process_count * (width > SIM_WHOLE_CARD ? (double)width / SIM_WHOLE_CARD : 1.0);
}

static struct sim_item *head_of(const struct sim_state *state, uint32_t place, struct sim_queue **queue)
{
    *queue = (struct sim_queue *)&state->queues[active.queues[place]];
    return item_at(*queue, (*queue)->finished + 1);
}

/* When the first of the heads will end. */
static uint64_t next_end_ns(const struct sim_state *state)
{
    double least_ns = LONG_TIME_NS;
    for (uint32_t i = 0; i < active.count; i++) {
        struct sim_queue *queue;
        const struct sim_item *head = head_of(state, i, &queue);
        least_ns = smaller(least_ns, head->remaining_ns * slowness(queue));
    }
    return rounded_up(larger(least_ns, 1));
}

/* On an H100 two processes that had 29 and 71 % of the card, in turns, had samples of 57 and 96 %. */
static void sample_turns(struct sim_state *state, uint32_t card, uint64_t step_ns)
{
    uint64_t from_ns = state->cards[card].engine_ns, to_ns = from_ns + step_ns;
    for (uint32_t slot = 0; slot < state->process_high; slot++) {
        struct sim_process *process = &state->processes[slot];
        if (active.width[slot])
            process->sampled_until_ns[card] = to_ns + state->cards[card].sampled_turn_us * UINT64_C(1000);
        if (process->sampled_until_ns[card] > from_ns)
            process->sample_ns[card] += (double)(at_most(process->sampled_until_ns[card], to_ns) - from_ns);
    }
}

static void serve(struct sim_state *state, uint32_t card, uint64_t step_ns)
{
    for (uint32_t i = 0; i < active.count; i++) {
        struct sim_queue *queue;
        struct sim_item *head = head_of(state, i, &queue);
        head->remaining_ns -= (double)step_ns / slowness(queue);
        if (head->remaining_ns < LEAST_NS)
            finish_head(queue, state->cards[card].engine_ns + step_ns);
    }
    for (uint32_t i = 0; i < active.process_count; i++) {
        struct sim_process *process = &state->processes[active.processes[i]];
        process->done_ns[card] += (double)step_ns / active.process_count;
        if (!state->cards[card].sampled_turn_us)
            process->sample_ns[card] += (double)step_ns / active.process_count;
    }
    if (state->cards[card].sampled_turn_us)
        sample_turns(state, card, step_ns);
}

/* ----------------------------------------------------------------------------------------------------- samples */

static uint32_t percent_of_period(double busy_ns) { return (uint32_t)(busy_ns * 100 / (double)SIM_SAMPLE_PERIOD_NS + 0.5); }

/* One sample says what share of its period the card and each process was at work. */
static void write_sample(struct sim_state *state, struct sim_card *it, uint32_t card)
{
    struct sim_sample *sample = &it->samples[it->sample_count % SIM_SAMPLES];
    uint64_t ago_ns = sim_monotonic_ns() - at_most(it->sample_end_ns, sim_monotonic_ns());
    sample->timestamp_us = sim_realtime_us() - ago_ns / 1000u;
    sample->percent = percent_of_period((double)it->sample_busy_ns);
    sample->process_count = 0;
    for (uint32_t slot = 0; it->sample_busy_ns && slot < state->process_high; slot++) {
        struct sim_process *process = &state->processes[slot];
        if (!process->live || process->sample_ns[card] <= 0)
            continue;
        if (sample->process_count < SIM_SAMPLE_PROCESSES)
            sample->processes[sample->process_count++] = (struct sim_sample_process){
                .pid = process->pid, .slot = (uint16_t)slot, .percent = (uint16_t)percent_of_period(process->sample_ns[card])};
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
    find_active(state, card);
    if (active.count == 0 && now_ns > it->engine_ns)
        skip_idle_time(it, now_ns);
    while (it->engine_ns < now_ns) {
        uint64_t step = at_most(now_ns, it->sample_end_ns) - it->engine_ns;
        if (active.count) {
            step = at_most(step, next_end_ns(state));
            serve(state, card, step);
            it->busy_ns += step;
            it->sample_busy_ns += step;
        }
        it->engine_ns += step;
        if (active.count)
            find_active(state, card);
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

/* ------------------------------------------------------------------------------------------------- giving work */

void sim_engine_forget(uint32_t process)
{
    struct sim_state *state = sim_state();
    for (uint32_t i = 0; i < state->queue_high; i++)
        if (state->queues[i].process == process)
            state->queues[i].live = 0;
}

static uint32_t new_queue(uint32_t card, uint32_t process)
{
    struct sim_state *state = sim_state();
    for (uint32_t i = 0; i < SIM_QUEUES; i++) {
        struct sim_queue *queue = &state->queues[i];
        if (queue->live)
            continue;
        queue->process = process;
        queue->card = card;
        queue->made = queue->finished = 0;
        queue->live = 1;
        if (i >= state->queue_high)
            state->queue_high = i + 1;
        return i;
    }
    return SIM_QUEUES;
}

/* The queue behind one of the process's connections to a card, made at its first use. SIM_QUEUES if there is none left. */
static uint32_t queue_for(uint32_t card, uint32_t connection)
{
    uint32_t process = sim_self_if_any();
    uint32_t *index = &sim_state()->processes[process].queues[card][connection % SIM_CONNECTIONS];
    if (!*index) {
        uint32_t made = new_queue(card, process);
        if (made == SIM_QUEUES)
            return SIM_QUEUES;
        *index = made + 1;
    }
    return *index - 1;
}

/* Work of one stream right behind work of the same kind is one item, unless somebody asked when the first part ends. */
static bool joins_last(struct sim_queue *queue, const struct sim_item *item)
{
    if (queue->made == queue->finished || item->held || item->awaited)
        return false;
    struct sim_item *last = item_at(queue, queue->made);
    if (last->sealed || last->held || last->awaited || last->stream != item->stream || last->width != item->width)
        return false;
    last->remaining_ns += item->remaining_ns;
    return true;
}

/* The mark of the item; 0 when the queue is full for now. */
static uint64_t put(uint32_t index, const struct sim_item *item)
{
    struct sim_queue *queue = &sim_state()->queues[index];
    sim_engine_advance(queue->card, sim_monotonic_ns());
    if (!joins_last(queue, item)) {
        if (queue->made - queue->finished == SIM_QUEUE_ITEMS)
            return 0;
        *item_at(queue, queue->made + 1) = *item;
        queue->made++;
    }
    return mark_of(index, queue->made);
}

/* A full queue makes the caller wait, as a full pushbuffer does. */
static uint64_t enqueue(uint32_t card, uint32_t connection, const struct sim_item *item)
{
    if (sim_self() == SIM_PROCESSES)
        return 0;
    for (;;) {
        sim_lock();
        uint32_t queue = queue_for(card, connection);
        uint64_t mark = queue == SIM_QUEUES ? 0 : put(queue, item);
        uint64_t oldest = queue == SIM_QUEUES ? 0 : mark_of(queue, sim_state()->queues[queue].finished + 1);
        sim_unlock();
        if (mark || queue == SIM_QUEUES)
            return mark;
        sim_engine_wait(oldest);
    }
}

uint64_t sim_engine_work(uint32_t card, uint32_t connection, uint32_t stream, uint64_t duration_ns, uint32_t width)
{
    return enqueue(
        card, connection,
        &(struct sim_item){.remaining_ns = (double)duration_ns, .stream = stream, .width = (uint16_t)(width ? width : 1)});
}

uint64_t sim_engine_await(uint32_t card, uint32_t connection, uint64_t awaited)
{
    if (sim_engine_reached(awaited))
        return 0;
    return enqueue(card, connection, &(struct sim_item){.awaited = awaited, .sealed = 1});
}

uint64_t sim_engine_hold(uint32_t card, uint32_t connection)
{
    return enqueue(card, connection, &(struct sim_item){.remaining_ns = 1, .held = 1, .sealed = 1});
}

void sim_engine_let_go(uint64_t held)
{
    sim_lock();
    struct sim_queue *queue = queue_of(held);
    item_at(queue, number_of(held))->remaining_ns = 0;
    sim_engine_advance(queue->card, sim_monotonic_ns());
    find_active(sim_state(), queue->card);
    sim_unlock();
}

/* --------------------------------------------------------------------------------------------- asking for ends */

void sim_engine_seal(uint64_t mark)
{
    if (is_finished(mark))
        return;
    sim_lock();
    if (!is_finished(mark))
        item_at(queue_of(mark), number_of(mark))->sealed = 1;
    sim_unlock();
}

uint64_t sim_engine_time(uint64_t mark)
{
    uint64_t time_ns = 0;
    sim_lock();
    const struct sim_queue *queue = queue_of(mark);
    if (is_finished(mark) && queue->made - number_of(mark) < SIM_QUEUE_ITEMS)
        time_ns = item_at(queue_of(mark), number_of(mark))->finished_ns;
    sim_unlock();
    return time_ns;
}

/* How long it will take until the mark at the least. Looks behind a few waits only: it may say too little. */
static double least_ns_until(uint64_t mark, unsigned depth)
{
    if (is_finished(mark) || depth == 0)
        return 0;
    struct sim_queue *queue = queue_of(mark);
    double until = 0;
    for (uint64_t number = queue->finished + 1; number <= number_of(mark); number++) {
        const struct sim_item *item = item_at(queue, number);
        if (item->awaited)
            until = larger(until, larger(least_ns_until(item->awaited, depth - 1), POLL_NS));
        else
            until += item->held ? POLL_NS : item->remaining_ns;
    }
    return until;
}

/* Up to now, on this card and on those that it waits for. */
static void advance_for(uint64_t mark)
{
    uint64_t now_ns = sim_monotonic_ns();
    struct sim_queue *queue = queue_of(mark);
    sim_engine_advance(queue->card, now_ns);
    for (uint64_t number = queue->finished + 1; number <= number_of(mark); number++)
        if (item_at(queue, number)->awaited)
            sim_engine_advance(queue_of(item_at(queue, number)->awaited)->card, now_ns);
    find_active(sim_state(), queue->card);
}

bool sim_engine_is_turn_of(uint64_t held)
{
    sim_lock();
    advance_for(held);
    bool turn = queue_of(held)->finished + 1 >= number_of(held);
    sim_unlock();
    return turn;
}

/* 0 when the mark is reached. */
static uint64_t remaining_ns(uint64_t mark)
{
    if (sim_self_if_any() == SIM_PROCESSES || is_finished(mark))
        return 0;
    sim_reap_sometimes(); /* the work of the dead is nobody's */
    sim_lock();
    advance_for(mark);
    double until = is_finished(mark) ? 0 : larger(least_ns_until(mark, 4), 1);
    sim_unlock();
    return rounded_up(until);
}

bool sim_engine_reached(uint64_t mark) { return remaining_ns(mark) == 0; }

/* As a context waits that asks for nothing else (CU_CTX_SCHED_AUTO: it looks all the time, so that the program goes on a few
 * microseconds after its work). What is far off is slept here, for the simulation's own sake. */
void sim_engine_wait(uint64_t mark)
{
    sim_engine_seal(mark);
    for (uint64_t wait_ns; (wait_ns = remaining_ns(mark)) != 0;) {
        uint64_t until_ns = sim_monotonic_ns() + wait_ns;
        if (wait_ns > LOOKING_NS) {
            uint64_t sleep_ns = wait_ns - LOOKING_NS;
            struct timespec pause = {.tv_sec = (time_t)(sleep_ns / 1000000000u), .tv_nsec = (long)(sleep_ns % 1000000000u)};
            clock_nanosleep(CLOCK_MONOTONIC, 0, &pause, NULL);
        }
        while (sim_monotonic_ns() < until_ns)
            sched_yield();
    }
}

/* Under the lock; looks behind a few waits only. */
static bool follows(uint64_t mark, uint64_t other, unsigned depth)
{
    if (!mark || !depth)
        return false;
    struct sim_queue *queue = queue_of(mark);
    if (queue == queue_of(other) && number_of(mark) >= number_of(other))
        return true;
    for (uint64_t number = queue->finished + 1; number <= number_of(mark); number++)
        if (item_at(queue, number)->awaited && follows(item_at(queue, number)->awaited, other, depth - 1))
            return true;
    return false;
}

bool sim_engine_follows(uint64_t mark, uint64_t other)
{
    sim_lock();
    bool after = follows(mark, other, 8);
    sim_unlock();
    return after;
}
