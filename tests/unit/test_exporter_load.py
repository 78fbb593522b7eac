"""The load's kernels, its sizes, and its judgement."""

from __future__ import annotations

import subprocess
from pathlib import Path

import click
import pytest
from click import Context
from click.testing import CliRunner

from gpuslice.adapters.web.exposition import Family, MetricKind, labels, render
from gpuslice.adapters.web.scrape import Page, parse
from gpuslice.apps.load.fields import WORKS
from gpuslice.apps.load.judge import Who, judge_memory, judge_refusal, judge_traffic, judge_work
from gpuslice.apps.load.kernels import kernel_for, ptx
from gpuslice.apps.load.main import command
from gpuslice.apps.load.order import order_of, size_bytes
from tests.tools import find

CARD = "GPU-a"
APP = Who(CARD, "default", "app-0")
POD = 'gpu_uuid="GPU-a",namespace="default",pod="app-0",container="main"'


@pytest.mark.parametrize("kind", ["busy", "fp32", "fp64", "fp16", "memory", "tensor"])
@pytest.mark.parametrize(("major", "architecture"), [(7, "sm_70"), (7, "sm_75"), (8, "sm_80"), (9, "sm_90")])
def test_nvidias_assembler_takes_each_kernel(
    kind: str, major: int, architecture: str, tmp_path: Path
) -> None:
    source = tmp_path / "kernel.ptx"
    source.write_text(ptx(kernel_for(kind, major)))
    command = [str(find("ptxas")), f"-arch={architecture}", str(source), "-o", str(tmp_path / "kernel.cubin")]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    if "is not defined for option" in told.stderr:
        pytest.skip(f"this ptxas is too new for {architecture}")
    assert told.returncode == 0, told.stderr


@pytest.mark.parametrize(
    ("text", "expected"), [("", 0), ("4GiB", 4 << 30), ("512M", 512 << 20), ("1.5G", 3 << 29), ("100", 100)]
)
def test_sizes(text: str, expected: int) -> None:
    assert size_bytes(text) == expected


@pytest.mark.parametrize("text", ["many", "-4GiB", "0", "4XB", "inf", "nan"])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="4GiB"):
        size_bytes(text)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["-t", "1099"], 'field id is "1099", must be one of 1001 to 1012, or all'),
        (["-t", "9" * 5000], '9", must be one of 1001 to 1012, or all'),
        (["-t", "1004", "--level", "200"], "level is 200.0, must be 0 to 100"),
        (["-t", "1001", "-r", "0"], "0.0 is not in the range x>=0.1"),
        (["-t", "1001", "-d", "-5"], "-5.0 is not in the range x>=0."),
        (["-i", "0,0"], 'cards are "0,0"'),
    ],
)
def test_a_load_that_cannot_be_is_refused_before_it_begins(arguments: list[str], sentence: str) -> None:
    outcome = CliRunner().invoke(command, arguments)
    assert outcome.exit_code == 2
    assert sentence in outcome.output


@pytest.mark.parametrize(("cards", "count"), [("0", 10), ("0,1", 12)])
def test_all_fields_have_copies_between_cards_where_two_are_named(cards: str, count: int) -> None:
    given = {parameter.name: parameter.get_default(Context(command)) for parameter in command.params}
    assert len(order_of({**given, "fields": "all", "cards": cards}).works) == count


def test_memory_agrees_only_when_all_that_is_held_is_shown() -> None:
    page = parse(f"gpuslice_container_memory_used_bytes{{{POD}}} 3348103168\n")  # 3193 MiB
    assert judge_memory(page, APP, 3 << 30, 3193 << 20, 0.1)[0].agrees
    assert not judge_memory(page, APP, 4 << 30, 4300 << 20, 0.1)[0].agrees
    assert not judge_memory(parse(""), APP, 1, 1, 0.1)[0].agrees


def test_a_container_is_judged_by_its_own_share_and_not_by_its_cards() -> None:
    page = parse(
        f"gpuslice_container_sm_utilization_ratio{{{POD}}} 0.3\n"
        'gpuslice_gpu_utilization_ratio{gpu_uuid="GPU-a"} 0.9\n'
    )
    (verdict,) = judge_work(page, APP, WORKS[1002], 0.3, 0.05)
    assert (verdict.measured, verdict.agrees) == (0.3, True)
    (verdict,) = judge_work(page, Who(CARD), WORKS[1002], 0.3, 0.05)
    assert (verdict.measured, verdict.agrees) == (0.9, False)


def test_a_refusal_must_have_been_counted() -> None:
    page = parse(f"gpuslice_container_memory_refused_total{{{POD}}} 0\n")
    assert not judge_refusal(page, APP)[0].agrees


@pytest.mark.parametrize(("grown", "agrees"), [(1000, True), (1150, True), (500, False), (1500, False)])
def test_bytes_on_the_wire_may_be_a_little_more_than_was_moved(grown: int, agrees: bool) -> None:
    def page(value: int) -> Page:
        return parse(f'gpuslice_gpu_pcie_bytes_total{{gpu_uuid="GPU-a",direction="tx"}} {value << 20}\n')

    (verdict,) = judge_traffic(page(7), page(7 + grown), Who(CARD), WORKS[1009], 1000 << 20, tolerance=0.1)
    assert verdict.agrees is agrees
    assert judge_traffic(parse(""), page(1), Who(CARD), WORKS[1009], 1, tolerance=0.1) == []


def test_a_page_is_read_back_as_it_was_written() -> None:
    family = Family("metric", MetricKind.GAUGE, "help")
    family.add(1.5, labels({"a": 'quote " backslash \\ line\nend', "b": "x,y}"}))
    family.add(2, labels({}))
    page = parse(render([family]).decode())
    assert [sample.value for sample in page.samples] == [1.5, 2]
    assert page.samples[0].labels == {"a": 'quote " backslash \\ line\nend', "b": "x,y}"}
