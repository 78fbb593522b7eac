/* A library whose constructor uses the driver before anybody's main, and perhaps before libgpuslice's own start. */
#include <stdio.h>
#include <stdlib.h>

int cuInit(unsigned);
int cuDevicePrimaryCtxRetain(void **, int);
int cuCtxSetCurrent(void *);
int cuMemAlloc_v2(unsigned long long *, unsigned long);

__attribute__((constructor(101))) static void early(void)
{
    void *context;
    unsigned long long address;
    const char *bytes = getenv("GPUSLICE_TEST_EARLY_BYTES");
    if (!bytes || cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context))
        return;
    printf("early %d\n", cuMemAlloc_v2(&address, strtoul(bytes, NULL, 10)));
    fflush(stdout);
}
