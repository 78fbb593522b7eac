"""The counter file's grammar."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuslice.apps.exporter import fields
from gpuslice.apps.exporter.card_history import ClockEvents
from gpuslice.apps.exporter.counters import CounterKind, parse

CATALOGUE = fields.load()


def test_both_spellings_lead_to_one_field_and_keep_their_name() -> None:
    names = ["DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_GPU_UTIL_RATIO", "dcgm_gpu_utilization"]
    file = parse("\n".join(f"{name}, gauge, Utilisation." for name in names), CATALOGUE)
    assert [counter.name for counter in file.counters] == names
    assert {counter.field.id for counter in file.counters if counter.field} == {203}
    assert not file.problems


def test_blanks_comments_and_quotes_are_read_as_upstream_reads_them() -> None:
    text = '# a comment\n\nDCGM_FI_DEV_DEC_UTIL ,  gauge, "Decoder, in %."\n'
    text += "DCGM_FI_DRIVER_VERSION, label, Driver"
    file = parse(text, CATALOGUE)
    assert [(counter.kind, counter.help) for counter in file.counters] == [
        (CounterKind.GAUGE, "Decoder, in %."),
        (CounterKind.LABEL, "Driver"),
    ]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("DCGM_FI_DEV_NOPE, gauge, x", 'line 2: "DCGM_FI_DEV_NOPE" is no DCGM field'),
        ("DCGM_FI_DEV_GPU_TEMP, histogram, x", 'type of DCGM_FI_DEV_GPU_TEMP is "histogram"'),
        ("DCGM_FI_DEV_GPU_TEMP, gauge", "has 2 columns"),
        ("DCGM_FI_DEV_GPU_TEMP, gauge, a, b", "has 4 columns"),
        ("DCGM_FI_DEV_SM_CLOCK, gauge, again", "is there already"),
        ('DCGM_FI_DEV_GPU_TEMP, gauge, "open', "not CSV"),
    ],
)
def test_a_bad_line_is_named_and_the_others_stay(line: str, sentence: str) -> None:
    file = parse(f"DCGM_FI_DEV_SM_CLOCK, gauge, a\n{line}\nDCGM_FI_DEV_FB_USED, gauge, b", CATALOGUE)
    assert [counter.name for counter in file.counters] == ["DCGM_FI_DEV_SM_CLOCK", "DCGM_FI_DEV_FB_USED"]
    assert sentence in file.problems[0]


@given(st.text())
def test_no_file_is_too_strange_to_be_read(text: str) -> None:
    file = parse(text, CATALOGUE)
    assert len(file.counters) + len(file.problems) <= len(text.splitlines())


def test_every_field_of_dcgm_is_known() -> None:
    assert len({field.id for field in CATALOGUE.values()}) == 591


def test_a_sample_that_is_still_the_last_one_counts_once() -> None:
    """While the driver does not answer, nobody knows what holds the clocks down."""
    windows = ClockEvents(10)
    for taken_at_s in (1.0, 1.0, 1.0, 2.0):
        windows.add("GPU-1", 0x4, taken_at_s)
    assert windows.counts("GPU-1") == {"power_cap": 2}
    windows.add("GPU-1", 0, 11.5)
    assert windows.counts("GPU-1") == {"power_cap": 1}


def test_a_reason_counts_each_time_that_it_begins() -> None:
    """As dcgm-exporter's cumulative counter: what holds at the first look began before it."""
    events = ClockEvents(10)
    assert events.begun("GPU-1") is None
    for taken_at_s, bits in enumerate((0x4, 0x4, 0x4 | 0x40, 0x40, 0x4, 0x4)):
        events.add("GPU-1", bits, float(taken_at_s))
    begun = events.begun("GPU-1")
    assert begun is not None
    assert {name: count for name, count in begun.items() if count} == {"power_cap": 1, "hw_thermal": 1}
    assert begun["hw_slowdown"] == 0  # so that the first one is an increase


def test_what_a_window_forgets_stays_counted_and_did_not_begin_again() -> None:
    events = ClockEvents(1)
    events.add("GPU-1", 0, 0.0)
    for taken_at_s in (1.0, 5.0, 9.0):
        events.add("GPU-1", 0x4, taken_at_s)
    assert events.counts("GPU-1") == {"power_cap": 1}
    assert (events.begun("GPU-1") or {})["power_cap"] == 1
