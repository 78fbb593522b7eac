"""Reading traces and replaying them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from bench.churn import ChurnArrivals, churn, churn_arrivals
from bench.decisions import main as bench_decisions
from bench.placement import main as bench_placement
from bench.traces import find_pods

from gpuslice.core.errors import ContractError
from gpuslice.core.policy import POLICIES, Binpack, FleetNode, Shape, make_policy
from gpuslice.core.simulation.replay import Cluster, fill, filling_arrivals, shuffled_nodes
from gpuslice.core.simulation.trace import Trace, fleet_of, read_nodes, read_pods
from gpuslice.diagnosis.simulate.facts import find_nodes, load_nodes, load_pods

DATA = Path(__file__).parents[1] / "fixtures" / "traces"
HEADER = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos\n"


@pytest.fixture
def nodes() -> list[FleetNode]:
    return load_nodes(DATA / "openb_node_list_gpu_node.csv")


@pytest.fixture
def trace() -> Trace:
    return load_pods(find_pods("small", DATA))


def capacity(nodes: list[FleetNode]) -> int:
    return sum(sum(node.size) for node in nodes)


def test_a_pod_line_becomes_a_shape() -> None:
    lines = [HEADER, "a,2000,1024,1,460,T4|V100,LS\n", "b,500,256,0,0,,BE\n", "c,1,2,8,1000,,LS\n"]
    assert read_pods(lines, "t").shapes == (
        Shape(460, 1, 2000, 1024, frozenset({"T4", "V100"})),
        Shape(0, 0, 500, 256),
        Shape(1000, 8, 1, 2),
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a,x,1,1,500,,LS", 't.csv:2 cpu_milli is "x", must be a whole number'),
        ("a,1,1,1,-5,,LS", 't.csv:2 gpu_milli is "-5", must be a number that is not negative'),
        ("a,1,1,1,0,,LS", 't.csv:2 gpu_milli is "0", must be 1 to 1000'),
        ("a,1", 't.csv:2 num_gpu is "", must be a whole number'),
        ("a,1,1,0.5,1000,,LS", 't.csv:2 num_gpu is "0.5", must be a whole number'),
        ("\n\na,1,1,1,0.5,,LS", 't.csv:4 gpu_milli is "0.5", must be a whole number'),
    ],
)
def test_a_bad_line_is_named(line: str, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        read_pods([HEADER, *line.splitlines(keepends=True)], "t.csv")


def test_a_trace_without_pods_or_nodes_is_an_error() -> None:
    with pytest.raises(ContractError, match="at least one pod"):
        read_pods([HEADER], "t.csv")
    with pytest.raises(ContractError, match="at least one node with cards"):
        read_nodes(["sn,cpu_milli,memory_mib,gpu,model\n", "a,1,1,0,\n"], "n.csv")


def test_arrivals_are_the_trace_topped_up_to_the_demand_and_the_same_each_time(trace: Trace) -> None:
    arrivals = filling_arrivals(trace.shapes, 400_000, 42, 1.3)
    assert arrivals == filling_arrivals(trace.shapes, 400_000, 42, 1.3)
    assert arrivals != filling_arrivals(trace.shapes, 400_000, 43, 1.3)
    total = sum(shape.total_units for shape in arrivals)
    assert 520_000 - 8_000 < total <= 520_000
    assert sorted(map(repr, arrivals[: len(trace.shapes)])) == sorted(map(repr, trace.shapes))


def test_a_trace_that_asks_for_more_is_thinned(trace: Trace) -> None:
    arrivals = filling_arrivals(trace.shapes, 10_000, 42, 1.3)
    assert sum(shape.total_units for shape in arrivals) <= 13_000


@pytest.mark.parametrize("name", [policy.name for policy in POLICIES])
def test_filling_books_what_fits_and_refuses_the_rest(
    name: str, nodes: list[FleetNode], trace: Trace
) -> None:
    fleet = fleet_of(shuffled_nodes(nodes, 42))
    cluster = Cluster(fleet, make_policy(name, fleet))
    arrivals = filling_arrivals(trace.shapes, capacity(nodes), 42, 1.3)
    result = fill(cluster, arrivals, capacity(nodes))
    offered = sum(shape.total_units for shape in arrivals)
    assert cluster.allocated_units == offered - sum(shape.total_units for shape in result.refused)
    assert cluster.allocated_units == capacity(nodes) - int(fleet.left.sum())
    assert 60 < result.allocation_pct_at[100] <= 100
    assert list(result.allocation_pct_at.values()) == sorted(result.allocation_pct_at.values())


def test_churn_ends_with_what_is_still_running(nodes: list[FleetNode], trace: Trace) -> None:
    fleet = fleet_of(shuffled_nodes(nodes, 42))
    cluster = Cluster(fleet, Binpack(fleet))
    arrivals = churn_arrivals(trace.shapes, capacity(nodes), 0.5, 42)
    result = churn(cluster, arrivals, capacity(nodes))
    assert 35 < result.allocation_pct < 60
    assert result.refused_pct < 5
    running = zip(arrivals.time + arrivals.lifetime, arrivals.shapes, strict=True)
    still = sum(shape.total_units for end, shape in running if end > arrivals.until)
    assert cluster.allocated_units <= still
    assert cluster.allocated_units == capacity(nodes) - int(fleet.left.sum())


def test_allocation_is_averaged_over_the_measured_time_only() -> None:
    """One card: half of it from 2 to 4, all of it from 3 to 5; measured from 3 to 6."""
    nodes = read_nodes(["sn,cpu_milli,memory_mib,gpu,model\n", "n,10,10,1,\n"], "n.csv")
    fleet = fleet_of(nodes)
    time, lifetime = np.array([2.0, 3.0, 3.5]), np.array([2.0, 2.0, 1.0])
    arrivals = ChurnArrivals(time, lifetime, (Shape(500),) * 3, measured_from=3.0, until=6.0)
    result = churn(Cluster(fleet, Binpack(fleet)), arrivals, 1000)
    assert result.allocation_pct == pytest.approx(100 * (1 + 0.5) / 3)
    assert result.refused_pct == pytest.approx(50)


def test_a_trace_is_found_by_name_or_as_a_file_with_its_nodes() -> None:
    by_name, by_path = (
        find_pods("small", DATA),
        find_pods(str(DATA / "openb_pod_list_small.csv"), Path("none")),
    )
    assert by_name == by_path
    assert find_nodes(by_path, None).parent == DATA
    with pytest.raises(FileNotFoundError, match="has these: small"):
        find_pods("large", DATA)


def test_the_benchmark_prints_each_seed_and_the_mean(capsys: pytest.CaptureFixture[str]) -> None:
    said = ["--trace", "small", "--data", str(DATA), "--policy", "fgd,opportunity-cost", "--seeds", "42-43"]
    assert bench_placement([*said, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report) == ["fgd", "opportunity-cost"]
    for measures in report.values():
        assert list(measures) == ["allocation_pct_at_100", "allocation_pct_at_130"]
        for measure in measures.values():
            assert len(measure["seeds"]) == 2
            assert measure["mean"] == pytest.approx(sum(measure["seeds"]) / 2, abs=1e-3)


def test_the_benchmark_of_churn_prints_allocation_and_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    said = ["--trace", "small", "--data", str(DATA), "--policy", "all", "--seeds", "42", "--churn", "0.9"]
    assert bench_placement([*said, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {tuple(measures) for measures in report.values()} == {("allocation_pct", "refused_pct")}
    assert bench_placement(said) == 0
    assert "opportunity-cost" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (["--policy", "fdg"], '--policy names "fdg", must be one or more of binpack'),
        (["--seeds", "x"], '--seeds is "x", must be numbers'),
        (["--seeds", "5-4"], "must have the smaller number first"),
        (["--churn", "-1"], "must be a load"),
        (["--trace", "none"], 'no trace "none"'),
    ],
)
def test_the_benchmark_says_what_it_cannot_understand(
    said: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench_placement(["--trace", "small", "--data", str(DATA), *said]) == 2
    assert message in capsys.readouterr().err


def test_the_benchmark_of_decisions_measures_each_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_decisions(["--nodes", "10,20", "--pods", "100", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["nodes"] for row in rows] == [10, 20]
    assert all(row["p50_us"] > 0 for row in rows)
