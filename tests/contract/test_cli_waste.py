"""``gpuslice waste``, and what `explain` and `doctor` say of those who hold too much and use too much."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gpuslice.core.contract import NODE_TIER
from gpuslice.core.units import limit_mib
from tests.builders import api_pod, make_card
from tests.contract.test_cli_cluster import Shell, shell
from tests.contract.test_cli_explain import node, placed
from tests.integration.console_rig import exporters

__all__ = ["shell"]
MIB = 1 << 20
NOW_S = 1_700_000_000
CARD_MIB = make_card(0, 8).memory_mib


def page(on: str, *containers: dict[str, Any], limited: bool = True) -> str:
    """An exporter's page: `units`, `used` and `peak` in MiB, `idle` in seconds, of containers on card 0."""
    card = f'node="{on}",gpu="0",gpu_uuid="GPU-{on}-0"'
    lines = [f"gpuslice_gpu_up{{{card}}} 1", f'gpuslice_exporter_time_seconds{{node="{on}"}} {NOW_S}']
    for each in containers:
        whose = f'{card},namespace="default",pod="{each["pod"]}",container="main"'
        owner = f'{whose},workload_kind="Deployment",workload="{each["pod"]}s"'
        held = limit_mib(CARD_MIB, each["units"], 8) * MIB
        figures = {
            "memory_used_bytes": each["used"] * MIB,
            "memory_allocated_bytes": held,
            "memory_limit_bytes": held if limited else None,
            "memory_peak_bytes": each.get("peak", each["used"]) * MIB,
            "last_active_timestamp_seconds": NOW_S - each["idle"] if "idle" in each else None,
        }
        lines.append(f"gpuslice_container_info{{{owner}}} 1")
        lines += [
            f"gpuslice_container_{name}{{{whose}}} {value}"
            for name, value in figures.items()
            if value is not None
        ]
    return "\n".join(lines) + "\n"


@asynccontextmanager
async def cluster(shell: Shell, pages: dict[str, str], *pods: dict[str, Any]) -> AsyncIterator[None]:
    """Nodes n1 and n2 with a card of 8 units each, `pages` by node."""
    async with exporters(pages) as found:
        await shell.has([node("n1", 8), node("n2", 8)], [*pods, *found])
        yield


async def test_who_never_touched_its_card_is_the_first_of_the_list(shell: Shell) -> None:
    pods = [placed(name, units, "n1", "0") for name, units in (("busy", 3), ("never", 4))]
    pods += [placed("idle", 7, "n2", "0"), api_pod("waits", "5")]
    pages = {
        "n1": page(
            "n1",
            {"pod": "busy", "units": 3, "used": 3000, "idle": 1},
            {"pod": "never", "units": 4, "used": 0, "idle": 7200},
        ),
        "n2": page("n2", {"pod": "idle", "units": 7, "used": 6000, "idle": 11000}),
    }
    async with cluster(shell, pages, *pods):
        found = json.loads((await shell("gpuslice", "waste", "-o", "json")).out)
        assert [each["pod"] for each in found["pods"]] == ["never", "idle", "busy"]
        never, idle, _ = found["pods"]
        held = limit_mib(CARD_MIB, 4, 8)
        assert [never[f"{name}MiB"] for name in ("used", "peak", "held", "wasted")] == [0, 0, held, held]
        assert (idle["idleSeconds"], idle["owner"]) == (11000, "Deployment/idles")
        assert idle["wantedBy"] == ["default/waits"]
        assert never["wantedBy"] == ["default/waits"]  # five units, with the one that is free
        assert found["heldMiB"] - found["usedMiB"] == found["wastedMiB"]
        told = (await shell("gpuslice", "waste", "--sort", "idle")).out.splitlines()
        assert [line.split()[1] for line in told[1:4]] == ["idle", "never", "busy"]
        assert "3 h 3 min" in told[1]
        assert (await shell("gpuslice", "waste", "--no-headers")).out.count("\n") == 3
        assert (await shell("gpuslice", "waste", "-o", "name")).out == "pod/never\npod/idle\npod/busy\n"


async def test_nobody_is_asked_to_make_room_for_a_pod_that_fits_elsewhere(shell: Shell) -> None:
    pods = [placed("idle", 7, "n1", "0"), placed("small", 3, "n2", "0"), api_pod("waits", "5")]
    pages = {"n1": page("n1", {"pod": "idle", "units": 7, "used": 0, "idle": 7200})}
    async with cluster(shell, pages, *pods):
        found = json.loads((await shell("gpuslice", "waste", "-o", "json")).out)
        assert [each.get("wantedBy") for each in found["pods"]] == [None, None]


async def test_a_waiting_pod_is_told_who_could_make_room(shell: Shell) -> None:
    pods = [placed("never", 7, "n1", "0"), placed("busy", 7, "n2", "0"), api_pod("waits", "5")]
    pages = {
        "n1": page("n1", {"pod": "never", "units": 7, "used": 0, "idle": 10800}),
        "n2": page("n2", {"pod": "busy", "units": 7, "used": 7000, "idle": 0}),
    }
    async with cluster(shell, pages, *pods):
        told = (await shell("gpuslice", "explain", "waits")).out
        held = limit_mib(CARD_MIB, 7, 8)
        assert f"default/never holds {held} MiB of GPU 0 on n1 and has used none of it, for 3 h" in told
        assert "default/busy" not in told
        told = (await shell("gpuslice", "explain", "never")).out
        assert "idle for 3 h" in told


async def test_use_is_held_against_the_request_where_nothing_limits_it(shell: Shell) -> None:
    over = 7787 - limit_mib(CARD_MIB, 4, 8)
    failed = placed("victim", 4, "n1", "0")
    failed["status"] = {"phase": "Failed", "reason": "Error"}
    pods = [placed("hog", 4, "n1", "0"), failed, placed("good", 4, "n2", "0")]
    pages = {
        "n1": page("n1", {"pod": "hog", "units": 4, "used": 7787}, limited=False),
        "n2": page("n2", {"pod": "good", "units": 4, "used": 4500}, limited=False),  # what drivers load
    }
    async with cluster(shell, pages, *pods):
        told = (await shell("gpuslice", "explain", "hog")).out
        assert f"uses 7787 MiB, {over} more than it asked for: nothing limits it on this node" in told
        told = (await shell("gpuslice", "explain", "victim")).out
        assert f"default/hog on its card uses {over} MiB more than it asked for" in told
        assert "more than it asked for" not in (await shell("gpuslice", "explain", "good")).out
        told = (await shell("gpuslice", "top", "--once")).out
        assert "7.6G/4.4G" in told
        assert "174%" in told
        told = (await shell("gpuslice", "doctor")).out
        what = f"container main uses 7787 MiB of GPU 0 on n1 and asked for {7787 - over}"
        assert "pod default/hog\n" in told
        assert what in told
        assert told.count("and asked for") == 1


async def test_a_container_that_has_not_started_is_not_said_to_be_without_limit(shell: Shell) -> None:
    pulling = page("n1", {"pod": "pulling", "units": 4, "used": 0}, limited=False)
    isolating = node("n1", 8)
    isolating["metadata"]["annotations"][NODE_TIER] = "library"
    async with exporters({"n1": pulling}) as found:
        await shell.has([isolating], [placed("pulling", 4, "n1", "0"), *found])
        told = (await shell("gpuslice", "explain", "pulling")).out
        assert "enforced for main by the library" in told
        assert "it asked for" in told
        assert "nothing limits it" not in told


async def test_programs_are_told_all_of_what_is_not_known(shell: Shell) -> None:
    silent = {f"n{number}": "" for number in range(1, 12)}
    async with exporters(silent) as found:
        for each in found:
            each["metadata"]["annotations"]["prometheus.io/port"] = "1"  # where nobody listens
        await shell.has([node(name, 8) for name in silent], found)
        printed = await shell("gpuslice", "waste", "-o", "json")
        assert len(json.loads(printed.out)["problems"]) == len(silent)
        assert printed.err.count("Warning: ") < len(silent)


@pytest.mark.parametrize("limited", [True, False])
async def test_a_program_past_its_limit_is_found_too(shell: Shell, limited: bool) -> None:
    pages = {"n1": page("n1", {"pod": "hog", "units": 1, "used": 5970}, limited=limited)}
    async with cluster(shell, pages, placed("hog", 1, "n1", "0")):
        told = await shell("gpuslice", "doctor")
        assert "uses 5970 MiB" in told.out
        assert told.code == 3
