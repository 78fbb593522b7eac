/* Arrays and mipmapped arrays: memory of a shape, without contents. */
#include <stdlib.h>

#include "driver.h"

struct array {
    struct object object;
    struct device *device;
    CUDA_ARRAY3D_DESCRIPTOR shape;
    unsigned levels; /* 0 for a plain array */
    uint64_t bytes;
    struct array *parent; /* a level of a mipmapped array */
    struct page *page;    /* that a small one shares with others */
};

/* Arrays of less than 2 MiB share pages of that size: 16 of 640 KiB took 12 MiB of an H100, 16 of 512 KiB 8. */
struct page {
    struct page *next;
    struct context *owner;
    uint32_t record;
    uint64_t used;
};
#define PAGE_BYTES (UINT64_C(2) << 20)
static pthread_mutex_t pages_lock = PTHREAD_MUTEX_INITIALIZER;
static struct page *pages;

static struct page *page_join(const struct context *context, uint64_t bytes)
{
    pthread_mutex_lock(&pages_lock);
    struct page *page = pages;
    while (page && (page->owner != context->memory || page->used + bytes > PAGE_BYTES))
        page = page->next;
    uint32_t record = page ? 0 : sim_charge(context->device->card, SIM_ARRAY, PAGE_BYTES, 0);
    if (!page && record && (page = malloc(sizeof *page))) {
        *page = (struct page){pages, context->memory, record, 0};
        pages = page;
    }
    if (page)
        page->used += bytes;
    pthread_mutex_unlock(&pages_lock);
    return page;
}

static void page_leave(struct page *page, uint64_t bytes)
{
    pthread_mutex_lock(&pages_lock);
    page->used -= bytes;
    for (struct page **at = &pages; *at && !page->used; at = &(*at)->next)
        if (*at == page) {
            *at = page->next;
            sim_release(page->record);
            free(page);
            break;
        }
    pthread_mutex_unlock(&pages_lock);
}

void array_pages_drop(const struct context *owner)
{
    pthread_mutex_lock(&pages_lock);
    for (struct page **at = &pages, *page; (page = *at);) {
        if (page->owner != owner) {
            at = &page->next;
            continue;
        }
        *at = page->next;
        sim_release(page->record);
        free(page);
    }
    pthread_mutex_unlock(&pages_lock);
}

#define LAYERED 1u
#define CUBEMAP 4u
#define SPARSE 0x40u
#define DEFERRED 0x80u

static unsigned element_bytes(int format)
{
    switch (format) {
    case 0x01:
    case 0x08: return 1;
    case 0x02:
    case 0x09:
    case 0x10: return 2;
    case 0x03:
    case 0x0a:
    case 0x20: return 4;
    default: return 0;
    }
}

static uint64_t at_least_one(uint64_t value) { return value ? value : 1; }

/* Arrays are block-linear: of groups of 64 bytes by 8 rows. Flat ones have up to 16 groups on top of each other in a block,
 * as few as the height fills; solid ones up to 16 behind each other. The whole is rounded to 64 KiB. Measured: what an H100
 * (driver 580.159.04) lost to 35 shapes, and what cuArrayGetMemoryRequirements says of the same with deferred mapping. */
#define GROUP_BYTES UINT64_C(64)
#define GROUP_ROWS UINT64_C(8)
#define ARRAY_STEP (UINT64_C(64) << 10)

static uint64_t up_to(uint64_t value, uint64_t step) { return (value + step - 1) / step * step; }

/* The smallest power of two that covers `extent`, at most 16. */
static uint64_t block_of(uint64_t extent)
{
    uint64_t block = 1;
    while (block < extent && block < 16)
        block *= 2;
    return block;
}

static bool is_layered(const CUDA_ARRAY3D_DESCRIPTOR *shape) { return shape->flags & (LAYERED | CUBEMAP); }

static uint64_t level_bytes(const CUDA_ARRAY3D_DESCRIPTOR *shape, unsigned level)
{
    bool layered = is_layered(shape), solid = !layered && shape->depth;
    uint64_t width = at_least_one(shape->width >> level), height = at_least_one(shape->height >> level);
    uint64_t depth = at_least_one(layered ? shape->depth : shape->depth >> level);
    uint64_t row = up_to(width * element_bytes(shape->format) * shape->channels, GROUP_BYTES);
    uint64_t rows = GROUP_ROWS * (solid ? 1 : block_of((height + GROUP_ROWS - 1) / GROUP_ROWS));
    return row * up_to(height, rows) * up_to(depth, solid ? block_of(depth) : 1);
}

static uint64_t array_bytes(const CUDA_ARRAY3D_DESCRIPTOR *shape, unsigned levels)
{
    uint64_t bytes = 0;
    for (unsigned level = 0; level < at_least_one(levels); level++)
        bytes += level_bytes(shape, level);
    return up_to(bytes, ARRAY_STEP);
}

static CUresult check(const CUDA_ARRAY3D_DESCRIPTOR *shape)
{
    if (!shape || !shape->width || !element_bytes(shape->format))
        return CUDA_ERROR_INVALID_VALUE;
    bool channels = shape->channels == 1 || shape->channels == 2 || shape->channels == 4;
    bool small = shape->width <= 131072 && shape->height <= 131072 && shape->depth <= 32768;
    return channels && small ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult array_new(struct array **made, const CUDA_ARRAY3D_DESCRIPTOR *shape, unsigned levels)
{
    struct context *context;
    TRY(context_current(&context));
    TRY(check(shape));
    if (!made)
        return CUDA_ERROR_INVALID_VALUE;
    uint64_t bytes = array_bytes(shape, levels);
    bool later = shape->flags & (SPARSE | DEFERRED); /* its memory is mapped into it afterwards */
    bool small = !later && bytes < PAGE_BYTES;
    struct page *page = small ? page_join(context, bytes) : NULL;
    uint32_t record = later || small ? 0 : sim_charge(context->device->card, SIM_ARRAY, sim_round(bytes), 0);
    bool has_room = later || page || record;
    struct array *array = has_room ? object_new(OBJECT_ARRAY, sizeof *array, context->memory) : NULL;
    if (!array) {
        sim_release(record);
        if (page)
            page_leave(page, bytes);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    array->object.record = record;
    array->device = context->device;
    array->shape = *shape;
    array->levels = levels;
    array->bytes = small ? bytes : sim_round(bytes);
    array->page = page;
    *made = array;
    return CUDA_SUCCESS;
}

static CUresult array_of(const struct array *array, bool mipmapped)
{
    TRY(driver_ready());
    return object_is(array, OBJECT_ARRAY) && (array->levels != 0) == mipmapped ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

EXPORT CUresult cuArray3DCreate_v2(CUarray *made, const CUDA_ARRAY3D_DESCRIPTOR *shape) { return array_new(made, shape, 0); }

EXPORT CUresult cuArrayCreate_v2(CUarray *made, const CUDA_ARRAY_DESCRIPTOR *flat)
{
    if (!flat)
        return CUDA_ERROR_INVALID_VALUE;
    CUDA_ARRAY3D_DESCRIPTOR shape = {flat->width, flat->height, 0, flat->format, flat->channels, 0};
    return array_new(made, &shape, 0);
}

EXPORT CUresult cuArrayDestroy(CUarray array)
{
    TRY(array_of(array, false));
    if (array->parent)
        return CUDA_ERROR_INVALID_HANDLE;
    tiles_drop(array);
    if (array->page)
        page_leave(array->page, array->bytes);
    object_free(array);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMipmappedArrayCreate(CUmipmappedArray *made, const CUDA_ARRAY3D_DESCRIPTOR *shape, unsigned levels)
{
    if (!levels || levels > 18)
        return CUDA_ERROR_INVALID_VALUE;
    return array_new(made, shape, levels);
}

struct level_search {
    const struct array *parent;
    struct object *found;
};

static void find_level(struct object *object, void *with)
{
    struct level_search *search = with;
    if (((struct array *)object)->parent == search->parent)
        search->found = object;
}

static void free_levels(const struct array *parent)
{
    for (;;) {
        struct level_search search = {parent, NULL};
        objects_each(OBJECT_ARRAY, find_level, &search);
        if (!search.found)
            return;
        object_free(search.found);
    }
}

EXPORT CUresult cuMipmappedArrayDestroy(CUmipmappedArray array)
{
    TRY(array_of(array, true));
    free_levels(array);
    tiles_drop(array);
    if (array->page)
        page_leave(array->page, array->bytes);
    object_free(array);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMipmappedArrayGetLevel(CUarray *made, CUmipmappedArray array, unsigned level)
{
    TRY(array_of(array, true));
    if (!made || level >= array->levels)
        return CUDA_ERROR_INVALID_VALUE;
    struct array *part = object_new(OBJECT_ARRAY, sizeof *part, array->object.owner);
    if (!part)
        return CUDA_ERROR_OUT_OF_MEMORY;
    part->device = array->device;
    part->shape = array->shape;
    part->shape.width = at_least_one(array->shape.width >> level);
    part->shape.height = array->shape.height ? at_least_one(array->shape.height >> level) : 0;
    part->bytes = level_bytes(&array->shape, level);
    part->parent = array;
    *made = part;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuArray3DGetDescriptor_v2(CUDA_ARRAY3D_DESCRIPTOR *shape, CUarray array)
{
    TRY(array_of(array, false));
    if (!shape)
        return CUDA_ERROR_INVALID_VALUE;
    *shape = array->shape;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuArrayGetDescriptor_v2(CUDA_ARRAY_DESCRIPTOR *flat, CUarray array)
{
    TRY(array_of(array, false));
    if (!flat)
        return CUDA_ERROR_INVALID_VALUE;
    *flat = (CUDA_ARRAY_DESCRIPTOR){array->shape.width, array->shape.height, array->shape.format, array->shape.channels};
    return CUDA_SUCCESS;
}

static CUresult requirements(CUDA_ARRAY_MEMORY_REQUIREMENTS *out, const struct array *array, CUdevice ordinal)
{
    struct device *device;
    TRY(device_of(ordinal, &device));
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = (CUDA_ARRAY_MEMORY_REQUIREMENTS){.size = array->bytes, .alignment = 65536};
    return CUDA_SUCCESS;
}

EXPORT CUresult cuArrayGetMemoryRequirements(CUDA_ARRAY_MEMORY_REQUIREMENTS *out, CUarray array, CUdevice device)
{
    TRY(array_of(array, false));
    return requirements(out, array, device);
}

EXPORT CUresult cuMipmappedArrayGetMemoryRequirements(CUDA_ARRAY_MEMORY_REQUIREMENTS *out, CUmipmappedArray array,
                                                      CUdevice device)
{
    TRY(array_of(array, true));
    return requirements(out, array, device);
}

/* ------------------------------------------------------------------------------ textures and surfaces */

static uint64_t last_view;

static CUresult view_new(unsigned long long *made, const void *resource)
{
    struct context *context;
    TRY(context_current(&context));
    if (!made || !resource)
        return CUDA_ERROR_INVALID_VALUE;
    *made = __atomic_add_fetch(&last_view, 1, __ATOMIC_RELAXED);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuTexObjectCreate(unsigned long long *made, const void *resource, const void *texture, const void *view)
{
    (void)texture, (void)view;
    return view_new(made, resource);
}

EXPORT CUresult cuSurfObjectCreate(unsigned long long *made, const void *resource) { return view_new(made, resource); }
EXPORT CUresult cuTexObjectDestroy(unsigned long long view) { return view ? driver_ready() : CUDA_ERROR_INVALID_VALUE; }
EXPORT CUresult cuSurfObjectDestroy(unsigned long long view) { return view ? driver_ready() : CUDA_ERROR_INVALID_VALUE; }
