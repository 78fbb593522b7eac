/* Memory of other processes and of other interfaces: it is counted once, where it was made. */
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "driver.h"

CUresult share_by_file(const char *name, const void *content, size_t bytes, int *file)
{
    *file = memfd_create(name, MFD_CLOEXEC);
    if (*file >= 0 && write(*file, content, bytes) == (ssize_t)bytes)
        return CUDA_SUCCESS;
    if (*file >= 0)
        close(*file);
    return CUDA_ERROR_OPERATING_SYSTEM;
}

/* What the 64 bytes of an IPC handle hold. */
struct ipc {
    uint32_t record, generation, card, pid;
    uint64_t bytes;
};

_Static_assert(sizeof(struct ipc) <= sizeof(CUipcMemHandle), "an IPC handle has 64 bytes");

EXPORT CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address)
{
    struct context *context;
    TRY(context_current(&context));
    if (!handle)
        return CUDA_ERROR_INVALID_VALUE;
    memset(handle, 0, sizeof *handle);
    memory_lock();
    const struct allocation *found = allocation_at(address);
    bool known = found && found->kind == ALLOCATION_PLAIN;
    if (known) {
        struct ipc ipc = {found->record, sim_state()->records[found->record].generation, found->device->card,
                          (uint32_t)getpid(), found->bytes};
        memcpy(handle, &ipc, sizeof ipc);
    }
    memory_unlock();
    return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static struct allocation *opened(uint32_t record, uint32_t generation)
{
    for (struct allocation *each = allocation_first(); each; each = each->next)
        if (each->kind == ALLOCATION_IMPORT && (uintptr_t)each->detail == ((uintptr_t)record << 24 ^ generation))
            return each;
    return NULL;
}

static struct allocation *open_ipc(const struct ipc *ipc, struct context *context)
{
    struct allocation *made = opened(ipc->record, ipc->generation);
    if (!made && (made = allocation_new(ipc->bytes, ALLOCATION_IMPORT, context))) {
        made->record = sim_import(ipc->record, ipc->generation);
        made->detail = (void *)((uintptr_t)ipc->record << 24 ^ ipc->generation);
        if (!made->record) {
            allocation_drop(made);
            made = NULL;
        }
    }
    if (made) {
        made->imports++;
        made->device = device_on(ipc->card);
    }
    return made;
}

EXPORT CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *address, CUipcMemHandle handle, unsigned flags)
{
    struct context *context;
    struct ipc ipc;
    TRY(context_current(&context));
    memcpy(&ipc, &handle, sizeof ipc);
    if (!address || flags & ~1u || !ipc.bytes)
        return CUDA_ERROR_INVALID_VALUE;
    if (ipc.pid == (uint32_t)getpid()) /* not within the process that made it */
        return CUDA_ERROR_INVALID_CONTEXT;
    /* The manual of cuIpcOpenMemHandle: a context of another device gets it too, with peer access if the flag allows. */
    if (ipc.card != context->device->card && (!device_on(ipc.card) || !(flags & 1)))
        return CUDA_ERROR_INVALID_DEVICE;
    memory_lock();
    struct allocation *made = open_ipc(&ipc, context);
    if (made)
        *address = made->address;
    memory_unlock();
    return made ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuIpcOpenMemHandle(CUdeviceptr *address, CUipcMemHandle handle, unsigned flags)
{
    return cuIpcOpenMemHandle_v2(address, handle, flags);
}

EXPORT CUresult cuIpcCloseMemHandle(CUdeviceptr address)
{
    TRY(driver_ready());
    memory_lock();
    struct allocation *found = allocation_at(address);
    bool known = found && found->kind == ALLOCATION_IMPORT && found->address == address && found->imports;
    if (known && --found->imports == 0)
        allocation_drop(found);
    memory_unlock();
    return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* ------------------------------------------------------------- memory that another interface allocated */

struct external_memory {
    struct object object;
    uint64_t bytes;
};

EXPORT CUresult cuImportExternalMemory(CUexternalMemory *made, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *from)
{
    struct context *context;
    TRY(context_current(&context));
    if (!made || !from || !from->size || from->type < 1 || from->type > 8)
        return CUDA_ERROR_INVALID_VALUE;
    struct external_memory *memory = object_new(OBJECT_EXTERNAL, sizeof *memory, context);
    if (!memory)
        return CUDA_ERROR_OUT_OF_MEMORY;
    memory->bytes = from->size;
    *made = memory;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuExternalMemoryGetMappedBuffer(CUdeviceptr *address, CUexternalMemory memory,
                                                const CUDA_EXTERNAL_MEMORY_BUFFER_DESC *part)
{
    struct context *context;
    TRY(context_current(&context));
    if (!object_is(memory, OBJECT_EXTERNAL))
        return CUDA_ERROR_INVALID_HANDLE;
    if (!address || !part || !part->size || part->offset + part->size > memory->bytes)
        return CUDA_ERROR_INVALID_VALUE;
    memory_lock();
    struct allocation *made = allocation_new(part->size, ALLOCATION_PLAIN, context); /* freed with cuMemFree */
    if (made)
        *address = made->address;
    memory_unlock();
    return made ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuDestroyExternalMemory(CUexternalMemory memory)
{
    TRY(driver_ready());
    if (!object_is(memory, OBJECT_EXTERNAL))
        return CUDA_ERROR_INVALID_HANDLE;
    object_free(memory);
    return CUDA_SUCCESS;
}
