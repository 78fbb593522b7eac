"""A node's mode by its labels: ours, the vendor's and the vendor's newer one, where they disagree too."""

from __future__ import annotations

import pytest

from gpuslice.core.mode import ComputePolicy, rules_of, wants_agent
from gpuslice.core.model import NodeMode

SHARED, EXCLUSIVE = NodeMode.SHARED, NodeMode.EXCLUSIVE
WITHOUT = NodeMode.SHARED_WITHOUT_ISOLATION


@pytest.mark.parametrize(
    ("labels", "mode"),
    [
        ({}, SHARED),
        ({"cgpu": "true"}, SHARED),
        ({"cgpu": "true", "cgpu.disable.isolation": "true"}, WITHOUT),
        ({"cgpu": "true", "cgpu.disable.isolation": "false"}, SHARED),
        ({"cgpu": "true", "cgpu.disable.isolation": "yes"}, SHARED),
        ({"ack.node.gpu.schedule": "cgpu"}, SHARED),
        ({"ack.node.gpu.schedule": "share"}, WITHOUT),
        ({"ack.node.gpu.schedule": "share", "cgpu.disable.isolation": "false"}, SHARED),
        ({"ack.node.gpu.schedule": "cgpu", "cgpu.disable.isolation": "true"}, WITHOUT),
        ({"ack.node.gpu.schedule": "core_mem"}, SHARED),
        ({"ack.node.gpu.schedule": "default"}, EXCLUSIVE),
        ({"cgpu": "false"}, EXCLUSIVE),
        ({"cgpu": "true", "gpuslice.io/mode": "shared-without-isolation"}, WITHOUT),
        ({"cgpu.disable.isolation": "true", "gpuslice.io/mode": "shared"}, SHARED),
        ({"cgpu": "true", "gpuslice.io/mode": "exclusive"}, EXCLUSIVE),
        ({"cgpu": "true", "gpuslice.io/mode": "typo"}, SHARED),
    ],
)
def test_labels_say_how_cards_are_given_out(labels: dict[str, str], mode: NodeMode) -> None:
    rules = rules_of(labels)
    assert (rules.mode, rules.shared, rules.isolation) == (mode, mode is not EXCLUSIVE, mode is SHARED)
    assert rules.divides_compute == (labels.get("ack.node.gpu.schedule") == "core_mem")


def test_who_divides_compute_by_our_own_label_does_so_too() -> None:
    rules = rules_of({"gpuslice.io/mode": "shared", "ack.node.gpu.schedule": "core_mem"})
    assert (rules.mode, rules.divides_compute) == (SHARED, True)
    assert not rules_of({"cgpu": "false", "ack.node.gpu.schedule": "core_mem"}).divides_compute


@pytest.mark.parametrize(
    ("labels", "policy", "limits"),
    [
        ({}, ComputePolicy.CAP, False),
        ({"ack.node.gpu.schedule": "core_mem"}, ComputePolicy.CAP, True),
        (
            {"ack.node.gpu.schedule": "core_mem", "gpuslice.io/compute-policy": "off"},
            ComputePolicy.OFF,
            False,
        ),
        (
            {"ack.node.gpu.schedule": "core_mem", "gpuslice.io/compute-policy": "fair"},
            ComputePolicy.FAIR,
            True,
        ),
        ({"gpuslice.io/compute-policy": "fair"}, ComputePolicy.FAIR, True),
        ({"cgpu": "true", "gpuslice.io/compute-policy": "Fair"}, ComputePolicy.CAP, False),
        ({"gpuslice.io/mode": "shared", "gpuslice.io/compute-policy": "off"}, ComputePolicy.OFF, False),
    ],
)
def test_a_label_says_what_a_share_of_compute_means(
    labels: dict[str, str], policy: ComputePolicy, limits: bool
) -> None:
    rules = rules_of(labels)
    assert (rules.compute_policy, rules.limits_compute) == (policy, limits)


@pytest.mark.parametrize(
    ("labels", "wanted"),
    [
        ({}, False),
        ({"cgpu": "true"}, True),
        ({"cgpu": "yes"}, False),
        ({"ack.node.gpu.schedule": "cgpu"}, True),
        ({"ack.node.gpu.schedule": "share"}, True),
        ({"ack.node.gpu.schedule": "core_mem"}, True),
        ({"ack.node.gpu.schedule": "default"}, False),
        ({"ack.node.gpu.schedule": "coremem"}, False),
        ({"cgpu": "false", "ack.node.gpu.schedule": "cgpu"}, False),
        (
            {"cgpu": "true", "ack.node.gpu.schedule": "default"},
            True,
        ),  # the agent itself then gives nothing new
        ({"gpushare": "true"}, False),
    ],
)
def test_either_label_brings_an_agent(labels: dict[str, str], wanted: bool) -> None:
    assert wants_agent(labels, "cgpu") is wanted
