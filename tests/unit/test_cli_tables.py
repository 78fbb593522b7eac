"""Text in columns, and the tables beyond those of the documents."""

from __future__ import annotations

from typing import Any

import pytest

from gpuslice.apps.cli import inspect_table, top_table
from gpuslice.diagnosis.table import aligned, fitted
from gpuslice.diagnosis.usage import CardUsage
from tests.golden.clusters import T4_NODE, five_nodes, node, pod, report_of, three_notebooks

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a\tb\tc\naa\tbb\tcc\n", "a   b   c\naa  bb  cc\n"),
        ("a\t\naaa\t\n", "a    \naaa  \n"),
        ("a\tb\nplain\nlong\tb\n", "a  b\nplain\nlong  b\n"),
        ("a\tb\n\nlong\tb\n", "a  b\n\nlong  b\n"),
        ("a\tx\ty\nlong\tx\na\tlonger\tz\n", "a     x  y\nlong  x\na     longer  z\n"),
        ("\tb\naa\tb\n", "    b\naa  b\n"),
        ("ä\tb\naa\tb\n", "ä   b\naa  b\n"),
        ("", ""),
        ("no newline", "no newline"),
    ],
    ids=[
        "columns",
        "closed",
        "a line without cells parts blocks",
        "so does an empty one",
        "inner blocks",
        "an empty cell",
        "characters, not bytes",
        "nothing",
        "an open end",
    ],
)
def test_cells_are_aligned_as_tabwriter_does(text: str, wanted: str) -> None:
    assert aligned(text) == wanted


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.split("\n")]


def test_a_card_that_a_node_has_not_is_0_of_0() -> None:
    report = report_of([node("a", units=30, cards=2), node("b", units=15, cards=1)], [pod("p", 3, "b")])
    assert lines(inspect_table.summary(report))[:3] == [
        "NAME  IPADDRESS  GPU0(Allocated/Total)  GPU1(Allocated/Total)  GPU Memory(GiB)",
        "a     unknown    0/15                   0/15                   0/30",
        "b     unknown    3/15                   0/0                    3/15",
    ]


def test_pods_without_a_card_have_a_column_where_there_are_any() -> None:
    report = report_of(
        [node("a.1", units=15, cards=1), node("b.2", units=15, cards=1)],
        [pod("p", 3, "a.1", card=None), pod("q", 4, "b.2")],
    )
    assert lines(inspect_table.summary(report)) == [
        "NAME  IPADDRESS  GPU0(Allocated/Total)  PENDING(Allocated)  GPU Memory(GiB)",
        "a.1   1          0/15                   3                   3/15",
        "b.2   2          4/15                                       4/15",
        "-" * 38,
        "Allocated/Total GPU Memory In Cluster:",
        "7/30 (23%)",
        "",
    ]
    assert lines(inspect_table.details(report))[4:7] == [
        "NAME         NAMESPACE  GPU0(Allocated)  Pending(Allocated)",
        "p            default    0                3",
        "Allocated :  3 (20%)",
    ]
    assert lines(inspect_table.details(report))[13] == "NAME         NAMESPACE  GPU0(Allocated)"


def test_a_pod_on_several_cards_is_one_row() -> None:
    report = report_of([node("a", units=60, cards=4)], [pod("p", 8, "a", card="0,1,2,3")])
    assert (
        "p            default    2                2                2                2"
        in inspect_table.details(report)
    )


def test_names_beyond_ascii_lengthen_the_ruler_by_their_bytes() -> None:
    report = report_of([node("ä", units=15, cards=1)])
    plain = report_of([node("a", units=15, cards=1)])
    assert inspect_table.summary(report).count("-") == inspect_table.summary(plain).count("-") + 1


def test_without_shared_nodes_there_is_no_column_about_sharing() -> None:
    report = report_of(
        [node("a.1", allocatable={"nvidia.com/gpu": "2"}, capacity={"nvidia.com/gpu": "2"})],
        [pod("p", 0, "a.1", card=None, exclusive=1)],
    )
    assert lines(top_table.summary(report)) == [
        "NAME  IPADDRESS  ROLE    STATUS  GPU(Total)  GPU(Allocated)",
        "a.1   1          <none>  ready   2           1",
        "-" * 89,
        "Allocated/Total GPUs In Cluster:",
        "1/2 (50%)",
        "",
    ]


SICK = node("a", allocatable={"nvidia.com/gpu": "1"}, capacity={"nvidia.com/gpu": "4"})


@pytest.mark.parametrize(
    ("nodes", "dashes", "column"),
    [
        ([SICK], 99, "GPU(Unhealthy)"),
        ([SICK, node("b", units=15, cards=1)], 107, "GPU(Unhealthy)  GPU(Shareable)"),
    ],
)
def test_cards_that_cannot_be_given_out_are_counted(nodes: list[Any], dashes: int, column: str) -> None:
    told = lines(top_table.summary(report_of(nodes)))
    assert told[0].endswith(column)
    assert "-" * dashes in told
    assert told[-3] == "Unhealthy/Total GPUs In Cluster:"
    assert told[-2].startswith("3/")


def test_nodes_that_are_not_ready_are_left_out_of_the_active_ones() -> None:
    report = report_of(
        [node("a", units=15, cards=1), node("b", units=15, cards=1, ready=False)], [pod("p", 3, "a")]
    )
    told = lines(top_table.summary(report))
    assert "b     unknown    <none>  notReady  1           0               Yes" in told
    assert told[-5:-1] == [
        "Allocated/Total GPUs In Cluster:",
        "1/2 (50%)",
        "Allocated/Total GPUs(Active) In Cluster:",
        "1/1 (100%)",
    ]


def test_roles_are_joined_as_kubectl_does() -> None:
    labels = {"node-role.kubernetes.io/control-plane": "", "kubernetes.io/role": "edge"}
    told = top_table.summary(report_of([node("a", units=1, cards=1, labels=labels)]))
    assert "control-plane,edge" in told


def test_details_of_whole_cards_show_parts_as_fractions() -> None:
    told = lines(top_table.details(report_of(five_nodes(), three_notebooks()[:1])))
    assert "default    tf-notebook-2-7b4d68d8f7-wxlff  0.29" in told
    assert "If Node is Shareable :                                Yes" in told
    assert f"Allocated GPUs In Node {T4_NODE}:  1 (100%)" in told
    assert told[-2] == "Allocated/Total GPUs In Cluster:  1/1 (100%)"


def test_the_shared_table_of_arena_has_no_column_for_pods_without_a_card() -> None:
    report = report_of([node("a.1", units=15, cards=1)], [pod("p", 3, "a.1", card=None)])
    assert lines(top_table.shared_summary(report))[1] == "a.1   1          0/15"
    assert lines(top_table.shared_summary(report))[-2] == "0/15 (GiB) (0%)"
    assert lines(top_table.shared_details(report))[-2] == "3/15 (GiB) (20%)"


def test_what_cards_use_now_stands_beside_what_was_given_out() -> None:
    report = report_of(five_nodes(), three_notebooks())
    used = CardUsage(
        T4_NODE, "0", "GPU-a", used_bytes=9 * GIB, total_bytes=15079 << 20, utilization_ratio=0.375
    )
    lost = CardUsage("other", "3", "GPU-b", up=False)
    assert lines(top_table.measured(report, [used, lost])) == [
        "",
        f"GPUs of {T4_NODE}:",
        "  INDEX  MEMORY(Total)  MEMORY(Allocated)  MEMORY(Used)  DUTY_CYCLE",
        "  -----  -------------  -----------------  ------------  ----------",
        "  0      14.0 GiB       12.0 GiB           9.0 GiB       37.5%",
        "",
        "GPUs of other:",
        "  INDEX  MEMORY(Total)  MEMORY(Allocated)  MEMORY(Used)  DUTY_CYCLE",
        "  -----  -------------  -----------------  ------------  ----------",
        "  3      -              -                  -             -",
        "",
    ]


LONG = "llama-3-70b-instruct-continued-pretraining-learning-rate-sweep-000017-worker-in-europe-west-4"


@pytest.mark.parametrize("width", [80, 200])
def test_a_table_with_long_names_fits_the_terminal_and_keeps_its_figures(width: int) -> None:
    heads = ["NAMESPACE", "POD", "OWNER", "NODE", "HELD"]
    rows = [heads, ["team-" + LONG, LONG, f"Deployment/{LONG}", "node-1", "10.5 GiB"]]
    lines = fitted(rows, cut=(0, 1, 2, 3), drop=(2, 3), width=width).splitlines()
    assert max(map(len, lines)) <= width
    assert lines[1].endswith("10.5 GiB")
    assert lines[1].split()[1].startswith("llama-3-")
    assert "rope-west-4"[-5:] in lines[1].split()[1]
    assert ("OWNER" in lines[0]) == (width == 200)


@pytest.mark.parametrize("width", [80, 120, 200])
def test_a_column_of_sentences_keeps_their_beginnings(width: int) -> None:
    """The reason is what the list is read for: names and amounts make room for it."""
    reason = "It will never fit here: it asks for 16 units, and the largest shared card has 15."
    rows = [["POD", "STATUS", "NODE", "MEMORY", "WHY"], [LONG, "Pending", "node-1", "asks 16 units", reason]]
    lines = fitted(rows, cut=(0,), drop=(3, 2), width=width, prose=True).splitlines()
    assert max(map(len, lines)) <= width
    assert "It will never fit here: it asks for 16" in lines[1]
    assert ("MEMORY" in lines[0]) == (width > 80)
    assert lines[1].endswith("…") == (reason not in lines[1])


def test_a_pipe_gets_names_whole() -> None:
    assert LONG in fitted([["POD"], [LONG]], cut=(0,))
    assert fitted([], cut=()) == ""
