"""A short run of `make chaos`, and that its checker sees what it is there to see."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.builders import api_pod
from tests.chaos import parsers
from tests.chaos.checker import (
    ALLOCATION,
    ASSIGNED,
    Breach,
    CardSize,
    Checker,
    NodeFiles,
    Wrong,
    asked_units,
)
from tests.chaos.faults import FAULTS
from tests.chaos.fleets import Ask
from tests.chaos.story import Story, play

CARDS = {("n1", 0): CardSize("GPU-n1-0", 4, 4866)}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    subprocess.run(["rm", "-rf", tmp_path / "world"], check=True)  # deeper than pytest can remove


@pytest.mark.parametrize("fleet", ["odd sizes", "several containers", "priorities"])
def test_a_short_story_of_faults_ends_well(folder: Path, fleet: str) -> None:
    told = play(folder / "world", seed=7, faults=200, fleet=fleet)
    assert told.faults.total() == 200
    assert told.binds > 5
    assert told.faults.keys() <= FAULTS.keys()


def test_the_same_seed_is_the_same_story(folder: Path) -> None:
    """To the last message: what cannot be played again cannot be explained."""
    trails = []
    for name in ("first", "again"):
        story = Story(folder / "world" / name, seed=11, faults=120)
        story.play()
        trails.append(story.world.network.trail.hexdigest())
    assert trails[0] == trails[1]


def test_parsers_answer_or_refuse_in_a_sentence() -> None:
    assert parsers.feed(seed=3, inputs=1500).total() == 1500


# -- the checker ---------------------------------------------------------------------------------------

STALE = Wrong("a ledger that says otherwise", "extender-a")


def checked(
    *pods: dict[str, Any],
    running: dict[tuple[str, str], frozenset[str]] | None = None,
    moved: frozenset[str] = frozenset(),
    folder: Path,
) -> set[Wrong]:
    nothing = b'{"Data": {"PodDeviceEntries": null}}'
    return Checker(CARDS).check(pods, {"n1": NodeFiles(nothing, folder, running or {})}, moved)


def bound(name: str, units: int) -> dict[str, Any]:
    annotations = {ALLOCATION: f'{{"0":{{"0":{units}}}}}', ASSIGNED: "true"}
    return api_pod(name, str(units), node="n1", annotations=annotations)


def test_a_card_promised_twice_is_a_breach(tmp_path: Path) -> None:
    assert checked(bound("a", 2), bound("b", 2), folder=tmp_path) == set()
    with pytest.raises(Breach, match="promised 1 units beyond its 4"):
        checked(bound("a", 2), bound("b", 3), folder=tmp_path)


def test_a_card_promised_twice_since_kubelet_chose_otherwise_is_wrong_and_must_end(tmp_path: Path) -> None:
    found = checked(bound("a", 2), bound("b", 3), moved=frozenset({"uid-a"}), folder=tmp_path)
    assert found == {Wrong("card promised beyond its units", uid) for uid in ("uid-a", "uid-b")}


def test_a_pod_that_waits_though_it_fits_is_wrong(tmp_path: Path) -> None:
    waits = api_pod("b", "2")
    assert checked(bound("a", 3), waits, folder=tmp_path) == set()
    assert checked(bound("a", 2), waits, folder=tmp_path) == {Wrong("waits though it fits", "uid-b")}


def test_a_pod_that_waits_behind_less_important_ones_is_wrong(tmp_path: Path) -> None:
    waits = api_pod("b", "2", priority=10)
    assert checked(bound("a", 3), waits, folder=tmp_path) == {
        Wrong("waits behind less important pods", "uid-b")
    }
    equal = bound("a", 3)
    equal["spec"]["priority"] = 10
    assert checked(equal, waits, folder=tmp_path) == set()


def test_a_pod_asks_for_what_its_containers_hold_at_most_at_one_time() -> None:
    pod = api_pod("p", **Ask((2, 1), init=5, sidecar=1).fields())
    assert asked_units(pod) == 5  # before the sidecar
    pod["spec"]["initContainers"].reverse()
    assert asked_units(pod) == 6  # beside it
    pod["spec"]["initContainers"].pop()
    assert asked_units(pod) == 4


@pytest.mark.parametrize(
    ("known", "found"),
    [([("a", 2)], set()), ([], {STALE}), ([("a", 1)], {STALE}), ([("a", 2), ("gone", 1)], {STALE})],
)
def test_a_ledger_that_knows_other_pods_is_wrong(known: list[tuple[str, int]], found: set[Wrong]) -> None:
    """A pod that waits may be held a place: that is the extender's own business."""
    shares = [{"name": name, "usedGPU": units} for name, units in [*known, ("waits", 1)]]
    answer = {"nodes": [{"name": "n1", "devs": [{"id": 0, "pods": shares}]}]}
    pods = [bound("a", 2), api_pod("waits", "1")]
    assert Checker(CARDS).check_ledgers(pods, {"extender-a": answer}) == found


def test_a_container_without_its_limits_is_a_breach(tmp_path: Path) -> None:
    with pytest.raises(Breach, match="runs with limits"):
        checked(bound("a", 1), running={("uid-a", "main"): frozenset({"GPU-n1-0-_-0"})}, folder=tmp_path)
