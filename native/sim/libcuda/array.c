/* Arrays and mipmapped arrays: memory of a shape, without contents. */
#include "driver.h"

struct array {
    struct object object;
    struct device *device;
    CUDA_ARRAY3D_DESCRIPTOR shape;
    unsigned levels; /* 0 for a plain array */
    uint64_t bytes;
    struct array *parent; /* a level of a mipmapped array */
};

#define LAYERED 1u
#define CUBEMAP 4u
#define SPARSE 0x40u
#define DEFERRED 0x80u

static unsigned element_bytes(int format)
{
    switch (format) {
    case 0x01: case 0x08: return 1;
    case 0x02: case 0x09: case 0x10: return 2;
    case 0x03: case 0x0a: case 0x20: return 4;
    default: return 0;
    }
}

static uint64_t at_least_one(uint64_t value) { return value ? value : 1; }

/* Arrays are block-linear: made of groups of 64 bytes by 8 rows, up to 16 of them on top of each other and up to 32 deep in
 * one block, as few as the shape fills; whole blocks are taken, layer for layer. (NVIDIA's clh_classes and the Tegra TRM
 * describe the groups; how high and deep a block is, Mesa's nouveau decides like this, nvc0_tex_choose_tile_dims. NVIDIA's
 * own driver may choose otherwise for large arrays; narrow and layered ones cannot take less than a group each.) */
#define GROUP_BYTES UINT64_C(64)
#define GROUP_ROWS UINT64_C(8)

struct block {
    uint64_t rows, slices;
};

static uint64_t up_to(uint64_t value, uint64_t step) { return (value + step - 1) / step * step; }

static struct block block_for(uint64_t height, uint64_t depth)
{
    struct block block = {GROUP_ROWS, 1};
    while (block.rows < height && block.rows < 16 * GROUP_ROWS)
        block.rows *= 2;
    while (block.slices < depth && block.slices < 32 && block.rows * block.slices < 32 * GROUP_ROWS)
        block.slices *= 2;
    return block;
}

static bool is_layered(const CUDA_ARRAY3D_DESCRIPTOR *shape) { return shape->flags & (LAYERED | CUBEMAP); }

/* The bytes of one level of one layer. */
static uint64_t level_bytes(const CUDA_ARRAY3D_DESCRIPTOR *shape, unsigned level)
{
    uint64_t width = at_least_one(shape->width >> level);
    uint64_t height = at_least_one(shape->height >> level);
    uint64_t depth = is_layered(shape) ? 1 : at_least_one(shape->depth >> level);
    struct block block = block_for(height, depth);
    return up_to(width * element_bytes(shape->format) * shape->channels, GROUP_BYTES) * up_to(height, block.rows) *
           up_to(depth, block.slices);
}

/* Without blocks: rows of 32 bytes. */
static uint64_t lenient_bytes(const CUDA_ARRAY3D_DESCRIPTOR *shape, unsigned levels)
{
    uint64_t bytes = 0;
    for (unsigned level = 0; level < at_least_one(levels); level++) {
        uint64_t depth = at_least_one(is_layered(shape) ? shape->depth : shape->depth >> level);
        bytes += up_to(at_least_one(shape->width >> level) * element_bytes(shape->format) * shape->channels, 32) *
                 at_least_one(shape->height >> level) * depth;
    }
    return bytes;
}

static uint64_t array_bytes(const CUDA_ARRAY3D_DESCRIPTOR *shape, unsigned levels)
{
    struct block block = block_for(at_least_one(shape->height), is_layered(shape) ? 1 : at_least_one(shape->depth));
    uint64_t layer = 0;
    if (sim_is_lenient("arrays"))
        return lenient_bytes(shape, levels);
    for (unsigned level = 0; level < at_least_one(levels); level++)
        layer += level_bytes(shape, level);
    return up_to(layer, GROUP_BYTES * block.rows * block.slices) * (is_layered(shape) ? at_least_one(shape->depth) : 1);
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
    uint32_t record = later ? 0 : sim_charge(context->device->card, SIM_ARRAY, sim_round(bytes), 0);
    struct array *array = record || later ? object_new(OBJECT_ARRAY, sizeof *array, context->memory) : NULL;
    if (!array) {
        sim_release(record);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    array->object.record = record;
    array->device = context->device;
    array->shape = *shape;
    array->levels = levels;
    array->bytes = sim_round(bytes);
    *made = array;
    return CUDA_SUCCESS;
}

static CUresult array_of(const struct array *array, bool mipmapped)
{
    TRY(driver_ready());
    return object_is(array, OBJECT_ARRAY) && (array->levels != 0) == mipmapped ? CUDA_SUCCESS
                                                                               : CUDA_ERROR_INVALID_HANDLE;
}

EXPORT CUresult cuArray3DCreate_v2(CUarray *made, const CUDA_ARRAY3D_DESCRIPTOR *shape)
{
    return array_new(made, shape, 0);
}

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
    *flat = (CUDA_ARRAY_DESCRIPTOR){array->shape.width, array->shape.height, array->shape.format,
                                    array->shape.channels};
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
