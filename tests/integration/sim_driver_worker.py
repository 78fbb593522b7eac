"""The other end of `sim_driver_client`: standard library only, so that it starts quickly."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, Final

PR_SET_PTRACER: Final = 0x59616D61
PIDFD_GETFD: Final = 438

libraries: dict[str, ctypes.CDLL] = {}


def library_of(name: str) -> ctypes.CDLL:
    file = "libnvidia-ml.so.1" if name.startswith("nvml") else "libcuda.so.1"
    return libraries.setdefault(file, ctypes.CDLL(file))


def as_argument(value: Any, buffers: list[Any], alive: list[Any]) -> Any:
    if value is None:
        return ctypes.c_void_p(None)
    if isinstance(value, int):
        return ctypes.c_uint64(value & (2**64 - 1))
    if isinstance(value, str):
        return ctypes.c_char_p(value.encode())
    if "pointers" in value:
        inner = [
            ctypes.create_string_buffer(bytes.fromhex(each), len(each) // 2) for each in value["pointers"]
        ]
        alive.extend(inner)
        return (ctypes.c_void_p * len(inner))(*(ctypes.addressof(each) for each in inner))
    if "fields" in value:  # a structure of addresses and 64-bit numbers
        texts = [ctypes.create_string_buffer(one.encode()) for one in value["fields"] if isinstance(one, str)]
        alive.extend(texts)
        places = iter(ctypes.addressof(each) for each in texts)
        numbers = (next(places) if isinstance(one, str) else one for one in value["fields"])
        buffers.append(ctypes.create_string_buffer(b"".join(each.to_bytes(8, "little") for each in numbers)))
        return buffers[-1]
    data = bytes.fromhex(value["in"]) if "in" in value else bytes(value["out"])
    buffers.append(ctypes.create_string_buffer(data, len(data)))
    return buffers[-1]


def call(name: str, arguments: list[Any]) -> dict[str, Any]:
    buffers: list[Any] = []
    alive: list[Any] = []
    function = getattr(library_of(name), name)
    result = function(*(as_argument(value, buffers, alive) for value in arguments))
    return {"result": result, "out": [buffer.raw.hex() for buffer in buffers]}


def in_child(request: dict[str, Any]) -> dict[str, Any]:
    """Makes the call in a forked child and brings its answer back."""
    read, write = os.pipe()
    if os.fork() == 0:
        os.write(write, json.dumps(call(request["in_child"], request["arguments"])).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        found: dict[str, Any] = json.loads(answer.read())
    os.wait()
    return found


def in_thread(request: dict[str, Any]) -> dict[str, Any]:
    """Makes the call in a thread of its own that has this thread's context current and ends afterwards."""
    cu = library_of("cu")
    context = ctypes.c_void_p()
    cu.cuCtxGetCurrent(ctypes.byref(context))
    found: list[dict[str, Any]] = []

    def work() -> None:
        cu.cuCtxSetCurrent(context)
        found.append(call(request["in_thread"], request["arguments"]))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return found[0]


def beside(request: dict[str, Any]) -> dict[str, Any]:
    """Makes the call in a thread, without waiting for it."""
    name, arguments = request["beside"], request["arguments"]
    threading.Thread(target=call, args=(name, arguments), daemon=True).start()
    return {}


class IpcHandle(ctypes.Structure):
    """Passed by value."""

    _fields_ = [("bytes", ctypes.c_char * 64)]


def open_ipc(handle: bytes) -> dict[str, Any]:
    address = ctypes.c_uint64()
    by_value = IpcHandle.from_buffer_copy(handle)
    result = library_of("cu").cuIpcOpenMemHandle_v2(ctypes.byref(address), by_value, 1)
    return {"result": result, "address": address.value}


def take(pid: int, number: int) -> int:
    """Another process's descriptor, as if it had been sent over a socket."""
    process = os.pidfd_open(pid)
    descriptor = ctypes.CDLL(None, use_errno=True).syscall(PIDFD_GETFD, process, number, 0)
    os.close(process)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), f"descriptor {number} of {pid}")
    return int(descriptor)


def import_file(file: tuple[int, int], kind: str) -> dict[str, Any]:
    handle = ctypes.c_uint64()
    descriptor = take(*file)
    cu = library_of("cu")
    by_kind = cu.cuMemPoolImportFromShareableHandle if kind == "pool" else cu.cuMemImportFromShareableHandle
    result = by_kind(ctypes.byref(handle), ctypes.c_void_p(descriptor), 1, ctypes.c_uint64(0))
    os.close(descriptor)
    return {"result": result, "handle": handle.value}


def close(request: dict[str, Any]) -> dict[str, Any]:
    os.close(request["close"])
    return {"result": 0}


def start_again(_: dict[str, Any]) -> dict[str, Any]:
    os.execv(sys.executable, [sys.executable, __file__, "again"])


def address_of(request: dict[str, Any]) -> dict[str, Any]:
    function = getattr(library_of(request["address"]), request["address"])
    return {"address": ctypes.cast(function, ctypes.c_void_p).value}


REQUESTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "beside": beside,
    "call": lambda request: call(request["call"], request["arguments"]),
    "close": close,
    "exec": start_again,
    "in_child": in_child,
    "in_thread": in_thread,
    "ipc": lambda request: open_ipc(bytes.fromhex(request["ipc"])),
    "take": lambda request: {"result": 0, "descriptor": take(*request["take"])},
    "import": lambda request: import_file(request["import"], request.get("as", "memory")),
    "address": address_of,
    "has": lambda request: {"has": hasattr(library_of(request["has"]), request["has"])},
}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    kind = next(key for key in request if key in REQUESTS)
    return REQUESTS[kind](request)


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_long(-1), 0, 0, 0)  # may be asked for descriptors
    if sys.argv[1:]:
        print(json.dumps({"result": 0}), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
