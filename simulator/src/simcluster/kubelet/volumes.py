"""The volumes of a pod as folders of the host."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simcluster.cluster.amounts import Object
from simcluster.kubelet.environment import ConfigError, ReadData, downward_fields, field
from simcluster.kubelet.rootfs import Mount


def prepare(pod: Object, folder: Path, host_root: Path, read: ReadData) -> dict[str, Path]:
    """Create every volume below `folder`; host paths are taken below `host_root`, the node's own root.

    Raises ConfigError if a ConfigMap or Secret is missing.
    """
    return {
        volume["name"]: _prepare(pod, volume, folder / volume["name"], host_root, read)
        for volume in pod["spec"].get("volumes") or ()
    }


def mounts_of(container: Object, volumes: Mapping[str, Path]) -> list[Mount]:
    return [
        Mount(one["mountPath"], volumes[one["name"]] / one.get("subPath", ""))
        for one in container.get("volumeMounts") or ()
        if one["name"] in volumes
    ]


def _prepare(pod: Object, volume: Mapping[str, Any], folder: Path, host_root: Path, read: ReadData) -> Path:
    if "hostPath" in volume:
        path = host_root / str(volume["hostPath"]["path"]).lstrip("/")
        if not path.exists():
            path.mkdir(parents=True)
        return path
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in _contents(pod, volume, read).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def _contents(pod: Object, volume: Mapping[str, Any], read: ReadData) -> dict[str, str]:
    """File name → text; empty for an emptyDir and for kinds that are not simulated."""
    if "configMap" in volume:
        return _data("configmap", volume["configMap"].get("name", ""), volume["configMap"], read)
    if "secret" in volume:
        return _data("secret", volume["secret"].get("secretName", ""), volume["secret"], read)
    if "downwardAPI" in volume:
        source = volume["downwardAPI"]
        fields = downward_fields(pod)
        return {
            one["path"]: field(one["fieldRef"]["fieldPath"], fields)
            for one in source.get("items") or ()
            if "fieldRef" in one
        }
    if "projected" in volume:
        parts = (_contents(pod, one, read) for one in volume["projected"].get("sources") or ())
        return {name: text for part in parts for name, text in part.items()}
    return {}


def _data(kind: str, name: str, source: Mapping[str, Any], read: ReadData) -> dict[str, str]:
    data = read(kind, name or source.get("name", ""))
    if data is None:
        if source.get("optional"):
            return {}
        raise ConfigError(f'{kind} "{name}" not found')
    items = source.get("items")
    if not items:
        return dict(data)
    return {one["path"]: data[one["key"]] for one in items if one["key"] in data}
