/* The toolkit's libcuda, which is there to be linked with (/usr/local/cuda/lib64/stubs/libcuda.so). It has every function, and
 * each answers CUDA_ERROR_STUB_LIBRARY: "the CUDA driver that the application has loaded is a stub library" (CUDA Driver API,
 * CUresult). */
#define STUB(symbol)                                                                                                           \
    __attribute__((visibility("default"))) int symbol(void);                                                                   \
    int symbol(void) { return 34; }
#include "../libcuda/stubs.def"
