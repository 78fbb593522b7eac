/* Debt with a slow integral.
 *
 * Credit grows with time × share × (1 + I), up to a tenth of a second's worth. Work that has finished charges the
 * device time it took, by the driver's own events; what is under way counts by an average of what such work took
 * before. A launch waits while credit less the work under way is not above zero. Each time NVML has a new sample, and
 * only while the container was made to wait since the last, I moves towards the share: that corrects what events
 * cannot see, such as work that overlaps.
 *
 * It is a cap, and one for all processes of the container: credit is in the region. Nothing runs in the background;
 * whoever launches or waits does the accounts.
 */
#include "throttle.h"

#include "os.h"
#include "slots.h"

#define SECOND_NS 1000000000
#define MOST_CREDIT_NS (SECOND_NS / 10)   /* × share */
#define MOST_DEBT_NS (SECOND_NS * INT64_C(60)) /* a credit below was not written by us */
#define MOST_IN_FLIGHT_NS (SECOND_NS * UINT64_C(60))
#define GAIN_PPM 80000
#define LEAST_INTEGRAL_PPM (-600000)
#define MOST_INTEGRAL_PPM 2000000
#define SAMPLE_NS 166000000u
#define BATCHES 64
#define BATCH_LAUNCHES 16
#define DENSE_NS 20000u      /* launches closer than this are timed together */
#define LOOK_EVERY_NS 50000u /* at the oldest batch */
#define LEAST_WAIT_NS 50000u
#define MOST_WAIT_NS 5000000u
#define SWEEP_EVERY_NS UINT64_C(100000000)
#define HOST_PID_NAMESPACE UINT64_C(0xeffffffc) /* the kernel's first one has this inode, everywhere */
#define STALLED_NS (UINT64_C(2) * SECOND_NS)
#define FIRST_GUESS_NS 1000000u /* of work of which none has finished yet */
enum { CAPTURE_RELAXED = 2, CUDA_ERROR_NOT_READY = 600 };

/* Launches timed together: from before the first to behind the last. */
struct batch {
    CUcontext context;
    CUevent start, end;
    CUstream stream;
    struct gs_card *card;
    enum gs_work_kind kind;
    uint32_t launches;
    uint32_t begun; /* of them not with the driver yet: nothing can be said of the batch before */
    uint64_t estimate_ns; /* as it stands in the region for all of them */
    uint64_t last_ns;     /* host time of the last launch */
    bool own_stream, open;
    bool fresh; /* `end` stands right behind the last launch */
    bool late;  /* it was put there only when something else came up */
};

bool gs_launch_freely;
static bool shares_exist;
static struct gs_lock lock;
static struct batch batches[BATCHES]; /* a ring: [oldest, oldest + count) are under way */
static uint32_t oldest, count;
static uint64_t looked_ns;
static uint64_t average_ns[GPUSLICE_CARDS][GS_WORK_KINDS];

void gs_throttle_start(const struct gs_card *cards, uint32_t card_count)
{
    for (uint32_t i = 0; i < card_count; i++)
        shares_exist |= cards[i].share_percent > 0 && cards[i].share_percent < 100;
}

void gs_throttle_forget(void)
{
    lock = (struct gs_lock){0};
    for (int i = 0; i < BATCHES; i++)
        batches[i] = (struct batch){0};
    oldest = count = 0;
}

/* ---- credit, in the region ---- */

static struct gpuslice_card *entry_of(const struct gs_card *card)
{
    return &gs_books_at(&gs_books).region->cards[card->index];
}

static int64_t clamp(int64_t value, int64_t least, int64_t most)
{
    return value < least ? least : value > most ? most : value;
}

static uint64_t rate_ppm(const struct gs_card *card)
{
    int64_t integral = clamp(atomic_load(&entry_of(card)->integral_ppm), LEAST_INTEGRAL_PPM, MOST_INTEGRAL_PPM);
    return (uint64_t)card->share_percent * (uint64_t)(1000000 + integral) / 100;
}

static void change_credit(const struct gs_card *card, int64_t by)
{
    _Atomic int64_t *credit = &entry_of(card)->credit_ns;
    int64_t most = (int64_t)MOST_CREDIT_NS * card->share_percent / 100;
    int64_t before = atomic_load(credit), after;
    do
        after = clamp(clamp(before, -MOST_DEBT_NS, most) + by, -MOST_DEBT_NS, most);
    while (!atomic_compare_exchange_weak(credit, &before, after));
}

/* Whoever moves the time forward gives the credit for it, so that it is given once. */
static void accrue(const struct gs_card *card, uint64_t now_ns)
{
    _Atomic uint64_t *at = &entry_of(card)->credit_at_ns;
    uint64_t before = atomic_load(at);
    bool nonsense = before > now_ns + SECOND_NS; /* a time to come was not written by us: start anew */
    if ((now_ns <= before && !nonsense) || !atomic_compare_exchange_strong(at, &before, now_ns))
        return;
    uint64_t passed = nonsense || now_ns - before > SECOND_NS ? SECOND_NS : now_ns - before;
    change_credit(card, (int64_t)(passed * rate_ppm(card) / 1000000));
}

static uint64_t in_flight_ns(const struct gs_card *card)
{
    struct gs_attachment at = gs_books_at(&gs_books);
    uint64_t sum = 0, high = gs_slots_high(at.region, at.slot);
    for (uint64_t i = 0; i < high; i++) {
        const struct gpuslice_slot *slot = &at.region->slots[i];
        uint64_t part = atomic_load_explicit(&slot->usage[card->index].in_flight_ns, memory_order_relaxed);
        sum += part && part < MOST_IN_FLIGHT_NS && atomic_load(&slot->owner) ? part : 0;
    }
    return sum;
}

static void change_in_flight(const struct gs_card *card, int64_t by)
{
    struct gpuslice_slot *slot = gs_books_at(&gs_books).slot;
    if (!slot)
        return;
    _Atomic uint64_t *word = &slot->usage[card->index].in_flight_ns;
    uint64_t before = atomic_load(word);
    while (!atomic_compare_exchange_weak(word, &before, by < 0 && before < (uint64_t)-by ? 0 : before + (uint64_t)by))
        ;
}

/* ---- batches, under the lock ---- */

/* Between begin and end the thread may be recording a stream, and other threads too: our questions must not spoil it. */
static int relax_capture(void)
{
    int mode = CAPTURE_RELAXED;
    DRIVER(cuThreadExchangeStreamCaptureMode)(&mode);
    return mode;
}

static void restore_capture(int mode) { DRIVER(cuThreadExchangeStreamCaptureMode)(&mode); }

static int record(CUevent event, CUstream stream, bool own_stream)
{
    return own_stream ? DRIVER(cuEventRecord_ptsz)(event, stream) : DRIVER(cuEventRecord)(event, stream);
}

static void close_batch(struct batch *batch)
{
    if (batch->open && !batch->fresh) {
        record(batch->end, batch->stream, batch->own_stream);
        batch->late = true;
    }
    batch->open = false;
}

static void settle(struct batch *batch, uint64_t took_ns)
{
    uint64_t *average = &average_ns[batch->card->index][batch->kind];
    uint64_t each = took_ns / batch->launches;
    change_in_flight(batch->card, -(int64_t)batch->estimate_ns);
    change_credit(batch->card, -(int64_t)took_ns);
    atomic_fetch_add(&entry_of(batch->card)->charged_ns, took_ns);
    *average = *average ? (*average * 9 + each) / 10 : each;
}

/* A burst's last batch may be closed long after its work was done: then no more is believed than some multiple of
 * what such work took before. */
static uint64_t believed(const struct batch *batch, float milliseconds)
{
    uint64_t took = milliseconds > 0 ? (uint64_t)((double)milliseconds * 1e6) : 0;
    uint64_t most = average_ns[batch->card->index][batch->kind] * batch->launches * 4;
    return batch->late && most && took > most ? most : took;
}

/* False while it is under way. */
static bool finish(struct batch *batch)
{
    float milliseconds = 0;
    if (batch->begun)
        return false;
    close_batch(batch);
    int state = DRIVER(cuEventQuery)(batch->end);
    if (state == CUDA_ERROR_NOT_READY)
        return false;
    if (state == CUDA_SUCCESS && DRIVER(cuEventElapsedTime)(&milliseconds, batch->start, batch->end) == CUDA_SUCCESS)
        settle(batch, believed(batch, milliseconds));
    else /* its context is gone */
        settle(batch, batch->estimate_ns);
    return true;
}

static void look(uint64_t now_ns)
{
    looked_ns = now_ns;
    while (count && finish(&batches[oldest])) {
        oldest = (oldest + 1) % BATCHES;
        __atomic_store_n(&count, count - 1, __ATOMIC_RELAXED);
    }
}

static bool prepare(struct batch *batch, const struct gs_work *work)
{
    if (batch->context == work->place.context && batch->start && batch->end)
        return true;
    batch->start = batch->end = NULL; /* those of a destroyed context went with it */
    batch->context = work->place.context;
    return DRIVER(cuEventCreate)(&batch->start, 0) == CUDA_SUCCESS && DRIVER(cuEventCreate)(&batch->end, 0) == CUDA_SUCCESS;
}

static struct batch *newest(void) { return count ? &batches[(oldest + count - 1) % BATCHES] : NULL; }

static bool continues(const struct batch *batch, const struct gs_work *work, uint64_t now_ns)
{
    return batch && batch->open && batch->stream == work->stream && batch->context == work->place.context &&
           batch->kind == work->kind && batch->launches < BATCH_LAUNCHES && now_ns - batch->last_ns < DENSE_NS;
}

/* Room in a batch for one more launch: the current one's or a new one's. NULL: this launch goes untimed. */
static struct batch *open_batch(const struct gs_work *work, uint64_t now_ns)
{
    struct batch *batch = newest();
    if (continues(batch, work, now_ns))
        return batch;
    if (count == BATCHES)
        return NULL;
    batch = &batches[(oldest + count) % BATCHES];
    if (!prepare(batch, work) || record(batch->start, work->stream, work->own_stream) != CUDA_SUCCESS)
        return NULL;
    *batch = (struct batch){.context = batch->context, .start = batch->start, .end = batch->end,
                            .stream = work->stream, .card = work->place.card, .kind = work->kind,
                            .own_stream = work->own_stream};
    __atomic_store_n(&count, count + 1, __ATOMIC_RELAXED);
    return batch;
}

/* ---- the slow correction ---- */

/* NVML speaks of processes by the host's numbers. Ours are known by them where they were learned, or where they are our
 * own numbers too. */
static bool bears(const struct gpuslice_slot *slot, uint32_t pid)
{
    uint64_t host_pid = atomic_load(&slot->host_pid);
    if (!host_pid && atomic_load(&slot->pid_namespace) == HOST_PID_NAMESPACE)
        host_pid = atomic_load(&slot->pid);
    return host_pid == pid && atomic_load(&slot->owner);
}

static bool is_ours(uint32_t pid)
{
    struct gs_attachment at = gs_books_at(&gs_books);
    for (uint64_t i = 0; pid && i < gs_slots_high(at.region, at.slot); i++)
        if (bears(&at.region->slots[i], pid))
            return true;
    return false;
}

#define SAMPLES 256u
#define SAMPLED_US 1000000u

/* The percentage of our processes in this list of samples, each of which counts with its newest; -1 if none is there:
 * then NVML knows them by numbers that we do not. */
static int percent_of_ours(const nvmlProcessUtilizationSample_t *samples, unsigned int number)
{
    uint64_t newest_us = 0;
    int sum = -1;
    for (unsigned int i = 0; i < number; i++)
        newest_us = samples[i].timeStamp > newest_us ? samples[i].timeStamp : newest_us;
    for (unsigned int i = 0; i < number; i++) {
        bool superseded = newest_us - samples[i].timeStamp > SAMPLED_US;
        for (unsigned int later = 0; later < number && !superseded; later++)
            superseded = samples[later].pid == samples[i].pid && samples[later].timeStamp > samples[i].timeStamp;
        if (!superseded && is_ours(samples[i].pid))
            sum = (sum < 0 ? 0 : sum) + (int)samples[i].smUtil;
    }
    return sum;
}

/* Of the last second; -1 if NVML cannot tell. */
static int measured_percent(const struct gs_card *card)
{
    nvmlDevice_t device;
    nvmlProcessUtilizationSample_t samples[SAMPLES];
    unsigned int number = SAMPLES;
    gs_bind_nvml(NULL);
    if (DRIVER(nvmlDeviceGetHandleByUUID)(card->uuid, &device) != NVML_SUCCESS ||
        DRIVER(nvmlDeviceGetProcessUtilization)(device, samples, &number, gs_realtime_us() - SAMPLED_US) != NVML_SUCCESS)
        return -1;
    return percent_of_ours(samples, number < SAMPLES ? number : SAMPLES);
}

/* Called by whoever waits, at most once a sample in the whole container. */
static void correct(const struct gs_card *card, uint64_t now_ns)
{
    struct gpuslice_card *entry = entry_of(card);
    uint64_t last = atomic_load(&entry->sampled_at_ns), throttled = atomic_load(&entry->throttled_ns);
    if (now_ns - last < SAMPLE_NS || !atomic_compare_exchange_strong(&entry->sampled_at_ns, &last, now_ns))
        return;
    bool waited = atomic_exchange(&entry->sampled_throttled_ns, throttled) != throttled;
    int measured = waited ? measured_percent(card) : -1;
    if (measured < 0)
        return;
    int64_t error = ((int64_t)card->share_percent - measured) * GAIN_PPM / (int64_t)card->share_percent;
    atomic_store(&entry->integral_ppm,
                 clamp(atomic_load(&entry->integral_ppm) + error, LEAST_INTEGRAL_PPM, MOST_INTEGRAL_PPM));
}

/* ---- launching ---- */

static int64_t headroom_ns(const struct gs_card *card, uint64_t now_ns)
{
    accrue(card, now_ns);
    return clamp(atomic_load(&entry_of(card)->credit_ns), -MOST_DEBT_NS, MOST_CREDIT_NS) - (int64_t)in_flight_ns(card);
}

static void look_locked(uint64_t now_ns, uint64_t every_ns)
{
    gs_lock(&lock);
    if (now_ns - looked_ns >= every_ns) {
        int mode = relax_capture();
        look(now_ns);
        restore_capture(mode);
    }
    gs_unlock(&lock);
}

static uint64_t wait_ns(const struct gs_card *card, int64_t headroom)
{
    if (headroom > 0)
        return LEAST_WAIT_NS;
    uint64_t missing = (uint64_t)(1 - headroom) * 100 / card->share_percent;
    return missing < LEAST_WAIT_NS ? LEAST_WAIT_NS : missing > MOST_WAIT_NS ? MOST_WAIT_NS : missing;
}

/* Work may wait on the card for work that is not launched yet: when nothing has finished for long, one more goes. */
static bool is_stalled(const struct gs_card *card, uint64_t waited_ns, uint64_t charged_before_ns)
{
    return waited_ns > STALLED_NS && atomic_load(&entry_of(card)->charged_ns) == charged_before_ns;
}

/* What is under way and not timed would be free: so much of it at most that all can be timed. */
static bool may_launch(int64_t headroom) { return headroom > 0 && __atomic_load_n(&count, __ATOMIC_RELAXED) < BATCHES; }

static void wait_for_credit(const struct gs_card *card)
{
    uint64_t began = gs_monotonic_ns(), now = began, charged = atomic_load(&entry_of(card)->charged_ns);
    uint64_t swept = began;
    int64_t headroom;
    look_locked(now, LOOK_EVERY_NS);
    while (!may_launch(headroom = headroom_ns(card, now)) && !is_stalled(card, now - began, charged)) {
        gs_sleep_ns(wait_ns(card, headroom));
        uint64_t woken = gs_monotonic_ns();
        atomic_fetch_add(&entry_of(card)->throttled_ns, woken - now);
        now = woken;
        look_locked(now, 0);
        correct(card, now);
        if (now - swept >= SWEEP_EVERY_NS) { /* one that died with work under way counts for it until it is found */
            swept = now;
            gs_books_sweep(&gs_books);
        }
    }
}

static bool is_capturing(const struct gs_work *work)
{
    int status = 0;
    int result = work->own_stream ? DRIVER(cuStreamIsCapturing_ptsz)(work->stream, &status)
                                  : DRIVER(cuStreamIsCapturing)(work->stream, &status);
    return result != CUDA_ERROR_NOT_FOUND && (result != CUDA_SUCCESS || status != 0);
}

static bool is_throttled(const struct gs_card *card)
{
    return card && card->index < GPUSLICE_CARDS && gs_books_at(&gs_books).region && card->share_percent && card->share_percent < 100;
}

static void add_launch(struct batch *batch, struct gs_work *work, uint64_t now_ns, uint64_t estimate_ns)
{
    batch->open = true;
    batch->fresh = false;
    batch->launches++;
    batch->begun++;
    batch->last_ns = now_ns;
    batch->estimate_ns += estimate_ns;
    work->batch = batch;
    change_in_flight(work->place.card, (int64_t)estimate_ns);
}

/* What cannot be timed, because it goes regardless or there are no events to be had, costs what such work took before. */
static void note_launch(struct gs_work *work)
{
    uint64_t now = gs_monotonic_ns();
    gs_lock(&lock);
    uint64_t known = average_ns[work->place.card->index][work->kind], estimate = known ? known : FIRST_GUESS_NS;
    struct batch *batch = open_batch(work, now);
    if (batch)
        add_launch(batch, work, now, estimate);
    else
        change_credit(work->place.card, -(int64_t)estimate);
    gs_unlock(&lock);
}

struct gs_work gs_work_begin(CUstream stream, bool own_stream, enum gs_work_kind kind)
{
    struct gs_work work = {.stream = stream, .kind = kind, .own_stream = own_stream};
    bool active = gs_enter_cuda();
    if (!active || !shares_exist) {
        __atomic_store_n(&gs_launch_freely, true, __ATOMIC_RELAXED);
        return work;
    }
    work.place = gs_stream_place(stream);
    if (!is_throttled(work.place.card) || is_capturing(&work)) {
        work.place.card = NULL;
        return work;
    }
    gs_books_look(&gs_books);
    wait_for_credit(work.place.card);
    note_launch(&work);
    return work;
}

/* Launches that come one by one are timed one by one, so that the pauses between them are not charged. */
void gs_work_end(const struct gs_work *work, bool launched)
{
    struct batch *batch = work->batch;
    if (!batch)
        return;
    gs_lock(&lock);
    batch->begun -= batch->begun > 0;
    if (launched && batch->open && !batch->begun && (batch->launches == 1 || batch->launches == BATCH_LAUNCHES))
        batch->fresh = record(batch->end, batch->stream, batch->own_stream) == CUDA_SUCCESS;
    gs_unlock(&lock);
}
