"""Pictures of the terminal for the documentation: real commands on the demo's cluster, written as SVG.

`make pictures` starts the demo, takes them and ends it. Nothing is drawn by hand: a picture shows only what a
command prints.
"""

from __future__ import annotations

import contextlib
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

FOLDER = Path(__file__).parent
PICTURES = {
    "inspect": "kubectl inspect cgpu -d",
    "top": "gpuslice top --once",
    "explain": "gpuslice explain too-large",
    "nvidia-smi": "kubectl exec idle -- nvidia-smi",
    "doctor": "gpuslice doctor",
}
WIDTH = 110
READY_S = 180.0
_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)  # they would be fetched from elsewhere


def take(name: str, command: str, environ: dict[str, str]) -> None:
    """Run one command on a terminal and write what it printed, with the prompt above it."""
    ours, terminal = pty.openpty()
    with subprocess.Popen(["bash", "-c", command], env=environ, stdout=terminal, stderr=terminal):
        os.close(terminal)
        printed = b""
        with contextlib.suppress(OSError):  # which is how the end of a terminal is told
            while piece := os.read(ours, 1 << 16):
                printed += piece
    os.close(ours)
    console = Console(record=True, width=WIDTH, file=open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    console.print(Text(f"$ {command}", style="bold"))
    console.print(Text.from_ansi(printed.decode().replace("\r", "")), soft_wrap=False)
    svg = console.export_svg(title=command, theme=MONOKAI, unique_id=name)
    (FOLDER / f"{name}.svg").write_text(_FONTS.sub("", svg))


def main() -> None:
    demo = subprocess.Popen(
        [str(Path(sys.executable).parent / "gpuslice"), "demo", "--keep", "--nodes", "2", "--cards", "2"],
        stdout=subprocess.PIPE,
        text=True,
    )
    environ = dict(os.environ, COLUMNS=str(WIDTH), FORCE_COLOR="1")
    try:
        assert demo.stdout is not None
        deadline = time.monotonic() + READY_S
        for line in demo.stdout:
            if found := re.match(r"export (\w+)=(.*)", line.strip()):
                environ[found[1]] = found[2].replace("$PATH", os.environ["PATH"])
            if "export PATH" in line or time.monotonic() > deadline:
                break
        for name, command in PICTURES.items():
            take(name, command, environ)
    finally:
        demo.terminate()
        demo.wait(60)


if __name__ == "__main__":
    main()
