"""Clusters and workloads drawn at random."""

from __future__ import annotations

import json

import pytest
from bench.random_clusters import case_of, main

from gpuslice.core.policy import fitting_rows
from gpuslice.core.simulation.trace import fleet_of


@pytest.mark.parametrize("number", range(12))
def test_a_case_is_the_same_each_time_and_every_pod_with_gpu_fits_its_empty_cluster(number: int) -> None:
    case, again = case_of(number), case_of(number)
    assert (case.told, case.workload.pods) == (again.told, again.workload.pods)
    fleet = fleet_of(case.workload.nodes)
    rows = fleet.changed_since(-1)
    with_gpu = {shape for shape in case.workload.pods if shape.cards}
    assert with_gpu
    assert all(len(fitting_rows(fleet, shape, rows)) for shape in with_gpu)


def test_the_benchmark_prints_cases_by_regret(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cases", "11,12", "--seeds", "42", "--others", "bestfit", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    regrets = [line["regret"] for line in report["cases"]]
    assert regrets == sorted(regrets, reverse=True)
    assert report["spread"]["at 130 %"]["cases"] == 2
    assert report["spread"]["allocated"] == {}
