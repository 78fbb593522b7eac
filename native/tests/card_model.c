#include "card_model.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define STREAMS 16
#define SAMPLES 16
#define SAMPLE_NS (1000000000u / 6)
#define STEP_NS 50000000u
#define EPOCH_NS UINT64_C(1000000000000)

struct event {
    struct card *card;
    uint32_t process;
    uint64_t recorded; /* how often; earlier records of it mark nothing any more */
    double at;         /* when it was passed; negative: not yet */
    struct event *before;
};

struct work {
    double left;
    struct event *event; /* to be marked when this is reached, or none */
    uint64_t recorded;
};

struct stream {
    struct work *works;
    size_t first, end, room;
};

struct process {
    struct stream streams[STREAMS];
    uint64_t work_left; /* pieces, on all streams */
    double done, in_sample;
    double *series; /* `done` at each step */
    size_t steps, room;
    bool watched;
};

struct card {
    double now; /* first: the tests read it in place */
    uint32_t count;
    struct process processes[PROCESSES];
    struct event *events; /* all of them */
    uint64_t slice_ns, switch_ns, age_ns;
    uint32_t turn;
    double turn_ends, switching_ends;
    uint64_t sample_ends, step_ends, samples_ever;
    struct sample {
        uint64_t until_ns;
        int32_t percents[PROCESSES]; /* -1: was not at work */
    } samples[SAMPLES];
};

struct card *card_new(uint64_t slice_ns, uint64_t switch_ns, uint64_t age_ns)
{
    struct card *card = calloc(1, sizeof *card);
    if (!card)
        abort();
    card->now = (double)EPOCH_NS;
    card->slice_ns = slice_ns;
    card->switch_ns = switch_ns;
    card->age_ns = age_ns;
    card->sample_ends = EPOCH_NS + SAMPLE_NS;
    card->step_ends = EPOCH_NS + STEP_NS;
    return card;
}

void card_free(struct card *card)
{
    for (uint32_t i = 0; i < card->count; i++) {
        free(card->processes[i].series);
        for (uint32_t j = 0; j < STREAMS; j++)
            free(card->processes[i].streams[j].works);
    }
    for (struct event *event = card->events, *before; event; event = before) {
        before = event->before;
        free(event);
    }
    free(card);
}

double card_now(const struct card *card) { return card->now; }

uint32_t card_add_process(struct card *card)
{
    if (card->count == PROCESSES)
        abort();
    return card->count++;
}

/* ---- work ---- */

static void push(struct card *card, uint32_t process, uint32_t number, struct work work)
{
    if (number >= STREAMS)
        abort();
    struct stream *stream = &card->processes[process].streams[number];
    if (stream->end == stream->room) { /* what is over makes room first */
        memmove(stream->works, stream->works + stream->first, (stream->end - stream->first) * sizeof work);
        stream->end -= stream->first;
        stream->first = 0;
        if (stream->end >= stream->room / 2) {
            stream->room = stream->room ? 2 * stream->room : 64;
            stream->works = realloc(stream->works, stream->room * sizeof work);
            if (!stream->works)
                abort();
        }
    }
    stream->works[stream->end++] = work;
    card->processes[process].work_left++;
}

void card_launch(struct card *card, uint32_t process, double own_ns, uint32_t stream)
{
    push(card, process, stream, (struct work){.left = own_ns});
}

static void pass_finished(struct process *process, double now)
{
    for (struct stream *stream = process->streams; stream < process->streams + STREAMS; stream++)
        for (; stream->first < stream->end && stream->works[stream->first].left <= 0.5; stream->first++) {
            struct work *work = &stream->works[stream->first];
            process->work_left--;
            if (work->event && work->event->recorded == work->recorded)
                work->event->at = now;
        }
}

bool card_has_work(const struct card *card, uint32_t process) { return card->processes[process].work_left; }

bool card_has_work_on(const struct card *card, uint32_t process, uint32_t stream)
{
    const struct stream *at = &card->processes[process].streams[stream];
    return at->first < at->end;
}

void card_kill(struct card *card, uint32_t process)
{
    struct process *killed = &card->processes[process];
    for (struct stream *stream = killed->streams; stream < killed->streams + STREAMS; stream++)
        stream->first = stream->end = 0;
    killed->work_left = 0;
}

void card_watch(struct card *card, uint32_t process) { card->processes[process].watched = true; }

/* ---- time ---- */

/* Which processes are at work now: all that have any, or the one whose turn it is. */
static uint32_t on_turn(struct card *card, struct process *running[PROCESSES])
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < card->count; i++)
        if (card->processes[i].work_left)
            running[count++] = &card->processes[i];
    if (!card->slice_ns || !count)
        return count;
    if (card->now >= card->turn_ends || !card->processes[card->turn].work_left) {
        uint32_t next = card->turn;
        do
            next = (next + 1) % card->count;
        while (!card->processes[next].work_left);
        card->switching_ends = card->now + (double)(next == card->turn ? 0 : card->switch_ns);
        card->turn = next;
        card->turn_ends = fmax(card->now, card->switching_ends) + (double)card->slice_ns;
    }
    running[0] = &card->processes[card->turn];
    return 1;
}

static void run(struct card *card, double until)
{
    struct process *running[PROCESSES];
    uint32_t count = on_turn(card, running);
    if (!count) {
        card->now = until;
        return;
    }
    if (card->now < card->switching_ends) {
        card->now = fmin(until, card->switching_ends);
        return;
    }
    double ends = card->slice_ns ? fmin(until, card->turn_ends) : until, each_ns = (ends - card->now) / count;
    struct work *heads[PROCESSES * STREAMS];
    size_t at_work = 0;
    for (uint32_t i = 0; i < count; i++)
        for (struct stream *stream = running[i]->streams; stream < running[i]->streams + STREAMS; stream++)
            if (stream->first < stream->end) {
                heads[at_work++] = &stream->works[stream->first];
                each_ns = fmin(each_ns, stream->works[stream->first].left);
            }
    for (size_t i = 0; i < at_work; i++)
        heads[i]->left -= each_ns;
    for (uint32_t i = 0; i < count; i++) { /* it is at work once, however many of its kernels run */
        running[i]->done += each_ns;
        running[i]->in_sample += each_ns;
    }
    card->now += each_ns * count;
    if (ends - card->now < 0.5)
        card->now = ends;
}

static void note_step(struct process *process)
{
    if (process->steps == process->room) {
        process->room = process->room ? 2 * process->room : 256;
        process->series = realloc(process->series, process->room * sizeof *process->series);
        if (!process->series)
            abort();
    }
    process->series[process->steps++] = process->done;
}

static void take_notes(struct card *card)
{
    if (card->now >= (double)card->sample_ends) {
        struct sample *sample = &card->samples[card->samples_ever++ % SAMPLES];
        sample->until_ns = card->sample_ends;
        for (uint32_t i = 0; i < PROCESSES; i++) {
            double *busy = &card->processes[i].in_sample;
            sample->percents[i] = *busy != 0 ? (int32_t)rint(100 * *busy / SAMPLE_NS) : -1;
            *busy = 0;
        }
        card->sample_ends += SAMPLE_NS;
    }
    if (card->now >= (double)card->step_ends) {
        for (uint32_t i = 0; i < card->count; i++)
            note_step(&card->processes[i]);
        card->step_ends += STEP_NS;
    }
}

/* Up to that time, or to the moment at which a process that is watched has nothing left: its number; else -1. */
static int advance(struct card *card, double to)
{
    for (;;) {
        struct process *running[PROCESSES];
        uint32_t count = on_turn(card, running);
        for (uint32_t i = 0; i < count && card->now >= card->switching_ends; i++)
            pass_finished(running[i], card->now);
        for (uint32_t i = 0; i < card->count; i++)
            if (card->processes[i].watched && !card->processes[i].work_left)
                return (int)i;
        if (card->now >= to)
            return -1;
        run(card, fmin(fmin(to, (double)card->sample_ends), (double)card->step_ends));
        take_notes(card);
    }
}

int card_advance(struct card *card, double to)
{
    int ended = advance(card, to);
    if (ended >= 0)
        card->processes[ended].watched = false;
    return ended;
}

uint64_t card_sample(const struct card *card, int32_t percents[PROCESSES])
{
    for (uint64_t back = 1; back <= card->samples_ever && back <= SAMPLES; back++) {
        const struct sample *sample = &card->samples[(card->samples_ever - back) % SAMPLES];
        if ((double)sample->until_ns <= card->now - (double)card->age_ns) {
            memcpy(percents, sample->percents, sizeof sample->percents);
            return sample->until_ns;
        }
    }
    return 0;
}

const double *card_series(const struct card *card, uint32_t process, size_t *steps)
{
    *steps = card->processes[process].steps;
    return card->processes[process].series;
}

double card_done(const struct card *card, uint32_t process) { return card->processes[process].done; }

/* ---- the driver's events ---- */

void *card_event(struct card *card, uint32_t process)
{
    struct event *event = calloc(1, sizeof *event);
    if (!event)
        abort();
    *event = (struct event){card, process, 0, -1, card->events};
    return card->events = event;
}

bool card_event_record(void *handle, const struct gs_stream *stream)
{
    struct event *event = handle;
    event->recorded++;
    event->at = -1;
    push(event->card, event->process, (uint32_t)(uintptr_t)stream->handle, (struct work){0, event, event->recorded});
    advance(event->card, event->card->now);
    return true;
}

bool card_event_is_pending(void *event) { return ((struct event *)event)->at < 0; }

bool card_event_elapsed(void *from, void *to, uint64_t *ns)
{
    double between = ((struct event *)to)->at - ((struct event *)from)->at;
    *ns = between > 0 ? (uint64_t)between : 0;
    return true;
}
