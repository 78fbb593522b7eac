"""A limit below the card is felt as a smaller card would be; no call waits longer than the driver's own."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from tests.gpu.stage import HERE, Box, Seen, Stage, bare_environment

LIMIT_MIB = 6144
OUT_OF_MEMORY = 2


def _figures(box: Box, story: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(box.run(sys.executable, str(HERE / "order_program.py"), story))
    return found


def _raw(stage: Stage, story: str) -> dict[str, Any]:
    command = [sys.executable, str(HERE / "order_program.py"), story]
    done = subprocess.run(
        command, env=bare_environment(stage.card), capture_output=True, text=True, check=True, timeout=90
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def streams_in_turn(stage: Stage) -> Seen:
    """Pools wait for other streams' blocks before anything is refused, and the caller does not wait."""
    box = stage.box("app", LIMIT_MIB)
    found = _figures(box, "turns")
    assert found["granted"] == 12, f"{found['granted']} of 12 blocks granted"
    assert not found["waited"], f"the calls returned after {found['took_s']:.2f} s, when the work was over"
    return Seen(f"12 of 12 blocks, {found['took_s'] * 1000:.1f} ms for all calls", figures=found)


def refused_at_once(stage: Stage) -> Seen:
    found = _figures(stage.box("app", LIMIT_MIB), "refusal")
    assert found == {"result": OUT_OF_MEMORY, "waited": False}
    return Seen("refused while the stream's work was under way")


def ends_of_contexts(stage: Stage) -> Seen:
    raw, found = (
        _raw(stage, "context_end"),
        _figures(stage.box("app", LIMIT_MIB, 50, lent=True), "context_end"),
    )
    allowed_s = max(1.2 * raw["longest_launch_s"], 0.1)
    assert found["longest_launch_s"] <= allowed_s, (
        f"a launch elsewhere took {found['longest_launch_s']:.2f} s"
    )
    text = f"destroyed in {found['took_s']:.2f} s ({raw['took_s']:.2f} without the library), longest launch "
    return Seen(f"{text}{found['longest_launch_s'] * 1000:.1f} ms", figures={"raw": raw, "limited": found})


def frees_that_wait(stage: Stage) -> Seen:
    raw, found = _raw(stage, "waiting_free"), _figures(stage.box("app", LIMIT_MIB), "waiting_free")
    a_load_s, raw_s = found["took_s"] / found["loaded"], raw["took_s"] / raw["loaded"]
    assert a_load_s <= 1.2 * raw_s + 0.01, f"{a_load_s * 1000:.1f} ms a module, {raw_s * 1000:.1f} without"
    return Seen(
        f"a module took {a_load_s * 1000:.1f} ms beside a free that waited, {raw_s * 1000:.1f} without"
    )
