/* Entry points that the simulation does not model answer NVML_ERROR_NOT_SUPPORTED: these definitions are weak and
 * give way to real ones. What is not in the list does not exist, as in a driver of that age. */
#define NVML_ERROR_NOT_SUPPORTED 3
#define STUB(symbol)                                                                                                           \
    __attribute__((visibility("default"), weak)) int symbol(void);                                                             \
    int symbol(void) { return NVML_ERROR_NOT_SUPPORTED; }
#include "stubs.def"
