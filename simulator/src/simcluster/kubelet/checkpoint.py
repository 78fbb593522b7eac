"""The file ``kubelet_internal_checkpoint``: what the device manager remembers across a restart.

Format of Kubernetes 1.36 (pkg/kubelet/cm/devicemanager/checkpoint): JSON with a 32-bit FNV-1a checksum over
the Go-printed form of its data. A file whose checksum does not match is corrupt and is ignored entirely.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simcluster.kubelet.devices import DeviceAssignment

FILE_NAME = "kubelet_internal_checkpoint"
NO_NUMA_NODE = "-1"


class CorruptCheckpointError(Exception):
    """The file cannot be used; kubelet logs that and continues without it."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    assignments: tuple[DeviceAssignment, ...]
    registered: Mapping[str, tuple[str, ...]]


def encode(assignments: Iterable[DeviceAssignment], registered: Mapping[str, Iterable[str]]) -> bytes:
    data = {
        "PodDeviceEntries": [
            {
                "PodUID": one.pod_uid,
                "ContainerName": one.container,
                "ResourceName": one.resource,
                "DeviceIDs": {NO_NUMA_NODE: sorted(one.ids)},
                "AllocResp": base64.b64encode(one.response).decode(),
            }
            for one in assignments
        ]
        or None,
        "RegisteredDevices": {name: sorted(ids) for name, ids in sorted(registered.items())},
    }
    return json.dumps({"Data": data, "Checksum": checksum(data)}, separators=(",", ":")).encode()


def decode(raw: bytes) -> Checkpoint:
    """Raises CorruptCheckpointError with the reason."""
    try:
        document = json.loads(raw)
        data, expected = document["Data"], document["Checksum"]
        actual = checksum(data)
        if actual != expected:
            raise CorruptCheckpointError(f"checksum is {expected}, must be {actual}")
        assignments = tuple(
            DeviceAssignment(
                pod_uid=entry["PodUID"],
                container=entry["ContainerName"],
                resource=entry["ResourceName"],
                ids=frozenset(identifier for ids in entry["DeviceIDs"].values() for identifier in ids),
                response=base64.b64decode(entry["AllocResp"], validate=True),
            )
            for entry in data["PodDeviceEntries"] or ()
        )
        registered = {name: tuple(ids or ()) for name, ids in (data["RegisteredDevices"] or {}).items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpointError(f"{type(error).__name__}: {error}") from error
    return Checkpoint(assignments, registered)


def write(folder: Path, raw: bytes) -> None:
    """Replace the file in one step, so that a crash leaves the old or the new one."""
    part = folder / f"{FILE_NAME}.part"
    part.write_bytes(raw)
    part.replace(folder / FILE_NAME)


def read(folder: Path) -> Checkpoint | None:
    """The checkpoint in `folder`, None if there is none. Raises CorruptCheckpointError."""
    try:
        raw = (folder / FILE_NAME).read_bytes()
    except FileNotFoundError:
        return None
    return decode(raw)


def remove_sockets(folder: Path) -> None:
    """At its start kubelet deletes everything in its plugin folder except the checkpoint: plugins must
    notice.
    """
    for path in folder.iterdir():
        if path.name != FILE_NAME and not path.is_dir():
            os.unlink(path)


def checksum(data: Mapping[str, Any]) -> int:
    # the data as Go's spew prints it, with types and field names: kubelet hashes this text
    entries = data["PodDeviceEntries"]
    return fnv1a_32(
        "(checkpoint.checkpointData){PodDeviceEntries:([]checkpoint.PodDevicesEntry)"
        f"{'<nil>' if entries is None else _go_list(_go_entry(one) for one in entries)}"
        f" RegisteredDevices:(map[string][]string){_go_map(data['RegisteredDevices'])}}}".encode()
    )


def fnv1a_32(raw: bytes) -> int:
    value = 0x811C9DC5
    for byte in raw:
        value = ((value ^ byte) * 0x01000193) & 0xFFFFFFFF
    return value


def _go_entry(entry: Mapping[str, Any]) -> str:
    response = base64.b64decode(entry["AllocResp"])
    return (
        f"{{PodUID:(string){entry['PodUID']} ContainerName:(string){entry['ContainerName']}"
        f" ResourceName:(string){entry['ResourceName']}"
        f" DeviceIDs:(checkpoint.DevicesPerNUMA){_go_map(entry['DeviceIDs'])}"
        f" AllocResp:([]uint8){_go_list(str(byte) for byte in response)}}}"
    )


def _go_map(values: Mapping[str, Iterable[str]] | None) -> str:
    if values is None:
        return "<nil>"
    return f"map{_go_list(f'{key}:{_go_list(ids)}' for key, ids in sorted(values.items()))}"


def _go_list(items: Iterable[str]) -> str:
    return f"[{' '.join(items)}]"
