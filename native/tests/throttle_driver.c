#include "throttle_driver.h"

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
    [GS_cuCtxGetCurrent] = (void *)driver_current_context,
    [GS_cuEventCreate] = (void *)driver_create_event,
    [GS_cuEventRecord] = (void *)driver_record_event,
    [GS_cuEventQuery] = (void *)driver_query_event,
    [GS_cuEventElapsedTime] = (void *)driver_elapsed_time,
    [GS_cuStreamIsCapturing] = (void *)is_capturing,
    [GS_cuThreadExchangeStreamCaptureMode] = (void *)exchange_mode,
};
