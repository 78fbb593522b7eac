/* Arrays and mipmapped arrays. The driver does not report their size, so it is computed. Small arrays share pages. */
#include "hooks/objects.h"
#include "hooks/place.h"
#include "policy/reserve.h"

/* Bytes per channel; for formats without plain channels, the bytes of a texel divided by the number of channels. */
static uint64_t channel_bytes(int format)
{
    switch (format) {
    case 0x01: /* unsigned 8 */
    case 0x08: /* signed 8 */
    case 0xc0 ... 0xc2:
    case 0xc6 ... 0xc8: return 1;
    case 0x02: /* unsigned 16 */
    case 0x09: /* signed 16 */
    case 0x10: /* half */
    case 0xc3 ... 0xc5:
    case 0xc9 ... 0xcb: return 2;
    case 0x91 ... 0x9d: /* block compressed: at most one byte per texel */
    case 0xb0: /* NV12 */ return 1;
    default: return 4;
    }
}

static uint64_t product(uint64_t a, uint64_t b)
{
    uint64_t result;
    return __builtin_mul_overflow(a, b, &result) ? UINT64_MAX / 2 : result;
}

static uint64_t at_least_one(uint64_t extent) { return extent ? extent : 1; }

static uint64_t smallest_power(uint64_t least, uint64_t most)
{
    uint64_t power = 1;
    while (power < least && power < most)
        power *= 2;
    return power;
}

/* Arrays are block-linear, in cells of 64 bytes by 8 rows. An array without depth consists of columns of up to 16 cells, as
 * few as its height needs; an array with depth, of stacks of up to 16 cells. This agrees with what drivers report for arrays
 * with deferred mapping (cuArrayGetMemoryRequirements) and with measurements: docs/reference/isolation.md. */
#define CELL_BYTES 64u
#define CELL_ROWS 8u
#define MOST_CELLS 16u

static uint64_t level_bytes(const CUDA_ARRAY3D_DESCRIPTOR *shape, unsigned int level)
{
    bool layered = shape->Flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP);
    uint64_t width = at_least_one(shape->Width >> level), height = at_least_one(shape->Height >> level);
    uint64_t depth = at_least_one(layered ? shape->Depth : shape->Depth >> level);
    uint64_t texel = channel_bytes(shape->Format) * at_least_one(shape->NumChannels);
    uint64_t row = gs_round_up(product(width, texel), CELL_BYTES);
    bool solid = !layered && shape->Depth > 0;
    uint64_t column = solid ? 1 : smallest_power((height + CELL_ROWS - 1) / CELL_ROWS, MOST_CELLS);
    uint64_t stack = solid ? smallest_power(depth, MOST_CELLS) : 1;
    return product(product(row, gs_round_up(height, CELL_ROWS * column)), gs_round_up(depth, stack));
}

static uint64_t array_bytes(const CUDA_ARRAY3D_DESCRIPTOR *shape, unsigned int levels)
{
    uint64_t bytes = 0;
    for (unsigned int level = 0; level < levels && level < 32; level++)
        if (__builtin_add_overflow(bytes, level_bytes(shape, level), &bytes))
            return UINT64_MAX;
    bytes = gs_round_up(bytes, GS_ARRAY_STEP);
    return bytes < GS_PAGE_BYTES ? bytes : gs_round_up(bytes, GS_PAGE_BYTES);
}

struct request {
    struct gs_place place;
    uint64_t bytes;            /* 0: nothing is counted */
    uint64_t reserved;         /* 0: a small array that uses an existing page */
    struct gs_array_part part; /* the part of a page that a small array uses */
};

static bool begin_small(struct request *request)
{
    bool opened;
    uint64_t context = gs_key(request->place.context);
    request->part = gs_array_page_take(context, request->bytes, false, &opened);
    if (request->part.page)
        return true;
    if (!gs_reserve(request->place.card, GS_PAGE_BYTES))
        return false;
    request->part = gs_array_page_take(context, request->bytes, true, &opened);
    request->reserved = opened ? GS_PAGE_BYTES : 0;
    if (!opened)
        gs_settle(request->place.card, GS_PAGE_BYTES, 0);
    return true;
}

/* False if refused. Sparse arrays and those with deferred mapping have no memory of their own. */
static bool begin(struct request *request, const CUDA_ARRAY3D_DESCRIPTOR *shape, unsigned int levels)
{
    bool bare = shape->Flags & (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING);
    request->place = gs_current_place();
    request->bytes = bare || !request->place.card ? 0 : array_bytes(shape, levels);
    request->part = (struct gs_array_part){0};
    request->reserved = 0;
    if (!request->bytes)
        return true;
    if (request->bytes < GS_PAGE_BYTES)
        return begin_small(request);
    request->reserved = request->bytes;
    return gs_reserve(request->place.card, request->bytes);
}

/* For a shape beyond what any card supports (131,072 in each direction, by NVIDIA's table of compute capabilities) the driver
 * reports what is wrong. If it creates the array nevertheless, that is destroyed. */
static bool is_for_the_driver(const CUDA_ARRAY3D_DESCRIPTOR *shape)
{
    enum { MOST_EXTENT = 131072 };
    return shape->Width > MOST_EXTENT || shape->Height > MOST_EXTENT || shape->Depth > MOST_EXTENT;
}

/* The array was not created: returns its part of the page, and the page too if no other array uses it by now. */
static void give_back(const struct request *request)
{
    bool last = gs_array_page_leave(request->part);
    if (request->reserved)
        gs_settle(request->place.card, request->reserved, last ? 0 : request->reserved);
    else if (last)
        gs_recharge(request->place.card, GS_PAGE_BYTES, 0);
}

static int finish(const struct request *request, int result, const void *made)
{
    if (!request->bytes)
        return result;
    struct gs_entry entry = {.key = gs_key(made),
                             .bytes = gs_round_up(request->bytes, GS_PAGE_BYTES),
                             .owner = gs_key(request->place.context),
                             .kind = GS_LINEAR,
                             .card = request->place.card->index};
    if (request->part.page) {
        entry.bytes = (uint64_t)request->part.page << 8 | request->part.steps;
        entry.kind = GS_SMALL_ARRAY;
    }
    if (result != CUDA_SUCCESS) {
        give_back(request);
        return result;
    }
    gs_table_put(&gs_held, &entry);
    if (request->reserved)
        gs_settle(request->place.card, request->reserved, request->reserved);
    return result;
}

/* A function that creates an array, by its parameters and as it is called; `whole` is the shape as three dimensions. */
#define CREATE(symbol, parameters, call, whole, levels, destroy)                                                               \
    int symbol parameters                                                                                                      \
    {                                                                                                                          \
        struct request request;                                                                                                \
        if (!shape)                                                                                                            \
            return DRIVER(symbol) call;                                                                                        \
        CUDA_ARRAY3D_DESCRIPTOR of = whole;                                                                                    \
        bool refused = !begin(&request, &of, levels);                                                                          \
        if (refused && !is_for_the_driver(&of))                                                                                \
            return CUDA_ERROR_OUT_OF_MEMORY;                                                                                   \
        int result = DRIVER(symbol) call;                                                                                      \
        if (refused && result == CUDA_SUCCESS)                                                                                 \
            DRIVER(destroy)(*array);                                                                                           \
        if (refused)                                                                                                           \
            return result == CUDA_SUCCESS ? CUDA_ERROR_OUT_OF_MEMORY : result;                                                 \
        return finish(&request, result, result == CUDA_SUCCESS ? (const void *)*array : NULL);                                 \
    }

#define FLAT ((CUDA_ARRAY3D_DESCRIPTOR){shape->Width, shape->Height, 0, shape->Format, shape->NumChannels, 0})
#define SOLID                                                                                                                  \
    ((CUDA_ARRAY3D_DESCRIPTOR){shape->Width, shape->Height, shape->Depth, shape->Format, shape->NumChannels, shape->Flags})
#define CREATE_ARRAY(symbol, type, whole)                                                                                      \
    CREATE(symbol, (CUarray * array, const type *shape), (array, shape), whole, 1, cuArrayDestroy)

CREATE_ARRAY(cuArrayCreate, CUDA_ARRAY_DESCRIPTOR_v1, FLAT)
CREATE_ARRAY(cuArrayCreate_v2, CUDA_ARRAY_DESCRIPTOR, FLAT)
CREATE_ARRAY(cuArray3DCreate, CUDA_ARRAY3D_DESCRIPTOR_v1, SOLID)
CREATE_ARRAY(cuArray3DCreate_v2, CUDA_ARRAY3D_DESCRIPTOR, SOLID)
CREATE(cuMipmappedArrayCreate, (CUmipmappedArray * array, const CUDA_ARRAY3D_DESCRIPTOR *shape, unsigned levels),
       (array, shape, levels), SOLID, levels, cuMipmappedArrayDestroy)

#define DESTROY(symbol, type)                                                                                                  \
    int symbol(type array)                                                                                                     \
    {                                                                                                                          \
        gs_releasing_begins(); /* includes the tiles that are mapped into it */                                                \
        struct gs_releasing releasing = gs_release_begins(gs_key(array));                                                      \
        int result = gs_released(&releasing, DRIVER(symbol)(array), NULL);                                                     \
        if (result == CUDA_SUCCESS)                                                                                            \
            gs_object_holder_ends(gs_key(array));                                                                              \
        gs_releasing_ends();                                                                                                   \
        return result;                                                                                                         \
    }

DESTROY(cuArrayDestroy, CUarray)
DESTROY(cuMipmappedArrayDestroy, CUmipmappedArray)
