"""Compiles the .proto files of this folder: ``make proto``, or run this file.

The result is committed, so only somebody who changes a .proto needs grpcio-tools. Files are compiled under
their full path below ``src``, because that path is their key in protobuf's process-wide descriptor pool.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
SOURCE_ROOT = FOLDER.parents[3]


def main() -> None:
    sources = sorted(str(path.relative_to(SOURCE_ROOT)) for path in FOLDER.glob("*.proto"))
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", "--python_out=.", "--pyi_out=."]
    subprocess.run([*command, *sources], check=True, cwd=SOURCE_ROOT)


if __name__ == "__main__":
    main()
