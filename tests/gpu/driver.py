"""The NVIDIA driver of this machine: where it is, and what NVML says, with nothing but ctypes.

`nvidia-smi`, NVIDIA's Python binding and the loader's path may all be missing on a rented machine.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

FOLDERS = (
    "/usr/local/nvidia/lib64",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib/wsl/lib",
    "/run/nvidia/driver/usr/lib/x86_64-linux-gnu",
    "/usr/lib/nvidia",
)
PROGRAMS = ("/usr/local/nvidia/bin", "/usr/local/cuda/bin")


class NoDriverError(Exception):
    """There is no driver here, or no card; the message says what was looked for."""


class Skip(Exception):
    """The case does not apply to this machine."""


@dataclass(frozen=True)
class Card:
    """The card that the cases are played on."""

    uuid: str
    name: str
    memory_mib: int
    driver: str

    @property
    def divided(self) -> bool:
        """Not a card but a MIG device: nvidia-smi and much of NVML speak of the card that it is of."""
        return self.uuid.startswith("MIG-")


@dataclass(frozen=True)
class MemoryLimits:
    """Of a cgroup, in bytes; `hard` None: none."""

    soft: int
    hard: int | None


NO_LIMIT = 2**64 - 1


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_uint64), ("free", ctypes.c_uint64), ("used", ctypes.c_uint64))


class _Limits(ctypes.Structure):
    """Of both calls; that which sets them knows no `used`."""

    _fields_ = (
        ("cgroup", ctypes.c_char_p),
        ("soft", ctypes.c_ulonglong),
        ("hard", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class _Sample(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("timestamp_us", ctypes.c_ulonglong),
        ("sm_percent", ctypes.c_uint),
        ("memory_percent", ctypes.c_uint),
        ("encoder_percent", ctypes.c_uint),
        ("decoder_percent", ctypes.c_uint),
    )


class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_uint64),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


_UNKNOWN = {0, 2**64 - 1}


def make_findable() -> None:
    """Puts the folders of the driver and of the toolkit where programs that we start find them."""
    add_folders("PATH", (folder for folder in (*PROGRAMS, *_toolkits()) if Path(folder).is_dir()))
    if not _loads("libcuda.so.1"):
        homes = [folder for folder in FOLDERS if (Path(folder) / "libcuda.so.1").exists()]
        add_folders("LD_LIBRARY_PATH", homes[:1])


def _toolkits() -> list[str]:
    return [str(path) for path in sorted(Path("/usr/local").glob("cuda-*/bin"), reverse=True)]


def add_folders(variable: str, folders: Iterable[str]) -> None:
    before = [folder for folder in os.environ.get(variable, "").split(os.pathsep) if folder]
    os.environ[variable] = os.pathsep.join([*before, *(each for each in folders if each not in before)])


def _loads(library: str) -> bool:
    """In a process of its own: the loader reads its path once."""
    code = f"import ctypes; ctypes.CDLL({library!r})"
    import sys

    return subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


class Nvml:
    """The questions that the cases ask. Raises NoDriverError."""

    def __init__(self) -> None:
        self._library = _open("libnvidia-ml.so.1")
        self._call("nvmlInit_v2")

    def cards(self) -> list[Card]:
        """Those that a program can be given: of a card that is divided by MIG its instances."""
        count = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        return [self._card(each) for index in range(count.value) for each in self._handles(index)]

    def _handles(self, index: int) -> list[ctypes.c_void_p]:
        card = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(card))
        return self._instances(card) if self._is_divided(card) else [card]

    def _is_divided(self, card: ctypes.c_void_p) -> bool:
        now, later = ctypes.c_uint(), ctypes.c_uint()
        try:
            self._call("nvmlDeviceGetMigMode", card, ctypes.byref(now), ctypes.byref(later))
        except (NoDriverError, AttributeError):  # a card, or a driver, that has no MIG
            return False
        return now.value == 1

    def _instances(self, card: ctypes.c_void_p) -> list[ctypes.c_void_p]:
        most = ctypes.c_uint()
        self._call("nvmlDeviceGetMaxMigDeviceCount", card, ctypes.byref(most))
        found = []
        for index in range(most.value):
            instance = ctypes.c_void_p()
            with suppress(NoDriverError):  # no instance of this number
                self._call(
                    "nvmlDeviceGetMigDeviceHandleByIndex", card, ctypes.c_uint(index), ctypes.byref(instance)
                )
                found.append(instance)
        return found

    def cuda_version(self) -> int:
        """The newest that this driver knows, as 12040 for 12.4."""
        version = ctypes.c_int()
        self._call("nvmlSystemGetCudaDriverVersion_v2", ctypes.byref(version))
        return version.value

    def set_limits(self, uuid: str, cgroup: str, limits: MemoryLimits) -> None:
        """The driver's own, of R615 and later; root only."""
        hard = NO_LIMIT if limits.hard is None else limits.hard
        self._limits("nvmlDeviceSetMemoryLimits_v1", uuid, _Limits(cgroup.encode(), limits.soft, hard))

    def limits(self, uuid: str, cgroup: str) -> MemoryLimits:
        found = _Limits(cgroup.encode())
        self._limits("nvmlDeviceGetMemoryLimits_v1", uuid, found)
        return MemoryLimits(found.soft, None if found.hard == NO_LIMIT else found.hard)

    def _limits(self, name: str, uuid: str, argument: _Limits) -> None:
        self._call(name, self._by_uuid(uuid), ctypes.byref(argument))

    def used_bytes(self, uuid: str) -> int:
        """By everybody, and the driver itself."""
        return int(self._memory(self._by_uuid(uuid)).used)

    def processes(self, uuid: str) -> dict[int, int | None]:
        """pid → bytes, None where the driver does not say. May name pids of another namespace, or nobody.

        In a PID namespace drivers of the 535 to 560 branches name a process without its figure, as 0 bytes.
        The second form of the list: some drivers of 535 write longer entries into the third.
        """
        count = ctypes.c_uint(256)
        found = (_Process * 256)()
        name = "nvmlDeviceGetComputeRunningProcesses_v2"
        self._call(name, self._by_uuid(uuid), ctypes.byref(count), found)
        return {each.pid: None if each.used in _UNKNOWN else each.used for each in found[: count.value]}

    def samples(self, uuid: str, after_us: int) -> list[tuple[int, int, int]]:
        """Who worked when: pid, time in microseconds, percent; nobody since then is an empty list."""
        count = ctypes.c_uint(256)
        found = (_Sample * 256)()
        arguments = ctypes.byref(count), ctypes.c_ulonglong(after_us)
        with suppress(NoDriverError):  # also: nothing found
            self._call("nvmlDeviceGetProcessUtilization", self._by_uuid(uuid), found, *arguments)
            return [(each.pid, each.timestamp_us, each.sm_percent) for each in found[: count.value]]
        return []

    def _card(self, card: ctypes.c_void_p) -> Card:
        return Card(
            uuid=self._text("nvmlDeviceGetUUID", card),
            name=self._text("nvmlDeviceGetName", card),
            memory_mib=int(self._memory(card).total) >> 20,
            driver=self._text("nvmlSystemGetDriverVersion"),
        )

    def _by_uuid(self, uuid: str) -> ctypes.c_void_p:
        card = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(card))
        return card

    def _memory(self, card: ctypes.c_void_p) -> _Memory:
        memory = _Memory()
        self._call("nvmlDeviceGetMemoryInfo", card, ctypes.byref(memory))
        return memory

    def _text(self, name: str, *card: object) -> str:
        text = ctypes.create_string_buffer(128)
        self._call(name, *card, text, ctypes.c_uint(len(text)))
        return text.value.decode(errors="replace")

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise NoDriverError(f"{name} answered {code}")


def _open(name: str) -> ctypes.CDLL:
    # The loader read its path when this process began: what was added since counts for those we start.
    added = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    for place in (name, *(f"{folder}/{name}" for folder in (*filter(None, added), *FOLDERS))):
        try:
            return ctypes.CDLL(place)
        except OSError:
            continue
    raise NoDriverError(f"{name} is neither in the loader's path nor in {', '.join(FOLDERS)}")


def smi(fields: Iterable[str], of: str = "gpu") -> list[dict[str, str]]:
    """What nvidia-smi prints for these fields, a row a card or process. Skips where there is none."""
    names = list(fields)
    if shutil.which("nvidia-smi") is None:
        raise Skip("no nvidia-smi here")
    query = ["nvidia-smi", f"--query-{of}={','.join(names)}", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        raise AssertionError(f"{' '.join(query)} ended with {done.returncode}: {done.stdout} {done.stderr}")
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    return [dict(zip(names, row, strict=False)) for row in rows]
