/* The driver that throttle.c calls, of the card in virtual time (tests/card_model.c). */
#include "card_model.h"
#include "policy/samples.h"
#include "virtual_process.h"

#define ONLY_CONTEXT ((CUcontext)1)

static int current_context(CUcontext *context)
{
    virtual_step();
    *context = ONLY_CONTEXT;
    return CUDA_SUCCESS;
}

static int create_event(CUevent *event, unsigned int flags)
{
    (void)flags;
    *event = card_event(virtual_card(), virtual_number());
    return CUDA_SUCCESS;
}

static int record_event(CUevent event, CUstream stream)
{
    virtual_step();
    card_event_record(event, &(struct gs_stream){.context = ONLY_CONTEXT, .handle = stream});
    return CUDA_SUCCESS;
}

static int query_event(CUevent event)
{
    virtual_step();
    return card_event_query(event) == GS_EVENT_PASSED ? CUDA_SUCCESS : 600 /* CUDA_ERROR_NOT_READY */;
}

static int elapsed_time(float *milliseconds, CUevent from, CUevent to)
{
    uint64_t ns;
    card_event_elapsed(from, to, &ns);
    *milliseconds = (float)((double)ns / 1e6);
    return CUDA_SUCCESS;
}

static int is_capturing(CUstream stream, int *status)
{
    (void)stream;
    *status = 0;
    return CUDA_SUCCESS;
}

static int exchange_mode(int *mode)
{
    (void)mode;
    return CUDA_SUCCESS;
}

void *gs_driver[GS_FUNCTIONS] = {
    [GS_cuCtxGetCurrent] = (void *)current_context,
    [GS_cuEventCreate] = (void *)create_event,
    [GS_cuEventRecord] = (void *)record_event,
    [GS_cuEventQuery] = (void *)query_event,
    [GS_cuEventElapsedTime] = (void *)elapsed_time,
    [GS_cuStreamIsCapturing] = (void *)is_capturing,
    [GS_cuThreadExchangeStreamCaptureMode] = (void *)exchange_mode,
};

int virtual_launch(const struct virtual_call *what)
{
    virtual_stop(LAUNCHES);
    card_launch(virtual_card(), virtual_number(), what->own_ns, what->stream);
    return CUDA_SUCCESS;
}
