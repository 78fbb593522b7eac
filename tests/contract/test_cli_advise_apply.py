"""``gpuslice advise --apply``: sizes where the author or the namespace consents, by the way of a resize."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.test_cli_cluster import Shell, shell
from tests.contract.test_cli_explain import placed
from tests.contract.test_cli_resize import REQUEST, api
from tests.contract.test_cli_waste import cluster, page

__all__ = ["shell"]
CONSENT = {"gpuslice.io/advice": "apply"}
GRANTED = {"gpuslice.io/memory-granted": '{"main":6}', "gpuslice.io/memory-request": "6"}
PAGE = {"n1": page("n1", {"pod": "a", "units": 6, "used": 300, "idle": 1})}


def large(**annotations: str) -> dict[str, Any]:
    """A pod of two units that was granted six, and needs one."""
    return placed("a", 2, "n1", "0", ALIYUN_COM_GPU_MEM_ASSIGNED="true", **GRANTED, **annotations)


async def test_a_pod_that_consents_is_asked_for_no_less_than_it_was_created_with(shell: Shell) -> None:
    async with cluster(shell, PAGE, large(**CONSENT)):
        told = await shell("gpuslice", "advise", "--apply", "-n", "default")
        assert (told.code, told.out) == (0, "pod/a 6 units -> 2\n"), told.err
        assert api(shell).annotations("a")[REQUEST] == "2"


async def test_a_dry_run_says_the_same_and_changes_nothing(shell: Shell) -> None:
    async with cluster(shell, PAGE, large(**CONSENT)):
        told = await shell("gpuslice", "advise", "--apply", "--dry-run", "-n", "default")
        assert told.out == "pod/a 6 units -> 2\nnothing was changed (--dry-run)\n"
        assert api(shell).annotations("a")[REQUEST] == "6"


@pytest.mark.parametrize(
    ("pod", "namespace", "applies"),
    [
        ({}, {}, False),
        ({}, CONSENT, True),
        ({"gpuslice.io/advice": "never"}, CONSENT, False),
        (CONSENT, {"gpuslice.io/advice": "never"}, True),
    ],
)
async def test_the_pods_word_counts_before_its_namespaces(
    shell: Shell, pod: dict[str, str], namespace: dict[str, str], applies: bool
) -> None:
    async with cluster(shell, PAGE, large(**pod)):
        api(shell).patch("/api/v1/namespaces/default", {"metadata": {"annotations": namespace}})
        told = await shell("gpuslice", "advise", "--apply", "-n", "default")
        assert told.code == 0, told.err
        assert (api(shell).annotations("a")[REQUEST] == "2") is applies
        assert ("left alone" in told.out) is not applies


async def test_who_was_created_too_large_is_told_what_its_template_can_ask_for(shell: Shell) -> None:
    pod = placed("a", 6, "n1", "0", ALIYUN_COM_GPU_MEM_ASSIGNED="true", **CONSENT)
    async with cluster(shell, PAGE, pod):
        told = await shell("gpuslice", "advise", "--apply")
        assert "pod/a keeps the 6 units that it was created with: its template can ask for 1" in told.out
