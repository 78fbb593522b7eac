/* The toolkit's libnvidia-ml, which is there to be linked with. Its nvmlInit fails and its nvmlErrorString is a warning, whatever
 * it is asked about (github.com/openucx/ucx/pull/9232 shows both); NVIDIA does not document the number. */
#define nvmlErrorString stub_of_nvmlErrorString
#define STUB(symbol)                                                                                                           \
    __attribute__((visibility("default"))) int symbol(void);                                                                   \
    int symbol(void) { return 1; } /* NVML_ERROR_UNINITIALIZED */
#include "../libnvml/stubs.def"
#undef nvmlErrorString

__attribute__((visibility("default"))) const char *nvmlErrorString(int code);
const char *nvmlErrorString(int code)
{
    (void)code;
    return "WARNING: this libnvidia-ml.so is a stub library, for building only.";
}
