/* What a program calls: a launch and what else reaches throttle.c, as the hooks call it. libthrottle.so consists of this,
 * throttle.c, and of the state of one process. */
#include "hooks/launches.h"
#include "virtual_process.h"

bool gs_launch_freely;
static struct gs_card *only_card;

struct gs_work gs_launch_begin(CUstream stream, bool own_stream, uint64_t key)
{
    (void)own_stream;
    CUcontext context = (CUcontext)1;
    struct gs_work work = {.place = {only_card, context, 0}, .stream = {.context = context, .handle = stream}, .key = key};
    if (!gs_goes_untimed(key))
        gs_work_begin(&work);
    return work;
}

static int launch_on(CUstream stream, const struct virtual_call *what)
{
    THROTTLE(virtual_launch(what), stream, false, what->key)
}

void enter_launch(const struct virtual_call *what);
void enter_launch(const struct virtual_call *what)
{
    only_card = what->card;
    launch_on((CUstream)(uintptr_t)what->stream, what);
}

void enter_awaited(const struct virtual_call *what);
void enter_awaited(const struct virtual_call *what)
{
    (void)what;
    gs_throttle_awaited();
}

/* As around the end of a context: it accounts for all that is known by now. */
void enter_hold(const struct virtual_call *what);
void enter_hold(const struct virtual_call *what)
{
    (void)what;
    gs_throttle_context_ends(NULL);
    gs_throttle_context_ended(NULL, false);
}

/* ---- what tests want to know of a launch (--wrap) ---- */

struct gs_batch *__real_gs_queue_begin(struct gs_queue *queue, const struct gs_events *events, const struct gs_stream *stream,
                                       uint64_t key, uint64_t now_ns);
struct gs_batch *__wrap_gs_queue_begin(struct gs_queue *queue, const struct gs_events *events, const struct gs_stream *stream,
                                       uint64_t key, uint64_t now_ns);
struct gs_batch *__wrap_gs_queue_begin(struct gs_queue *queue, const struct gs_events *events, const struct gs_stream *stream,
                                       uint64_t key, uint64_t now_ns)
{
    virtual_is_timed();
    return __real_gs_queue_begin(queue, events, stream, key, now_ns);
}

bool __real_gs_queue_is_cleared(struct gs_queue *queue, uint64_t key, uint64_t now_ns);
bool __wrap_gs_queue_is_cleared(struct gs_queue *queue, uint64_t key, uint64_t now_ns);
bool __wrap_gs_queue_is_cleared(struct gs_queue *queue, uint64_t key, uint64_t now_ns)
{
    bool cleared = __real_gs_queue_is_cleared(queue, key, now_ns);
    if (cleared)
        virtual_is_cleared();
    return cleared;
}
