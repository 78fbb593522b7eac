"""Whatever happens to pods, a watch from any moment leads to the same state as a list."""

from __future__ import annotations

import json
from typing import Any

from cluster_wire import PODS, Wire, lines, make_pod
from hypothesis import given, settings
from hypothesis import strategies as st

_NAMES = st.sampled_from(["a", "b", "c"])
_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("create"), _NAMES),
        st.tuples(st.just("delete"), _NAMES),
        st.tuples(st.just("label"), _NAMES, st.sampled_from(["x", "y"])),
        st.tuples(st.just("bind"), _NAMES),
        st.tuples(st.just("finish"), _NAMES),
    ),
    max_size=25,
)


def _do(wire: Wire, step: tuple[str, ...]) -> None:
    path = f"{PODS}/{step[1]}"
    match step[0]:
        case "create":
            wire.call("POST", PODS, make_pod(step[1]))
        case "delete":
            wire.call("DELETE", path)
        case "label":
            wire.patch(path, {"metadata": {"labels": {"l": step[2]}}})
        case "bind":
            wire.call("POST", f"{path}/binding", {"target": {"name": "n"}})
        case "finish":
            wire.call("DELETE", path, {"gracePeriodSeconds": 0})


def _state(wire: Wire, **query: str) -> dict[str, str]:
    items = wire.get(PODS, **query)["items"]
    return {item["metadata"]["uid"]: item["metadata"]["resourceVersion"] for item in items}


def _replay(state: dict[str, str], events: list[Any]) -> dict[str, str]:
    for event in events:
        metadata = event["object"]["metadata"]
        match event["type"]:
            case "ADDED":
                assert metadata["uid"] not in state
                state[metadata["uid"]] = metadata["resourceVersion"]
            case "MODIFIED":
                assert int(state[metadata["uid"]]) < int(metadata["resourceVersion"])
                state[metadata["uid"]] = metadata["resourceVersion"]
            case "DELETED":
                del state[metadata["uid"]]
    return state


@settings(max_examples=60, deadline=None)
@given(before=_STEPS, after=_STEPS, selector=st.sampled_from(["", "l=x", "!l"]))
def test_a_list_and_a_watch_from_it_lead_to_the_present(
    before: list[tuple[str, ...]], after: list[tuple[str, ...]], selector: str
) -> None:
    wire = Wire()
    for step in before:
        _do(wire, step)
    version = wire.get(PODS)["metadata"]["resourceVersion"]
    state = _state(wire, labelSelector=selector)
    live = wire.watch(PODS, resourceVersion=version, labelSelector=selector)
    for step in after:
        _do(wire, step)
    late = wire.watch(PODS, resourceVersion=version, labelSelector=selector)
    past = _state(wire, labelSelector=selector, resourceVersion=version, resourceVersionMatch="Exact")
    events = lines(live)
    assert past == state
    assert json.dumps(lines(late)) == json.dumps(events)
    assert _replay(state, events) == _state(wire, labelSelector=selector)
