"""Whatever comes in place of kube-scheduler's question is read as JSON would be, or refused in words."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpuslice.adapters.wire.errors import MalformedError
from gpuslice.adapters.wire.extender import ExtenderArgs, Questions
from gpuslice.adapters.wire.names import name_list
from gpuslice.apps.extender.main import WEB_LIMITS

NAMES = st.lists(st.text(max_size=12), max_size=6)
POD = {"metadata": {"name": "a", "labels": {"x": '"NodeNames":["y"]'}}, "spec": {"containers": []}}
WHOLE = json.dumps({"Pod": POD, "Nodes": None, "NodeNames": ["n1", "n2"]}, separators=(",", ":")).encode()


def names_of(args: ExtenderArgs) -> list[str] | None:
    """Raises `MalformedError`."""
    raw = args.names_json()
    return None if raw is None else name_list(raw)


@given(st.permutations(["Pod", "Nodes", "NodeNames"]), NAMES, st.sampled_from([(",", ":"), (", ", ": ")]))
def test_the_names_are_found_wherever_they_stand(keys: list[str], names: list[str], marks: Any) -> None:
    whole: dict[str, Any] = {"Pod": POD, "Nodes": None, "NodeNames": names}
    body = json.dumps({key: whole[key] for key in keys}, separators=marks).encode()
    args = Questions(WEB_LIMITS).decode(body)
    assert args.pod is not None
    assert (args.pod.metadata.name, names_of(args)) == ("a", names)


@pytest.mark.parametrize("change", [str.lower, str.upper])
def test_outer_keys_are_known_in_any_case(change: Any) -> None:
    body = json.dumps({change(key): value for key, value in json.loads(WHOLE).items()}).encode()
    args = Questions(WEB_LIMITS).decode(body)
    assert args.pod is not None
    assert names_of(args) == ["n1", "n2"]


@pytest.mark.parametrize(
    "metadata",
    [
        {"resourceVersion": "7", "continue": "x", "remainingItemCount": 3},
        {"shardInfo": {"selector": "x"}},
        None,
    ],
    ids=["a page", "a shard", "null"],
)
def test_a_list_of_nodes_as_the_api_server_gives_it_is_read(metadata: Any) -> None:
    """A scheduler may pass on the list it was given; what its metadata says decides nothing."""
    nodes = {"kind": "NodeList", "metadata": metadata, "items": [{"metadata": {"name": "n1"}}]}
    args = Questions(WEB_LIMITS).decode(json.dumps({"Pod": POD, "Nodes": nodes, "NodeNames": None}).encode())
    assert names_of(args) == ["n1"]
    assert args.whole_nodes is not None


@given(st.binary(max_size=30), st.integers(0, len(WHOLE)), st.integers(0, 20))
@example(b'"NodeNames":[', len(WHOLE) - 12, 0)
@example(b"[", len(WHOLE) - 4, 0)
def test_a_damaged_question_is_refused_or_means_what_it_says(junk: bytes, at: int, cut: int) -> None:
    body = WHOLE[:at] + junk + WHOLE[at + cut :]
    try:
        args = Questions(WEB_LIMITS).decode(body)
        pod, names = args.pod, names_of(args)
    except MalformedError:
        return
    said = {
        key.lower(): value for key, value in json.loads(body.decode(errors="replace"), strict=False).items()
    }
    assert (pod is None) == (said.get("pod") is None)
    if said.get("nodenames") is not None:
        assert names == said["nodenames"]


def test_the_second_question_about_a_pod_has_its_own_names_and_another_pod_its_own_all() -> None:
    questions = Questions(WEB_LIMITS)
    for pod, names in (("a", ["n1", "n2"]), ("a", ["n2"]), ("b", ["n2"]), ("a", ["n3"])):
        body = json.dumps({"Pod": {**POD, "metadata": {"name": pod}}, "Nodes": None, "NodeNames": names})
        args = questions.decode(body.replace(", ", ",").replace(": ", ":").encode())
        assert args.pod is not None
        assert (args.pod.metadata.name, names_of(args)) == (pod, names)


def test_after_a_question_that_cannot_be_read_the_next_is_read_as_ever() -> None:
    questions = Questions(WEB_LIMITS)
    for _ in range(2):
        with pytest.raises(MalformedError):
            questions.decode(WHOLE.replace(b'"name":"a"', b'"name":7'))
        assert names_of(questions.decode(WHOLE)) == ["n1", "n2"]


@pytest.mark.parametrize(
    "written",
    [
        '{"Pod":{},"NodeNames":%s}',
        '{"NodeNames":%s,"Pod":{}}',
        '{"pod":{},"nodenames":%s}',
        '{"Pod":{}, "NodeNames": %s }',
        '{"Pod":{},"NodeNames":[],"NodeNames":%s}',
    ],
)
def test_a_question_of_too_many_nodes_is_refused_however_it_is_written(written: str) -> None:
    names = json.dumps([f"n{number}" for number in range(WEB_LIMITS.names + 1)], separators=(",", ":"))
    body = (written % names).encode()
    with pytest.raises(MalformedError, match="more than 100000 names"):
        Questions(WEB_LIMITS).decode(body)


def test_a_question_of_too_many_nodes_or_victims_is_refused_in_its_other_forms() -> None:
    nodes = json.dumps([{"metadata": {"name": f"n{number}"}} for number in range(WEB_LIMITS.names + 1)])
    with pytest.raises(MalformedError, match="Nodes has more than 100000"):
        Questions(WEB_LIMITS).decode(f'{{"Pod":{{}},"Nodes":{{"items":{nodes}}}}}'.encode())
    for key in ("NodeNameToMetaVictims", "NodeNameToVictims", "nodenametometavictims"):
        victims = json.dumps({f"n{number}": {} for number in range(WEB_LIMITS.names + 1)})
        with pytest.raises(MalformedError, match="more than 100000"):
            Questions(WEB_LIMITS).decode_preemption(f'{{"Pod":{{}},"{key}":{victims}}}'.encode())
