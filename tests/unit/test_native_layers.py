"""native/src is in layers: a file includes its own layer and those below it."""

from __future__ import annotations

import re
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[2] / "native" / "src"
LAYERS = ("system", "driver", "accounts", "policy", "hooks", "entry")
UPWARD = {
    ("policy/core.c", "hooks/kernels.h"),
    ("policy/core.c", "hooks/pools.h"),
    ("policy/driver_overhead.c", "hooks/pools.h"),
}
"""What policy still asks of pools and of code that comes with a launch. Nothing may be added."""


def test_every_include_leads_down() -> None:
    files = sorted(SOURCES.rglob("*.[ch]"))
    found = set()
    for path in files:
        layer = path.relative_to(SOURCES).parts[0]
        for name in re.findall(r'#include "(\w+/[\w.]+)"', path.read_text()):
            if LAYERS.index(name.partition("/")[0]) > LAYERS.index(layer):
                found.add((str(path.relative_to(SOURCES)), name))
    assert found == UPWARD
    assert len(files) > 40
    assert {path.relative_to(SOURCES).parts[0] for path in files} == set(LAYERS)
