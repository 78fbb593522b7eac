/* Handles: recycled, never freed, and marked, so that a stale one is an error and not a crash. NVIDIA's is undefined there
 * (CUDA Runtime API, cudaStreamDestroy: "use of the handle after this call is undefined behavior", as for events): with
 * GPUSLICE_SIM_STALE=abort it ends the process, and handles of streams and events do not come again. */
#include <stdlib.h>
#include <string.h>

#include "driver.h"

#define MAGIC 0x4e565348u
#define STALE 0x53544c45u

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct object *free_objects[OBJECT_KINDS];
static struct object *living[OBJECT_KINDS];

static struct object *take_free(enum object_kind kind)
{
    struct object *object = free_objects[kind];
    if (object)
        free_objects[kind] = object->next;
    return object;
}

static void link_living(struct object *object)
{
    object->next = living[object->kind];
    if (object->next)
        object->next->previous = object;
    living[object->kind] = object;
}

static void unlink_living(struct object *object)
{
    if (object->next)
        object->next->previous = object->previous;
    if (object->previous)
        object->previous->next = object->next;
    else
        living[object->kind] = object->next;
}

void *object_new(enum object_kind kind, size_t bytes, struct context *owner) { return object_new_as(kind, bytes, owner, NULL); }

void *object_new_as(enum object_kind kind, size_t bytes, struct context *owner, const void *initial)
{
    pthread_mutex_lock(&mutex);
    struct object *object = take_free(kind);
    if (!object)
        object = malloc(bytes);
    if (object) {
        if (initial)
            memcpy(object, initial, bytes);
        else
            memset(object, 0, bytes);
        *object = (struct object){.magic = MAGIC, .kind = kind, .owner = owner};
        link_living(object);
    }
    pthread_mutex_unlock(&mutex);
    return object;
}

static bool ends_at_stale(void)
{
    static _Atomic int chosen = -1;
    if (chosen < 0) {
        const char *said = getenv("GPUSLICE_SIM_STALE");
        chosen = said && strcmp(said, "abort") == 0;
    }
    return chosen;
}

static bool is_stale(const struct object *object)
{
    return object->magic == STALE && (object->kind == OBJECT_STREAM || object->kind == OBJECT_EVENT) && ends_at_stale();
}

bool object_lives(const void *handle, enum object_kind kind)
{
    const struct object *object = handle;
    return (uintptr_t)handle > 4096 && (uintptr_t)handle % sizeof(void *) == 0 && object->magic == MAGIC &&
           object->kind == kind;
}

bool object_is(const void *handle, enum object_kind kind)
{
    bool lives = object_lives(handle, kind);
    if (!lives && (uintptr_t)handle > 4096 && (uintptr_t)handle % sizeof(void *) == 0 && is_stale(handle))
        abort();
    return lives;
}

void object_free(void *handle)
{
    struct object *object = handle;
    sim_release(object->record);
    pthread_mutex_lock(&mutex);
    unlink_living(object);
    object->magic = STALE;
    object->record = 0;
    object->next = object->previous = NULL;
    if (!is_stale(object)) {
        object->next = free_objects[object->kind];
        free_objects[object->kind] = object;
    }
    pthread_mutex_unlock(&mutex);
}

void objects_each(enum object_kind kind, void (*visit)(struct object *object, void *with), void *with)
{
    pthread_mutex_lock(&mutex);
    for (struct object *object = living[kind]; object; object = object->next)
        visit(object, with);
    pthread_mutex_unlock(&mutex);
}

static struct object *first_owned(enum object_kind kind, const struct context *owner)
{
    pthread_mutex_lock(&mutex);
    struct object *object = living[kind];
    while (object && object->owner != owner)
        object = object->next;
    pthread_mutex_unlock(&mutex);
    return object;
}

void objects_free_owned(enum object_kind kind, struct context *owner)
{
    for (struct object *object; (object = first_owned(kind, owner));)
        object_free(object);
}
