/* The driver that throttle.c calls, of the card in virtual time (tests/card_model.c). */
#include "card_model.h"
#include "throttle_driver.h"
#include "virtual_process.h"

#define ONLY_CONTEXT ((CUcontext)1)

int driver_current_context(CUcontext *context)
{
    virtual_step();
    *context = ONLY_CONTEXT;
    return CUDA_SUCCESS;
}

int driver_create_event(CUevent *event, unsigned int flags)
{
    (void)flags;
    *event = card_event(virtual_card(), virtual_number());
    return CUDA_SUCCESS;
}

int driver_record_event(CUevent event, CUstream stream)
{
    virtual_step();
    card_event_record(event, &(struct gs_stream){.context = ONLY_CONTEXT, .handle = stream});
    return CUDA_SUCCESS;
}

int driver_query_event(CUevent event)
{
    virtual_step();
    return card_event_is_pending(event) ? 600 /* CUDA_ERROR_NOT_READY */ : CUDA_SUCCESS;
}

int driver_elapsed_time(float *milliseconds, CUevent from, CUevent to)
{
    uint64_t ns;
    card_event_elapsed(from, to, &ns);
    *milliseconds = (float)((double)ns / 1e6);
    return CUDA_SUCCESS;
}

int virtual_launch(const struct virtual_call *what)
{
    virtual_stop(LAUNCHES);
    card_launch(virtual_card(), virtual_number(), what->own_ns, what->stream);
    return CUDA_SUCCESS;
}
