"""OCI images and artifacts without a registry, a daemon or root: blobs, a layout and an archive of it.

Written after the OCI image specification 1.1. The same input gives the same bytes: entries are sorted, owned
by root, and no younger than the release (``SOURCE_DATE_EPOCH``).
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
HELM_CONFIG = "application/vnd.cncf.helm.config.v1+json"
HELM_CHART = "application/vnd.cncf.helm.chart.content.v1.tar+gzip"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True, slots=True)
class Blob:
    """Some bytes, and what they are to one who finds them by their digest."""

    media_type: str
    content: bytes
    diff_id: str = ""  # of a layer: the digest of the tar in it

    @property
    def digest(self) -> str:
        return f"sha256:{hashlib.sha256(self.content).hexdigest()}"

    def descriptor(self, **more: Any) -> dict[str, Any]:
        return {"mediaType": self.media_type, "digest": self.digest, "size": len(self.content), **more}


@dataclass(frozen=True, slots=True)
class Image:
    """One architecture's image: its layers from the bottom, and the `config` member of its configuration."""

    architecture: str
    layers: tuple[Blob, ...]
    config: Mapping[str, Any]


def tree(folder: Path, below: str = "") -> Iterator[tuple[str, Path]]:
    """Everything under `folder` as (name in the archive, file), sorted."""
    for path in sorted(folder.rglob("*")):
        yield f"{below}{path.relative_to(folder)}", path


def packed(files: Iterable[tuple[str, Path]], epoch: int) -> bytes:
    """A gzipped tar of the files, the same for the same content: of root, and no younger than `epoch`."""
    return _squeezed(_tar(files, epoch))


def layer(files: Iterable[tuple[str, Path]], epoch: int) -> Blob:
    plain = _tar(files, epoch)
    return Blob(LAYER, _squeezed(plain), f"sha256:{hashlib.sha256(plain).hexdigest()}")


def _tar(files: Iterable[tuple[str, Path]], epoch: int) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, path in files:
            entry = archive.gettarinfo(str(path), name)
            if entry is None:
                continue  # a socket: no image holds one
            entry.uid = entry.gid = 0
            entry.uname = entry.gname = ""
            entry.mtime = min(int(entry.mtime), epoch)
            if entry.isreg():
                with path.open("rb") as content:
                    archive.addfile(entry, content)
            else:
                archive.addfile(entry)
    return buffer.getvalue()


def _squeezed(plain: bytes) -> bytes:
    return gzip.compress(plain, compresslevel=6, mtime=0)


# -- images ------------------------------------------------------------------------------------------------


class NoBase(LookupError):
    """What no image can stand on; the message says why, and what would do."""


def read_archive(path: Path, architecture: str) -> Image:
    """The image of one architecture in an OCI archive. NoBase where there is none."""
    if not tarfile.is_tarfile(path):
        raise NoBase(f"{path} is neither a folder nor an OCI archive")
    with tarfile.open(path) as archive:
        files = {entry.name.removeprefix("./"): entry for entry in archive if entry.isreg()}
        if "index.json" not in files:
            raise NoBase(f"{path} is no OCI archive: it has no index.json (docker save writes it since 25.0)")

        def read(name: str) -> bytes:
            content = archive.extractfile(files[name])
            assert content is not None
            return content.read()

        def blob(digest: str) -> bytes:
            return read(f"blobs/{digest.replace(':', '/')}")

        todo = list(json.loads(read("index.json"))["manifests"])
        while todo:
            found = todo.pop(0)
            document = json.loads(blob(found["digest"]))
            if "manifests" in document:
                todo += document["manifests"]
                continue
            config = json.loads(blob(document["config"]["digest"]))
            if config.get("architecture") == ARCHITECTURES[architecture]:
                layers = zip(document["layers"], config["rootfs"]["diff_ids"], strict=True)
                blobs = tuple(Blob(each["mediaType"], blob(each["digest"]), diff) for each, diff in layers)
                return Image(architecture, blobs, config.get("config", {}))
    raise NoBase(f"{path} holds no image for {ARCHITECTURES[architecture]}")


def image_archive(path: Path, images: Iterable[Image], created: str, annotations: Mapping[str, str]) -> str:
    """Write one OCI archive with all architectures; answers the digest of its index."""
    blobs: list[Blob] = []
    manifests = []
    for image in images:
        platform = {"architecture": ARCHITECTURES[image.architecture], "os": "linux"}
        config = _json(
            CONFIG,
            {
                **platform,
                "created": created,
                "config": dict(image.config),
                "rootfs": {"type": "layers", "diff_ids": [each.diff_id for each in image.layers]},
                "history": [{"created": created, "created_by": "gpuslice release"} for _ in image.layers],
            },
        )
        manifest = _manifest(config, image.layers, annotations)
        blobs += [config, manifest, *image.layers]
        manifests.append(manifest.descriptor(platform=platform))
    index = _json(
        INDEX,
        {
            "schemaVersion": 2,
            "mediaType": INDEX,
            "manifests": manifests,
            "annotations": dict(annotations),
        },
    )
    name = annotations["org.opencontainers.image.version"]
    _layout(path, [*blobs, index], index, name)
    return index.digest


def chart_archive(path: Path, chart: Mapping[str, Any], package: bytes) -> str:
    """The chart as Helm stores it in a registry (`helm push`); answers the digest of its manifest."""
    config, content = _json(HELM_CONFIG, dict(chart)), Blob(HELM_CHART, package)
    annotations = {
        "org.opencontainers.image.title": chart["name"],
        "org.opencontainers.image.version": chart["version"],
        "org.opencontainers.image.description": chart["description"],
    }
    manifest = _manifest(config, [content], annotations)
    _layout(path, [config, content, manifest], manifest, chart["version"])
    return manifest.digest


def _manifest(config: Blob, layers: Iterable[Blob], annotations: Mapping[str, str]) -> Blob:
    return _json(
        MANIFEST,
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": config.descriptor(),
            "layers": [each.descriptor() for each in layers],
            "annotations": dict(annotations),
        },
    )


def _json(media_type: str, document: Any) -> Blob:
    return Blob(media_type, json.dumps(document, separators=(",", ":"), sort_keys=True).encode())


def _layout(path: Path, blobs: Iterable[Blob], top: Blob, name: str) -> None:
    named = top.descriptor(annotations={"org.opencontainers.image.ref.name": name})
    files = {f"blobs/{each.digest.replace(':', '/')}": each.content for each in blobs}
    files["index.json"] = json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": [named]}).encode()
    files["oci-layout"] = b'{"imageLayoutVersion":"1.0.0"}'
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
        for file, content in sorted(files.items()):
            entry = tarfile.TarInfo(file)
            entry.size, entry.mode = len(content), 0o644
            archive.addfile(entry, io.BytesIO(content))
