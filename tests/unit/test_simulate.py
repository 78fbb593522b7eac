"""What fits, why the rest does not, how many cards it takes; and how ``gpuslice simulate`` tells it."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuslice.apps.cli.main import command
from gpuslice.core.policy import FleetNode, Shape
from gpuslice.core.simulation.capacity import cards_needed, explain, mixed, place_all
from gpuslice.diagnosis.simulate.chart import Chart, Line, round_step, round_up, svg
from gpuslice.diagnosis.simulate.facts import load_pods
from tests.unit.fleets import make_fleet, make_fleet_node

DATA = Path(__file__).parents[1] / "fixtures" / "traces"
PODS, NODES = DATA / "openb_pod_list_small.csv", DATA / "openb_node_list_gpu_node.csv"


def nodes_of(*cards: tuple[int, ...]) -> list[FleetNode]:
    return [make_fleet_node(f"n{number}", each) for number, each in enumerate(cards)]


def reason(pod: Shape, *nodes: tuple[int, ...], taken: int = 0) -> str:
    """Why `pod` has no place where `taken` units of each card are gone."""
    fleet = make_fleet(*nodes)
    for row, cards in enumerate(nodes):
        fleet.take(row, range(len(cards)), Shape(taken))
    return explain(fleet, pod).reason


def test_placing_counts_what_is_allocated_and_what_stays_free() -> None:
    outcome = place_all(nodes_of((10, 10), (10,)), [Shape(10), Shape(4), Shape(6)], "binpack")
    assert (outcome.cards, outcome.units, outcome.allocated_units) == (3, 30, 20)
    assert (outcome.placed, outcome.pods, outcome.unplaced) == (3, 3, ())
    assert (outcome.free_cards, outcome.free_nodes) == (1, 0)


def test_pods_without_a_place_are_told_why() -> None:
    outcome = place_all(nodes_of((10,)), [Shape(10), Shape(10), Shape(10), Shape(20)], "binpack")
    assert [(each.pods, each.never) for each in outcome.unplaced] == [(2, False), (1, True)]


@pytest.mark.parametrize(
    ("told", "pod", "nodes", "taken"),
    [
        ("no card has 20 units, the largest has 10", Shape(20), [(10,)], 0),
        ("no node has 2 cards of 10 units, at most 1", Shape(10, 2), [(10, 5)], 0),
        ("no node has a card of model T4", Shape(1, models=frozenset({"T4"})), [(10,)], 0),
        ("8 units are free in pieces, at most 4 on one card", Shape(5), [(10,), (10,)], 6),
        ("in all no more than 2 units are free", Shape(5), [(10,), (10,)], 9),
        ("4 such cards are free, but at most 2 on one node", Shape(4, 3), [(10, 10), (10, 10), (4, 4, 4)], 4),
        ("no such card is free", Shape(7, 2), [(10, 10)], 4),
    ],
)
def test_a_refusal_says_what_is_missing_and_the_most_there_is(
    told: str, pod: Shape, nodes: list[tuple[int, ...]], taken: int
) -> None:
    assert reason(pod, *nodes, taken=taken) == told


def test_a_refusal_says_when_cards_are_free_but_not_what_feeds_them() -> None:
    node = make_fleet_node("n", (10,), cpu_milli=9000, cpu_left=9000, memory_mib=50, memory_left=50)
    busy = [Shape(1, cpu_milli=8000, memory_mib=10)]
    outcome = place_all([node], [*busy, Shape(4, cpu_milli=2000), Shape(4, memory_mib=45)], "binpack")
    assert {each.reason for each in outcome.unplaced} == {
        "at most 1000 milli CPU are free where such cards are free (1 node)",
        "at most 40 MiB of memory are free where such cards are free (1 node)",
    }
    uneven = [
        make_fleet_node("a", (10,), cpu_milli=9000, cpu_left=9000, memory_mib=10, memory_left=10),
        make_fleet_node("b", (10,), cpu_milli=1000, cpu_left=1000, memory_mib=90, memory_left=90),
    ]
    (plain,) = place_all(uneven, [Shape(0, 0, cpu_milli=2000, memory_mib=20)], "binpack").unplaced
    assert plain.reason == "CPU and memory are not free together on any node"


def test_pods_without_gpu_take_cores_from_those_with() -> None:
    node = make_fleet_node("n", (10, 10), cpu_milli=8000, cpu_left=8000)
    outcome = place_all([node], [Shape(0, 0, 6000), Shape(10, cpu_milli=4000)], "opportunity-cost")
    assert [each.reason for each in outcome.unplaced] == [
        "at most 2000 milli CPU are free where such cards are free (1 node)"
    ]


def test_compute_can_be_what_is_missing() -> None:
    node = make_fleet_node("n", (10,), compute_left=(100,))
    outcome = place_all([node], [Shape(2, compute_percent=80), Shape(2, compute_percent=30)], "binpack")
    assert outcome.unplaced[0].reason == "no card with 2 units free has 30 % of its compute left"


def test_too_large_a_cluster_could_do_with_fewer_cards() -> None:
    needed = cards_needed(nodes_of(*[(10, 10)] * 8), [Shape(5)] * 9, "binpack")
    assert needed is not None
    assert (needed.nodes, needed.cards, needed.added) == (3, 6, 0)


def test_too_small_a_cluster_needs_more_of_its_mix() -> None:
    needed = cards_needed(nodes_of((10,), (10, 10)), [Shape(10)] * 8, "binpack")
    assert needed is not None
    assert (needed.nodes, needed.cards, needed.added) == (6, 9, 4)


def test_a_search_for_the_cards_needed_tells_how_far_each_try_is() -> None:
    told: list[float] = []
    cards_needed(nodes_of(*[(10, 10)] * 40), [Shape(1)] * 600, "binpack", told.append)
    assert told == sorted(told)
    assert {0 < each - int(each) < 1 for each in told} == {True, False}, "beginnings, and parts between them"
    assert 4 < told[-1] < 7


def test_pods_that_no_node_could_ever_hold_do_not_count_for_what_is_needed() -> None:
    assert cards_needed(nodes_of((10,)), [Shape(11)], "binpack") is None
    needed = cards_needed(nodes_of((10,)), [Shape(11), Shape(10)], "binpack")
    assert needed is not None
    assert needed.cards == 1


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 10), min_size=1, max_size=30), st.integers(1, 6))
def test_the_cluster_needed_holds_everything_and_one_node_less_does_not(units: list[int], count: int) -> None:
    nodes, pods = nodes_of(*[(10, 10)] * count), [Shape(each) for each in units]
    needed = cards_needed(nodes, pods, "binpack")
    assert needed is not None
    enough = nodes_of(*[(10, 10)] * needed.nodes)
    assert place_all(enough, pods, "binpack").unplaced == ()
    assert needed.nodes == 1 or place_all(enough[1:], pods, "binpack").unplaced


def test_every_beginning_of_a_cluster_has_its_mix() -> None:
    line = mixed([*nodes_of(*[(10,)] * 6), *[make_fleet_node(f"l{number}", (80,)) for number in range(3)]])
    for count in (3, 6, 9):
        assert sum(node.size == (80,) for node in line[:count]) == count // 3


# -- the command -------------------------------------------------------------------------------------------


def simulate(*words: str) -> Result:
    return CliRunner().invoke(command, ["simulate", "--trace", str(PODS), *words])


def test_a_table_tells_what_fits_what_not_and_what_it_takes() -> None:
    told = simulate("--policy", "opportunity-cost,binpack")
    assert told.exit_code == 0, told.output
    question, _, head, *_ = told.stdout.splitlines()
    assert re.fullmatch(r"\d+ pods for [\d.]+ cards, [\d.]+ % of the \d+ on \d+ nodes\.", question)
    assert head == "POLICY            ALLOCATED  PODS PLACED  FREE CARDS  FREE NODES  CARDS NEEDED"
    assert re.search(r"\nDoes not fit with opportunity-cost: \d+ pods for [\d.]+ cards\n", told.stdout)
    assert "on one card" in told.stdout


def test_the_page_shows_what_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs/operate/capacity.md").read_text()
    (block,) = re.findall(r"^    \$ gpuslice (simulate .*?)\n\n(?=\S)", page, re.MULTILINE | re.DOTALL)
    typed, _, shown = textwrap.dedent(block.replace("\\\n", "")).partition("\n")
    monkeypatch.chdir(root)
    told = CliRunner().invoke(command, typed.split())
    assert told.output.rstrip() == textwrap.dedent(shown)


def test_documents_have_the_documented_keys() -> None:
    found = json.loads(simulate("-o", "json", "--growth", "0.1").stdout)
    assert list(found) == ["nodes", "cards", "pods", "askedPercent", "policies"]
    (policy,) = found["policies"]
    assert policy["policy"] == "opportunity-cost"
    assert policy["placed"] + sum(each["pods"] for each in policy["unplaced"]) == found["pods"]
    assert policy["needed"]["cards"] < found["cards"]
    same = simulate("-o", "yaml", "--growth", "0.1").stdout
    assert yaml.safe_load(same) == found


def test_nodes_can_be_added_and_left_out() -> None:
    def cards(*words: str) -> int:
        return int(json.loads(simulate("-o", "json", "--no-needed", *words).stdout)["cards"])

    before = cards()
    assert cards("--add", "3x8") == before + 24
    assert cards("--add", "3x8x500:B") == before + 24
    assert cards("--drop", "node-0*") < before


def test_more_cards_hold_more_pods() -> None:
    def placed(*words: str) -> int:
        found = json.loads(simulate("-o", "json", "--no-needed", *words).stdout)
        return int(found["policies"][0]["placed"])

    assert placed("--add", "30x8:A") > placed()


def test_everything_fits_is_said() -> None:
    assert "Everything fits with opportunity-cost." in simulate("--growth", "0.1", "--no-needed").stdout


def test_the_picture_is_svg_with_a_line_for_each_policy(tmp_path: Path) -> None:
    path = tmp_path / "out.svg"
    assert simulate("--no-needed", "--policy", "fgd,bestfit", "--plot", str(path)).exit_code == 0
    root = ElementTree.parse(path).getroot()
    names = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    lines = list(root.iter("{http://www.w3.org/2000/svg}polyline"))
    assert len([line for line in lines if line.get("stroke-dasharray") is None]) == 2
    assert "GPU asked for so far, % of the cluster" in names
    assert names.index("fgd") < names.index("bestfit")  # the best first
    assert any(re.fullmatch(r"\d+\.\d %, \d+ pods left over", name or "") for name in names)
    assert "100" in names  # round numbers on the axes


def test_a_chart_quotes_what_it_is_given() -> None:
    drawn = svg(Chart('a "<b>" & c', "x", "y", [Line("<i>", [(0, 0), (1, 2)])]))
    assert ElementTree.fromstring(drawn).get("aria-label") == 'a "<b>" & c'
    assert ElementTree.fromstring(svg(Chart("none", "x", "y", []))) is not None


@pytest.mark.parametrize(
    ("most", "step"), [(96.2, 20.0), (100.0, 25.0), (156.0, 25.0), (7.0, 1.0), (0.4, 0.1), (12_000.0, 2500.0)]
)
def test_axes_are_divided_by_round_numbers(most: float, step: float) -> None:
    assert round_step(most) == pytest.approx(step)
    assert most <= round_up(most) < most + step


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--policy", "worst"], '--policy names "worst", must be one or more of binpack'),
        (["--add", "four"], '--add is "four", must be NODESxCARDS'),
        (["--drop", "*"], "there are no nodes with shared cards"),
        (["--from-cluster"], "one of --from-cluster, --trace FILE and --usage FOLDER must be given"),
        (["--drop", "nodes-*"], '--drop is "nodes-*", must be the name of a node'),
        (["--add", "0x8"], '--add is "0x8", must be NODESxCARDS'),
        (["--add", "1x2000"], '--add is "1x2000": 1024 cards of a node are the most'),
        (["--growth", "0.00001"], "--growth 1e-05 leaves no pods"),
        (
            ["--plot", "missing/out.svg"],
            '--plot is "missing/out.svg", must be a file in a folder that exists',
        ),
        (["--nodes", str(PODS)], "openb_pod_list_small.csv columns is"),
        (["--nodes", sys.executable], "is no CSV file in UTF-8"),
    ],
)
def test_what_cannot_be_simulated_is_said(words: list[str], message: str) -> None:
    told = simulate(*words)
    assert told.exit_code != 0
    assert message in told.output + str(told.exception)


@pytest.mark.parametrize("milli", ["inf", "nan", "", "half", "-1", "1500"])
def test_a_share_that_is_none_is_told_with_its_line(tmp_path: Path, milli: str) -> None:
    pods = tmp_path / "pods.csv"
    pods.write_text(f"name,cpu_milli,memory_mib,num_gpu,gpu_milli\na,1,1,1,500\nb,1,1,1,{milli}\n")
    told = CliRunner().invoke(command, ["simulate", "--trace", str(pods), "--nodes", str(NODES)])
    assert told.exit_code != 0
    assert "pods.csv:3 gpu_milli" in told.output + str(told.exception)


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_a_file_as_a_spreadsheet_writes_it_is_read(tmp_path: Path, separator: str) -> None:
    """With a mark of its encoding, other separators and ends of lines, other spelling, fractions of a MiB."""
    lines = ["Num_GPU, GPU_milli, CPU_milli, Memory_MiB", "1.0,500,4000,8192.4", "", "2,1000,4000.0,1024"]
    pods = tmp_path / "pods.csv"
    pods.write_text("\r\n".join(lines).replace(",", separator), encoding="utf-8-sig", newline="")
    assert load_pods(pods).shapes == (Shape(500, 1, 4000, 8193), Shape(1000, 2, 4000, 1024))


def written(folder: Path, pods: str, nodes: str = "n1,64000,262144,8,V100") -> list[str]:
    """The words that simulate these lines."""
    (folder / "pods.csv").write_text(f"name,cpu_milli,memory_mib,num_gpu,gpu_milli\n{pods}\n")
    (folder / "nodes.csv").write_text(f"sn,cpu_milli,memory_mib,gpu,model\n{nodes}\n")
    return ["simulate", "--trace", str(folder / "pods.csv"), "--nodes", str(folder / "nodes.csv")]


@pytest.mark.timeout(60)
def test_a_pod_that_asks_for_all_the_cards_of_the_world_is_told_as_quickly_as_any(tmp_path: Path) -> None:
    words = written(tmp_path, "a,1,1,99999999,500\nb,1,1,1,500")
    told = CliRunner().invoke(command, [*words, "--plot", str(tmp_path / "out.svg")])
    assert told.exit_code == 0, told.output
    assert "no node has 99999999 cards of 500 units, at most 8" in told.stdout
    ElementTree.fromstring((tmp_path / "out.svg").read_text())


@pytest.mark.parametrize(
    ("pods", "nodes", "message"),
    [
        (
            "a,1,1,1,500",
            "n1,64000,262144,99999999999,V100",
            'nodes.csv:2 gpu is "99999999999", must be at most',
        ),
        ("a,1e300,1,1,500", "n1,64000,262144,8,V100", "pods.csv:2 cpu_milli"),
    ],
)
def test_numbers_that_no_machine_has_are_told_with_their_line(
    tmp_path: Path, pods: str, nodes: str, message: str
) -> None:
    told = CliRunner().invoke(command, written(tmp_path, pods, nodes))
    assert told.exit_code != 0
    assert message in told.output + str(told.exception)


def test_a_reason_is_never_that_what_is_there_is_missing() -> None:
    """A pod can wait although there is room: its scheduler has not come to it, or wants another node."""
    assert reason(Shape(4), (10,), (10,)) == "there is room: gpuslice explain tells why a pod waits"


def test_of_equal_policies_the_default_is_told_of() -> None:
    told = simulate("--growth", "0.1", "--no-needed", "--policy", "all").stdout
    assert told.endswith("\nEverything fits with opportunity-cost.\n")
