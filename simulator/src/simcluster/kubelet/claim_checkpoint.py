"""The file ``dra_manager_state``: what kubelet remembers of prepared claims across a restart.

Format of Kubernetes 1.36 (pkg/kubelet/cm/dra/state): JSON in JSON, with a CRC of the inner one.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpuslice.adapters.kubelet.proto import draplugin_pb2 as dra

FILE_NAME = "dra_manager_state"


class CorruptClaimsError(Exception):
    """The file cannot be used; kubelet then does not start: the node must be drained and the file removed."""


@dataclass(slots=True)
class PreparedClaim:
    """The drivers' answers; `pods` are the uids of the pods that use it here.

    `asked`: the drivers that this kubelet has called; after a restart it has called none yet.
    """

    message: dra.Claim
    devices: dict[str, list[dra.Device]] = field(default_factory=dict)  # by driver
    pods: set[str] = field(default_factory=set)
    asked: set[str] = field(default_factory=set)


def write(root: Path, claims: Iterable[PreparedClaim]) -> None:
    """Replace the file in one step."""
    data = {
        "kind": "DRACheckpoint",
        "apiVersion": "checkpoint.dra.kubelet.k8s.io/v1",
        "ClaimInfoStateList": [_entry(each) for each in claims] or None,
    }
    inner = json.dumps(data, separators=(",", ":"))
    document = {"Data": inner, "Checksum": zlib.crc32(inner.encode())}
    part = root / f"{FILE_NAME}.part"
    part.write_text(json.dumps(document, separators=(",", ":")))
    part.replace(root / FILE_NAME)


def read(root: Path) -> list[PreparedClaim]:
    """Those of the previous kubelet. Raises CorruptClaimsError."""
    try:
        document = json.loads((root / FILE_NAME).read_bytes())
        if zlib.crc32(document["Data"].encode()) != document["Checksum"]:
            raise CorruptClaimsError("the checksum does not match")
        return [_claim(each) for each in json.loads(document["Data"])["ClaimInfoStateList"] or ()]
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptClaimsError(f"{type(error).__name__}: {error}") from error


def _entry(claim: PreparedClaim) -> dict[str, Any]:
    return {
        "ClaimUID": claim.message.uid,
        "ClaimName": claim.message.name,
        "Namespace": claim.message.namespace,
        "PodUIDs": {uid: {} for uid in sorted(claim.pods)},
        "DriverState": {
            driver: {
                "Devices": [
                    {
                        "PoolName": each.pool_name,
                        "DeviceName": each.device_name,
                        "ShareID": each.share_id or None,
                        "RequestNames": list(each.request_names),
                        "CDIDeviceIDs": list(each.cdi_device_ids),
                    }
                    for each in devices
                ]
            }
            for driver, devices in claim.devices.items()
        },
    }


def _claim(entry: dict[str, Any]) -> PreparedClaim:
    message = dra.Claim(namespace=entry["Namespace"], name=entry["ClaimName"], uid=entry["ClaimUID"])
    devices = {
        driver: [
            dra.Device(
                pool_name=each["PoolName"],
                device_name=each["DeviceName"],
                share_id=each["ShareID"],
                request_names=each["RequestNames"],
                cdi_device_ids=each["CDIDeviceIDs"],
            )
            for each in state["Devices"] or ()
        ]
        for driver, state in entry["DriverState"].items()
    }
    return PreparedClaim(message, devices, set(entry["PodUIDs"]))
