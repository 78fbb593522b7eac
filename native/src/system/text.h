/* Names and paths without libc. On the way from our dlsym to libc's, no function may be called that another preloaded
 * library overrides: that library may be looking up the original by dlsym at this moment. */
#ifndef GPUSLICE_TEXT_H
#define GPUSLICE_TEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

static inline bool gs_text_equal(const char *a, const char *b)
{
    for (; *a && *a == *b; a++, b++)
        ;
    return *a == *b;
}

static inline bool gs_text_starts(const char *text, const char *start)
{
    for (; *start && *text == *start; text++, start++)
        ;
    return *start == 0;
}

static inline const char *gs_text_file_name(const char *path)
{
    const char *name = path;
    for (; *path; path++)
        if (*path == '/')
            name = path + 1;
    return name;
}

/* Puts three texts into one. Without room for it false, and "". */
static inline bool gs_text_join(char *joined, size_t room, const char *one, const char *two, const char *three)
{
    const char *const parts[] = {one, two, three};
    size_t length = 0;
    for (int i = 0; i < 3; i++)
        for (const char *at = parts[i]; *at && length < room; at++)
            joined[length++] = *at;
    joined[length < room ? length : 0] = 0;
    return length < room;
}

/* A decimal number, behind which `*at` is then. */
static inline uint64_t gs_text_number(const char **at)
{
    uint64_t number = 0;
    for (; **at >= '0' && **at <= '9'; ++*at)
        number = number * 10 + (uint64_t)(**at - '0');
    return number;
}

/* FNV-1a, never 0. */
static inline uint64_t gs_hash(const void *bytes, size_t count)
{
    uint64_t value = UINT64_C(14695981039346656037);
    for (size_t i = 0; i < count; i++)
        value = (value ^ ((const unsigned char *)bytes)[i]) * UINT64_C(1099511628211);
    return value ? value : 1;
}

#endif
