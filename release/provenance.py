"""From what a release was made and how: an in-toto statement with SLSA's provenance v1.

Source: slsa.dev/spec/v1.0/provenance, in-toto attestation statement v1.
"""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def provenance(
    made: Iterable[Path],
    root: Path,
    *,
    bases: Mapping[str, Path],
    parameters: Mapping[str, Any],
    builder: str,
    created: str,
) -> dict[str, Any]:
    """The statement about the files in `made`. `bases`: what images stand on, by architecture.

    A base that is a folder has no digest: its bytes are those of the image's lowest layer.
    """

    def git(*words: str) -> str:
        command = ["git", "-C", str(root), *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    lock = root / "requirements.lock"
    inputs: list[dict[str, Any]] = [
        {"name": "source", "digest": {"gitCommit": git("rev-parse", "HEAD")}},
        {"name": lock.name, "digest": {"sha256": sha256_of(lock)}},
    ]
    for architecture, base in bases.items():
        digest = {"digest": {"sha256": sha256_of(base)}} if base.is_file() else {}
        inputs.append({"name": f"base for {architecture}: {base.name}", **digest})
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": path.name, "digest": {"sha256": sha256_of(path)}} for path in made],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "urn:gpuslice:release/build.py",
                "externalParameters": dict(parameters),
                "internalParameters": {"uncommittedChanges": bool(git("status", "--porcelain"))},
                "resolvedDependencies": inputs,
            },
            "runDetails": {"builder": {"id": builder}, "metadata": {"startedOn": created}},
        },
    }
