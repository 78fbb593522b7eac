/* Any bytes are a limits file or not; what is accepted has numbers that make sense. For libFuzzer, or, built with
 * STANDALONE, a loop of random changes to a good file: fuzz_limits ROUNDS SEED */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "policy/limits.h"

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t size);

static void require(bool condition)
{
    if (!condition)
        abort();
}

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t size)
{
    struct gs_limits limits;
    if (!gs_limits_parse((const char *)data, size, &limits)) {
        require(limits.count == 0);
        return 0;
    }
    require(limits.count <= GPUSLICE_CARDS);
    for (uint32_t i = 0; i < limits.count; i++) {
        const struct gs_limit *limit = &limits.cards[i];
        require(strlen(limit->uuid) > 4 && limit->compute_percent <= 100);
        require(limit->memory_bytes == GS_NO_LIMIT || limit->memory_bytes <= INT64_MAX);
        for (uint32_t other = 0; other < i; other++)
            require(strcmp(limit->uuid, limits.cards[other].uuid) != 0);
    }
    return 0;
}

#ifdef STANDALONE
static const char good[] = "gpuslice 1\n"
                           "GPU-5f3a0c1e-77aa-4b1c-9d5e-0f6f2f1f9a01 memory=4509925376 share=30\n"
                           "MIG-GPU-5f3a0c1e-77aa-4b1c-9d5e-0f6f2f1f9a02/3/0 memory=- share=-\n"
                           "end 2\n";

static size_t change(char *text, size_t size, size_t room)
{
    size_t at = size ? (size_t)rand() % size : 0, length = size ? (size_t)rand() % 16 % (size - at + 1) : 0;
    switch (rand() % 4) {
    case 0: /* another byte */
        if (size)
            text[at] = (char)(rand() % 2 ? "0123456789-\n =GPUMIG/end"[rand() % 24] : rand());
        return size;
    case 1: /* a piece less */ memmove(text + at, text + at + length, size - at - length); return size - length;
    case 2: /* a piece twice */
        if (size + length > room)
            return size;
        memmove(text + at + length, text + at, size - at);
        return size + length;
    default: /* cut short */ return rand() % 8 ? size : at;
    }
}

int main(int count, char **arguments)
{
    char text[9000];
    int rounds = count > 1 ? atoi(arguments[1]) : 100000;
    srand(count > 2 ? (unsigned)atoi(arguments[2]) : 1);
    for (int i = 0; i < rounds; i++) {
        size_t size = sizeof good - 1;
        memcpy(text, good, size);
        for (int changes = rand() % 6; changes > 0; changes--)
            size = change(text, size, sizeof text);
        LLVMFuzzerTestOneInput((const unsigned char *)text, size);
    }
    return 0;
}
#endif
