"""``gpuslice park`` and ``gpuslice wake``: the test acts for the agent."""

from __future__ import annotations

import asyncio

import pytest

from tests.contract.test_cli_cluster import Shell, shell
from tests.contract.test_cli_explain import node
from tests.contract.test_cli_resize import annotated, api, running
from tests.integration.extender_rig import until

__all__ = ["shell"]

ORDER, PARKED = "gpuslice.io/park", "gpuslice.io/parked"
PATH = "/api/v1/namespaces/default/pods/a"


def agent_says(shell: Shell, parked: str | None) -> None:
    api(shell).patch(PATH, {"metadata": {"annotations": {ORDER: None, PARKED: parked}}})


@pytest.mark.parametrize("order", ["park", "wake"])
async def test_the_order_is_an_annotation(shell: Shell, order: str) -> None:
    await shell.has([node("n1", 15)], [running("a", 4)])
    told = await shell("gpuslice", order, "a")
    assert (told.code, told.out) == (0, "pod/a ordered\n"), told.err
    assert annotated(shell)[ORDER] == order


@pytest.mark.parametrize(
    ("order", "parked", "said", "code"),
    [
        ("park", '{"main":{"GPU-1":1048576}}', "pod/a parked\n", 0),
        ("park", None, "kubectl events --for pod/a says why", 1),
        ("wake", None, "pod/a on its card\n", 0),
    ],
)
async def test_it_waits_for_what_the_agent_did(
    shell: Shell, order: str, parked: str | None, said: str, code: int
) -> None:
    await shell.has([node("n1", 15)], [running("a", 4)])
    asked = asyncio.create_task(shell("gpuslice", order, "a", "--wait"))
    await until(lambda: annotated(shell).get(ORDER) == order)
    agent_says(shell, parked)
    told = await asked
    assert told.code == code
    assert said in told.out + told.err


async def test_an_agent_that_does_not_answer_is_no_success(shell: Shell) -> None:
    await shell.has([node("n1", 15)], [running("a", 4)])
    told = await shell("gpuslice", "park", "a", "--wait", "--timeout", "0.1")
    assert told.code == 1
    assert "has not answered yet" in told.err


async def test_what_has_no_part_of_a_card_cannot_be_parked(shell: Shell) -> None:
    plain = running("a", 4)
    plain["spec"]["containers"][0]["resources"] = {}
    await shell.has([node("n1", 15)], [plain])
    told = await shell("gpuslice", "park", "a")
    assert told.code == 1
    assert "asks for no part of a card" in told.err
