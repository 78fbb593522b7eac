/* Strict by design: a limit that is misread is worse than a container that gets no memory at all. */
#include "policy/limits.h"

#include <string.h>

#include "system/os.h"

struct cursor {
    const char *at, *end;
};

static bool take_text(struct cursor *cursor, const char *text)
{
    size_t length = strlen(text);
    if ((size_t)(cursor->end - cursor->at) < length || memcmp(cursor->at, text, length) != 0)
        return false;
    cursor->at += length;
    return true;
}

static bool is_uuid_character(char c)
{
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '-' || c == '/';
}

static bool take_uuid(struct cursor *cursor, char uuid[GPUSLICE_UUID_BYTES])
{
    size_t length = 0;
    while (cursor->at < cursor->end && is_uuid_character(*cursor->at)) {
        if (length == GPUSLICE_UUID_BYTES - 1)
            return false;
        uuid[length++] = *cursor->at++;
    }
    uuid[length] = 0;
    return length > 4 && (memcmp(uuid, "GPU-", 4) == 0 || memcmp(uuid, "MIG-", 4) == 0);
}

/* Decimal without sign, leading zeros or overflow. */
static bool take_number(struct cursor *cursor, uint64_t most, uint64_t *number)
{
    const char *start = cursor->at;
    *number = 0;
    while (cursor->at < cursor->end && *cursor->at >= '0' && *cursor->at <= '9') {
        uint64_t digit = (uint64_t)(*cursor->at - '0');
        if (*number > (most - digit) / 10)
            return false;
        *number = *number * 10 + digit;
        cursor->at++;
    }
    return cursor->at > start && (*start != '0' || cursor->at == start + 1);
}

static bool take_memory(struct cursor *cursor, struct gs_limit *limit)
{
    if (!take_text(cursor, " memory="))
        return false;
    limit->memory_bytes = GS_NO_LIMIT;
    return take_text(cursor, "-") || take_number(cursor, (uint64_t)INT64_MAX, &limit->memory_bytes);
}

static bool take_share(struct cursor *cursor, struct gs_limit *limit)
{
    uint64_t percent = 0;
    if (!take_text(cursor, " share="))
        return false;
    if (!take_text(cursor, "-") && !(take_number(cursor, 100, &percent) && percent > 0))
        return false;
    limit->compute_percent = limit->cap_percent = (uint32_t)percent;
    return true;
}

/* Both may be absent: then the cap is the share, and the container is not interactive. */
static bool take_lending(struct cursor *cursor, struct gs_limit *limit)
{
    uint64_t percent = limit->cap_percent;
    if (take_text(cursor, " cap=") &&
        !(limit->compute_percent && take_number(cursor, 100, &percent) && percent >= limit->compute_percent))
        return false;
    limit->cap_percent = (uint32_t)percent;
    limit->interactive = take_text(cursor, " class=interactive");
    return !limit->interactive || limit->compute_percent;
}

/* Both may be absent: then all of the memory is the container's own. */
static bool take_request(struct cursor *cursor, struct gs_limit *limit)
{
    uint64_t own = limit->memory_bytes;
    bool given = take_text(cursor, " request=");
    if (given && (own == GS_NO_LIMIT || !take_number(cursor, (uint64_t)INT64_MAX, &own)))
        return false;
    limit->request_bytes = own;
    bool alone = given && take_text(cursor, " shown=request");
    limit->shown_bytes = alone || own > limit->memory_bytes ? own : limit->memory_bytes;
    return true;
}

static bool take_card(struct cursor *cursor, struct gs_limits *limits)
{
    if (limits->count == GPUSLICE_CARDS)
        return false;
    struct gs_limit *limit = &limits->cards[limits->count];
    if (!take_uuid(cursor, limit->uuid) || !take_memory(cursor, limit) || !take_share(cursor, limit) ||
        !take_lending(cursor, limit) || !take_request(cursor, limit) || !take_text(cursor, "\n"))
        return false;
    for (uint32_t i = 0; i < limits->count; i++)
        if (strcmp(limits->cards[i].uuid, limit->uuid) == 0)
            return false;
    limits->count++;
    return true;
}

static bool take_file(struct cursor *cursor, struct gs_limits *limits)
{
    uint64_t count;
    if (!take_text(cursor, "gpuslice 1\n"))
        return false;
    while (!take_text(cursor, "end "))
        if (!take_card(cursor, limits))
            return false;
    return take_number(cursor, GPUSLICE_CARDS, &count) && count == limits->count && take_text(cursor, "\n") &&
           cursor->at == cursor->end;
}

bool gs_limits_parse(const char *text, size_t bytes, struct gs_limits *limits)
{
    struct cursor cursor = {text, text + bytes};
    memset(limits, 0, sizeof *limits);
    if (take_file(&cursor, limits))
        return true;
    memset(limits, 0, sizeof *limits);
    return false;
}

enum gs_limits_state gs_limits_read(const char *path, struct gs_limits *limits)
{
    static char text[GS_LIMITS_FILE_BYTES]; /* filled by one thread at a time */
    memset(limits, 0, sizeof *limits);
    long bytes = gs_read_file(path, text, sizeof text);
    if (bytes == GS_NO_FILE)
        return GS_LIMITS_ABSENT;
    /* A file that fills the buffer may be longer than it. */
    if (bytes < 0 || (size_t)bytes == sizeof text || !gs_limits_parse(text, (size_t)bytes, limits))
        return GS_LIMITS_CORRUPT;
    return GS_LIMITS_READ;
}
