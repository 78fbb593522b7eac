"""The contract written and read: annotations of pods and nodes, the ConfigMap of unhealthy cards."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuslice.core.annotations import (
    LARGEST_BYTES,
    MOST_CARDS,
    PLACEMENT_ANNOTATIONS,
    check_room,
    decode_assume_time,
    decode_cards,
    decode_orphans,
    decode_placement,
    decode_unhealthy,
    encode_cards,
    encode_orphans,
    encode_tiers,
    placement_annotations,
)
from gpuslice.core.contract import (
    ANN_ALLOCATION,
    ANN_ASSIGNED,
    ANN_ASSUME_TIME,
    ANN_CARD_UNITS,
    ANN_CORE,
    ANN_GRANTED,
    ANN_INDEX,
    ANN_MEANT,
    ANN_POD_UNITS,
    ANN_TIERS,
    ANN_TRACEPARENT,
    ANN_VISIBLE,
    NODE_ORPHANS,
)
from gpuslice.core.errors import ContractError, InvalidRequestError
from gpuslice.core.model import (
    Card,
    CardSlice,
    ContainerKind,
    ContainerRequest,
    Node,
    Orphan,
    Placement,
    Request,
    Tier,
)
from gpuslice.core.resize import encode_granted, with_amounts
from gpuslice.core.units import MOST_UNITS
from tests.builders import make_card, make_node, make_placement, make_request


def test_a_placement_is_written_in_both_protocols() -> None:
    node = make_node(cards=(15, 14))
    written = placement_annotations(make_placement("n1", 4, 1), make_request(4), node, 1700000000123456789)
    assert written == {
        ANN_INDEX: "1",
        ANN_POD_UNITS: "4",
        ANN_CARD_UNITS: "14",
        ANN_ASSUME_TIME: "1700000000123456789",
        ANN_ASSIGNED: "false",
        ANN_ALLOCATION: '{"0":{"1":4}}',
        ANN_VISIBLE: "GPU-n1-1",
    }
    assert set(written) <= set(PLACEMENT_ANNOTATIONS)


@given(st.integers(1, 40), st.integers(1, MOST_CARDS), st.booleans())
def test_what_a_pod_is_given_fits_beside_its_own(containers: int, cards: int, compute: bool) -> None:
    """With cards of the longest names, each container's tier, a trace and the cards it is moved to."""
    percent = 5 if compute and cards == 1 else 0
    names = [f"{index:063}" for index in range(containers)]
    asking = tuple(ContainerRequest(name, index, 20_000 * cards, percent) for index, name in enumerate(names))
    request = Request(20_000 * containers * cards, cards, percent * containers, asking, containers)
    node = Node("n1", tuple(Card(index, f"GPU-{index:036}", 81920, MOST_UNITS) for index in range(cards)))
    where = Placement("n1", tuple(CardSlice(index, 20_000 * containers, percent) for index in range(cards)))
    given = placement_annotations(where, request, node, 10**18)
    tiers = dict.fromkeys(names, Tier.WATCHDOG)
    grown = with_amounts(request, dict.fromkeys(names, MOST_UNITS))
    given[ANN_GRANTED] = str(encode_granted(grown))
    given |= {ANN_MEANT: given[ANN_INDEX], ANN_TIERS: str(encode_tiers(tiers)), ANN_TRACEPARENT: "0" * 55}
    size = sum(len(name) + len(value) for name, value in given.items())
    fits = {"a": "x" * (LARGEST_BYTES - size - 1)}
    with pytest.raises(InvalidRequestError, match="must be at most"):
        check_room({"a": fits["a"] + "x"}, request)
    check_room({"a": "x" * 100_000, **given}, request)


@pytest.mark.parametrize(
    ("text", "times", "fits"),
    [
        ("x", 260_000, True),
        ("x", 262_000, False),
        ("ü", 130_000, True),
        ("ü", 131_000, False),
        ("卡", 87_300, False),
    ],
)
def test_annotations_are_counted_in_bytes(text: str, times: int, fits: bool) -> None:
    own = {"a": text * times}
    with contextlib.nullcontext() if fits else pytest.raises(InvalidRequestError, match="size in bytes"):
        check_room(own, make_request(4))


def test_several_cards_show_the_same_amount_on_each() -> None:
    node = make_node(cards=(15, 15, 15, 15))
    written = placement_annotations(make_placement("n1", 8, 0, 1, 2, 3), make_request(8, cards=4), node, 1)
    assert written[ANN_INDEX] == "0,1,2,3"
    assert written[ANN_ALLOCATION] == '{"0":{"0":2,"1":2,"2":2,"3":2}}'


def test_a_share_of_compute_is_written_per_container_and_card() -> None:
    written = placement_annotations(
        make_placement("n1", 4, 0, core=20), make_request(4, core=20), make_node(), 1
    )
    assert written[ANN_CORE] == '{"0":{"0":20}}'


def test_init_containers_come_after_the_app_containers_in_the_allocation() -> None:
    containers = (
        ContainerRequest("warm-up", 0, 9, kind=ContainerKind.INIT),
        ContainerRequest("proxy", 1, 1, kind=ContainerKind.SIDECAR),
        ContainerRequest("a", 0, 2),
        ContainerRequest("b", 2, 3),
    )
    request = Request(9, containers=containers, app_containers=3)
    written = placement_annotations(make_placement("n1", 9, 0), request, make_node(), 1)
    assert written[ANN_ALLOCATION] == '{"4":{"0":1},"0":{"0":2},"2":{"0":3},"3":{"0":3}}'


@pytest.mark.parametrize(
    ("annotations", "placement"),
    [
        ({}, None),
        ({"other": "x"}, None),
        ({ANN_INDEX: "0", ANN_POD_UNITS: "4"}, make_placement("n1", 4, 0)),
        ({ANN_INDEX: "2,0", ANN_POD_UNITS: "4"}, make_placement("n1", 4, 0, 2)),
        (
            {ANN_INDEX: "0,1", ANN_POD_UNITS: "5", ANN_ALLOCATION: '{"0":{"0":2},"1":{"1":3}}'},
            Placement("n1", (CardSlice(0, 2), CardSlice(1, 3))),
        ),
        ({ANN_INDEX: "0", ANN_POD_UNITS: "5", ANN_ALLOCATION: '{"0":{"1":4}}'}, make_placement("n1", 5, 0)),
        ({ANN_INDEX: "0", ANN_POD_UNITS: "5", ANN_ALLOCATION: "garbage"}, make_placement("n1", 5, 0)),
        ({ANN_ALLOCATION: '{"0":{"1":4}}'}, make_placement("n1", 4, 1)),
        ({ANN_INDEX: "127", ANN_POD_UNITS: "999999999"}, make_placement("n1", 999_999_999, 127)),
        ({ANN_ALLOCATION: '{"0":{"0":4},"1":{"0":0}}'}, make_placement("n1", 4, 0)),
        ({ANN_ALLOCATION: "{}"}, None),
        ({ANN_ALLOCATION: ""}, None),
    ],
)
def test_a_placement_is_read_from_either_protocol(
    annotations: dict[str, str], placement: Placement | None
) -> None:
    assert decode_placement(annotations, "n1") == placement


@pytest.mark.parametrize(
    "said",
    [
        {ANN_INDEX: "1"},
        {ANN_INDEX: "1", ANN_POD_UNITS: "3"},
        {ANN_INDEX: "1", ANN_POD_UNITS: "999999999"},
        {ANN_INDEX: "1", ANN_POD_UNITS: "1", ANN_ALLOCATION: '{"0":{"1":1}}'},
        {ANN_ALLOCATION: '{"0":{"1":1}}'},
    ],
)
def test_the_request_says_the_amount_whatever_annotations_do(said: dict[str, str]) -> None:
    """Nobody gets more than its request, and nobody's card is free for what an annotation plays down."""
    assert decode_placement(said, "n1", make_request(4)) == make_placement("n1", 4, 1)


@pytest.mark.parametrize("core", [None, "", "x", '{"0":{"1":5}}', '{"0":{"1":100}}', '{"0":{"0":20}}'])
def test_the_request_says_the_share_of_compute_too(core: str | None) -> None:
    """Whoever may change a pod's annotations makes no room beside it, and takes none."""
    said = {ANN_INDEX: "1"} if core is None else {ANN_INDEX: "1", ANN_CORE: core}
    assert decode_placement(said, "n1", make_request(4, core=20)) == make_placement("n1", 4, 1, core=20)


def test_an_amount_that_is_missing_is_told_so_and_not_shown_as_empty() -> None:
    with pytest.raises(ContractError, match='is "absent", must be a whole number of units'):
        decode_placement({ANN_INDEX: "0"}, "n1")
    with pytest.raises(ContractError, match=r'is "4\.5", must be a whole number of units'):
        decode_placement({ANN_INDEX: "0", ANN_POD_UNITS: "4.5"}, "n1")


def test_containers_without_a_share_of_compute_are_not_in_its_annotation() -> None:
    containers = (ContainerRequest("a", 0, 4, 20), ContainerRequest("b", 1, 2))
    request = Request(6, compute_percent=20, containers=containers, app_containers=2)
    written = placement_annotations(make_placement("n1", 6, 0, core=20), request, make_node(), 1)
    assert written[ANN_CORE] == '{"0":{"0":20}}'


@pytest.mark.parametrize(
    ("text", "time_ns"),
    [
        ("1750000000123456789", 1750000000123456789),
        ("0", 0),
        ("9" * 19, int("9" * 19)),
        ("9" * 20, 0),
        ("-1", 0),
        ("1.5", 0),
        ("٤", 0),
        ("", 0),
    ],
)
def test_a_time_that_cannot_be_read_is_none(text: str, time_ns: int) -> None:
    assert decode_assume_time({ANN_ASSUME_TIME: text}) == time_ns
    assert decode_assume_time({}) == 0


@pytest.mark.parametrize(
    ("annotations", "named"),
    [
        ({ANN_INDEX: "", ANN_POD_UNITS: "4"}, ANN_INDEX),
        ({ANN_INDEX: "-1", ANN_POD_UNITS: "4"}, ANN_INDEX),
        ({ANN_INDEX: "abc", ANN_POD_UNITS: "4"}, ANN_INDEX),
        ({ANN_INDEX: "0,0", ANN_POD_UNITS: "4"}, ANN_INDEX),
        ({ANN_INDEX: "0,00", ANN_POD_UNITS: "4"}, ANN_INDEX),
        ({ANN_INDEX: "128", ANN_POD_UNITS: "4"}, ANN_INDEX),
        ({ANN_INDEX: "00001", ANN_POD_UNITS: "4"}, ANN_INDEX),
        ({ANN_INDEX: "99999999999", ANN_POD_UNITS: "4"}, ANN_INDEX),
        ({ANN_INDEX: "٤", ANN_POD_UNITS: "4"}, ANN_INDEX),
        ({ANN_INDEX: "0", ANN_POD_UNITS: "1000000000"}, ANN_POD_UNITS),
        ({ANN_INDEX: "0", ANN_POD_UNITS: ""}, ANN_POD_UNITS),
        ({ANN_INDEX: "0"}, ANN_POD_UNITS),
        ({ANN_INDEX: "0", ANN_POD_UNITS: "-4"}, ANN_POD_UNITS),
        ({ANN_INDEX: "0", ANN_POD_UNITS: "٤"}, ANN_POD_UNITS),
        ({ANN_INDEX: "0,1", ANN_POD_UNITS: "5"}, ANN_POD_UNITS),
        ({ANN_ALLOCATION: "[1]"}, ANN_ALLOCATION),
        ({ANN_ALLOCATION: '{"0":{"x":4}}'}, ANN_ALLOCATION),
        ({ANN_ALLOCATION: '{"0":{"0":-4}}'}, ANN_ALLOCATION),
        ({ANN_INDEX: "0", ANN_POD_UNITS: "4", ANN_CORE: "x"}, ANN_CORE),
    ],
)
def test_a_corrupt_annotation_is_named(annotations: dict[str, str], named: str) -> None:
    with pytest.raises(ContractError, match=f'annotation "{named}"'):
        decode_placement(annotations, "n1")


@given(st.dictionaries(st.sampled_from(PLACEMENT_ANNOTATIONS), st.text(max_size=40)))
def test_whatever_the_annotations_hold_only_a_contract_error_comes_of_it(annotations: dict[str, str]) -> None:
    with contextlib.suppress(ContractError):
        decode_placement(annotations, "n1")
    assert decode_assume_time(annotations) >= 0


@given(
    st.lists(st.integers(0, 15), min_size=1, max_size=8, unique=True),
    st.integers(1, 80),
    st.sampled_from([0, 5, 100]),
)
def test_what_is_written_is_read_back(cards: list[int], each: int, core: int) -> None:
    core = core if len(cards) == 1 else 0
    request = make_request(each * len(cards), cards=len(cards), core=core)
    placement = make_placement("n1", request.units, *sorted(cards), core=core)
    node = make_node(cards=[80] * 16)
    assert decode_placement(placement_annotations(placement, request, node, 7), "n1") == placement


def test_the_cards_of_a_node_are_read_back_in_index_order() -> None:
    """Also one too small for a unit: it is there, and nothing fits on it."""
    cards = (make_card(2, 14, model="Tesla T4"), make_card(0, 15), make_card(1, 0))
    assert decode_cards(encode_cards(cards)) == (cards[1], cards[2], cards[0])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1]",
        '{"index":0}',
        '[{"index":0,"uuid":"a","memory_mib":1}]',
        '[{"index":-1,"uuid":"a","memory_mib":1,"units":1}]',
        '[{"index":0,"uuid":"a","memory_mib":1,"units":-1}]',
        '[{"index":0,"uuid":"a","memory_mib":1,"units":1},{"index":0,"uuid":"b","memory_mib":1,"units":1}]',
        pytest.param('[{"x":' + "[" * 100_000 + "]" * 100_000 + "}]", id="deep"),
    ],
)
def test_a_corrupt_list_of_cards_is_named(text: str) -> None:
    with pytest.raises(ContractError, match=r'annotation "gpuslice\.io/gpus"'):
        decode_cards(text)


@pytest.mark.parametrize(
    ("data", "cards", "problem"),
    [
        (None, set(), ""),
        ({}, set(), ""),
        ({"gpus": ""}, set(), ""),
        ({"gpus": "1"}, {1}, ""),
        ({"gpus": "0, 2"}, {0, 2}, ""),
        ({"gpus": "garbage"}, set(), 'data.gpus has "garbage"'),
        ({"gpus": "-1,3"}, {3}, 'data.gpus has "-1"'),
    ],
)
def test_an_unreadable_list_of_unhealthy_cards_takes_none_away(
    data: dict[str, str] | None, cards: set[int], problem: str
) -> None:
    found, text = decode_unhealthy(data)
    assert found == cards
    assert problem in text
    assert bool(problem) == bool(text)


# -- containers without their pod ---------------------------------------------------------------------------

CARDS = make_node(cards=(15, 15, 15)).cards
STUCK = (Orphan("default/stuck", (CardSlice(0, 15), CardSlice(2, 4))), Orphan("a/b", (CardSlice(2, 1),)))


def test_what_containers_without_their_pod_hold_is_read_as_it_was_written() -> None:
    text = encode_orphans(STUCK)
    assert text == '[{"pod":"default/stuck","cards":{"0":15,"2":4}},{"pod":"a/b","cards":{"2":1}}]'
    assert decode_orphans(text, CARDS) == STUCK
    assert encode_orphans(()) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "{}",
        "[1]",
        '[{"pod":"a"}]',
        '[{"pod":"a","cards":{"x":1}}]',
        '[{"pod":"a","cards":{"0":-1}}]',
        '[{"pod":"a","cards":{"0":0}}]',
        '[{"pod":"a","cards":{"-1":1}}]',
        '[{"pod":"a","cards":{"999":1}}]',
        '[{"pod":"a","cards":{"0":1e30}}]',
        '[{"pod":"a","cards":{"0":16}}]',
        '[{"pod":"a","cards":{"3":1}}]',
        '[{"pod":"a","cards":{"0":99999999999}}]',
        "[" * 5000,
        '[{"pod":"a","cards":{"0":1}},' * 5000,
    ],
)
def test_a_corrupt_account_of_them_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(ContractError, match=NODE_ORPHANS):
        decode_orphans(text, CARDS)


def test_their_names_control_no_terminal() -> None:
    (found,) = decode_orphans('[{"pod":"a\\u001b[31m","cards":{"0":1}}]', CARDS)
    assert found.pod.isprintable()
