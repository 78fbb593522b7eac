/* Comparing names without libc. On the way from our dlsym to libc's, no function may be called that another preloaded
 * library overrides: that library may be looking up the original by dlsym at this moment. */
#ifndef GPUSLICE_TEXT_H
#define GPUSLICE_TEXT_H

#include <stdbool.h>
#include <stddef.h>

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

#endif
