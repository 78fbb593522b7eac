/* Every entry point of the driver exists. Those that the simulation does not model answer CUDA_ERROR_NOT_SUPPORTED:
 * these definitions are weak and give way to real ones. */
#define CUDA_ERROR_NOT_SUPPORTED 801
#define STUB(symbol)                                                                                                           \
    __attribute__((visibility("default"), weak)) int symbol(void);                                                             \
    int symbol(void) { return CUDA_ERROR_NOT_SUPPORTED; }
#include "stubs.def"
