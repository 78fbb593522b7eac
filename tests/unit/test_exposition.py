"""The exposition against the reference parser."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from gpuslice.adapters.web.exposition import Family, MetricKind, labels, number, render

texts = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\r\x85\u2028\u2029"))


@given(values=st.dictionaries(st.sampled_from(["pod", "namespace", "uuid"]), texts), value=st.floats())
def test_what_is_written_is_read_back(values: dict[str, str], value: float) -> None:
    family = Family("a_metric", MetricKind.GAUGE, "What it is.")
    family.add(value, labels(values))
    (read,) = text_string_to_metric_families(render([family]).decode())
    (sample,) = read.samples
    assert sample.labels == values
    assert sample.value == value or (math.isnan(value) and math.isnan(sample.value))


@given(texts)
def test_help_stays_on_its_line(text: str) -> None:
    family = Family("a_metric", MetricKind.COUNTER, text, [("", 1)])
    assert render([family]).count(b"\n") == 3


def test_a_family_without_samples_is_absent() -> None:
    assert render([Family("nothing", MetricKind.GAUGE, "None.")]) == b""


def test_bytes_of_a_card_are_written_without_an_exponent() -> None:
    assert number(15811477504.0) == "15811477504"
    assert number(float("-inf")) == "-Inf"
