"""Dividing a card among its containers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpuslice.core.attribution import ContainerKey, Owner, ProcessReading, Stranger, Usage, divide

CARD = "GPU-a"
A = ContainerKey("default", "app-3g-v1-0", "app")
B = ContainerKey("default", "app-3g-v1-1", "app")
owners = st.sampled_from([A, B, Stranger.HOST, Stranger.UNKNOWN_CONTAINER])
readings = st.lists(
    st.builds(
        ProcessReading,
        pid=st.integers(1, 30),
        uuid=st.sampled_from([CARD, "GPU-b"]),
        memory_bytes=st.none() | st.integers(0, 1 << 34),
        sm_ratio=st.none() | st.floats(0, 1),
    )
)


def test_two_apps_on_one_card_have_their_own_figures() -> None:
    processes = [ProcessReading(1, CARD, 3193, 0.2), ProcessReading(2, CARD, 3193, None)]
    card = divide(CARD, 6396, processes, {1: A, 2: B})
    assert card.owners == {A: Usage(3193, 0.2, 1), B: Usage(3193, None, 1)}
    assert card.strangers == {Stranger.DRIVER: Usage(10, None, 0)}


@given(readings, st.dictionaries(st.integers(1, 30), owners), st.integers(0, 1 << 40))
def test_containers_and_the_rest_add_up_to_the_card(
    processes: list[ProcessReading], owner_of: dict[int, Owner], used: int
) -> None:
    card = divide(CARD, used, processes, owner_of)
    parts = [usage.memory_bytes for usage in (*card.owners.values(), *card.strangers.values())]
    assert sum(part for part in parts if part is not None) == used
    held = [process for process in processes if process.uuid == CARD]
    counted = [usage.processes for usage in (*card.owners.values(), *card.strangers.values())]
    assert sum(counted) == len(held)


def test_an_allocated_idle_container_uses_nothing() -> None:
    assert divide(CARD, 10, [], {}, [A]).owners == {A: Usage(0, 0.0, 0)}


def test_a_process_that_the_driver_says_nothing_of_makes_its_container_unknown() -> None:
    processes = [ProcessReading(1, CARD, 100), ProcessReading(2, CARD, None)]
    card = divide(CARD, 300, processes, {1: A, 2: A})
    assert card.owners[A].memory_bytes is None
    assert card.strangers == {Stranger.UNKNOWN: Usage(300, None, 0)}


def test_a_process_that_left_is_gone_not_lost() -> None:
    card = divide(CARD, 110, [ProcessReading(7, CARD, 100)], {})
    assert card.strangers[Stranger.GONE] == Usage(100, None, 1)
