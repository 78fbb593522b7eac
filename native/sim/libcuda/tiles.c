/* Memory mapped into sparse arrays, tile by tile. It takes nothing beside its handle, and keeps what that stands for. */
#include <stdlib.h>
#include <string.h>

#include "virtual.h"

struct tile {
    const void *resource;
    int type;
    unsigned place[8];
    struct physical *memory;
    struct tile *next;
};

static struct tile *tiles;

static bool is_at(const struct tile *tile, const CUarrayMapInfo *info)
{
    return tile->resource == info->resource && tile->type == info->subresource_type &&
           memcmp(tile->place, info->subresource, sizeof tile->place) == 0;
}

static void drop(struct tile **link)
{
    struct tile *tile = *link;
    *link = tile->next;
    physical_unpin(tile->memory);
    free(tile);
}

/* Under memory_lock. */
static void unmap(const CUarrayMapInfo *info)
{
    for (struct tile **link = &tiles; *link;)
        if (is_at(*link, info))
            drop(link);
        else
            link = &(*link)->next;
}

static CUresult map(const CUarrayMapInfo *info)
{
    struct physical *memory;
    TRY(physical_of(info->handle, &memory));
    struct tile *tile = malloc(sizeof *tile);
    if (!tile)
        return CUDA_ERROR_OUT_OF_MEMORY;
    physical_pin(memory);
    unmap(info);
    *tile = (struct tile){.resource = info->resource, .type = info->subresource_type, .memory = memory, .next = tiles};
    memcpy(tile->place, info->subresource, sizeof tile->place);
    tiles = tile;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemMapArrayAsync(const CUarrayMapInfo *list, unsigned count, CUstream handle)
{
    struct stream *stream;
    CUresult result = CUDA_SUCCESS;
    TRY(stream_of(handle, &stream));
    if (!list || !count)
        return CUDA_ERROR_INVALID_VALUE;
    memory_lock();
    for (unsigned i = 0; !result && i < count; i++) {
        if (list[i].operation == CU_MEM_OPERATION_TYPE_MAP)
            result = map(&list[i]);
        else
            unmap(&list[i]);
    }
    memory_unlock();
    return result;
}

EXPORT CUresult cuMemMapArrayAsync_ptsz(const CUarrayMapInfo *list, unsigned count, CUstream stream)
{
    return cuMemMapArrayAsync(list, count, PER_THREAD(stream));
}

void tiles_drop(const void *array)
{
    memory_lock();
    for (struct tile **link = &tiles; *link;)
        if ((*link)->resource == array)
            drop(link);
        else
            link = &(*link)->next;
    memory_unlock();
}
