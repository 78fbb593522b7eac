"""What a folder of installed packages consists of, as a CycloneDX 1.5 document."""

from __future__ import annotations

import re
import uuid
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any


def bill_of_materials(folder: Path, name: str, version: str, created: str, lock: str) -> dict[str, Any]:
    """The packages in `folder`: licence, package URL, and the hashes that the lock allows."""
    found = sorted(distributions(path=[str(folder)]), key=lambda each: each.name.lower())
    parts = [_component(each, lock) for each in found if each.name != name]
    serial = uuid.uuid5(uuid.NAMESPACE_URL, f"{name} {version} {[each['purl'] for each in parts]}")
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
        "metadata": {
            "timestamp": created,
            "component": {
                "type": "application",
                "bom-ref": f"pkg:pypi/{name}@{version}",
                "name": name,
                "version": version,
                "licenses": [{"license": {"id": "Apache-2.0"}}],
                "purl": f"pkg:pypi/{name}@{version}",
            },
        },
        "components": parts,
        "dependencies": [
            {"ref": f"pkg:pypi/{name}@{version}", "dependsOn": [each["purl"] for each in parts]}
        ],
    }


def _component(found: Distribution, lock: str) -> dict[str, Any]:
    name, meta = re.sub(r"[-_.]+", "-", found.name).lower(), found.metadata
    purl = f"pkg:pypi/{name}@{found.version}"
    component: dict[str, Any] = {
        "type": "library", "bom-ref": purl, "name": name, "version": found.version, "purl": purl
    }  # fmt: skip
    told = {key: meta[key] for key in ("License-Expression", "License") if key in meta}
    expression, free = told.get("License-Expression"), told.get("License", "").strip()
    if expression:
        component["licenses"] = [{"expression": expression}]
    elif free and "\n" not in free:
        component["licenses"] = [{"license": {"name": free}}]
    block = re.search(rf"^{re.escape(name)}==\S+(?:[^\n]*\\\n(?:    --hash=.*\n)*)", lock, re.MULTILINE)
    hashes = re.findall(r"--hash=sha256:([0-9a-f]{64})", block[0]) if block else []
    if hashes:  # one of these is what was installed
        component["properties"] = [{"name": "gpuslice:allowed-sha256", "value": each} for each in hashes]
    return component
