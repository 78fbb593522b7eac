/* The driver's functions that throttle.c calls, for its tests. Each test defines these five; the table and those without
 * an effect stand in throttle_driver.c. */
#ifndef GPUSLICE_THROTTLE_DRIVER_H
#define GPUSLICE_THROTTLE_DRIVER_H

#include "driver/driver.h"

int driver_current_context(CUcontext *context);
int driver_create_event(CUevent *event, unsigned int flags);
int driver_record_event(CUevent event, CUstream stream);
int driver_query_event(CUevent event);
int driver_elapsed_time(float *milliseconds, CUevent from, CUevent to);

#endif
