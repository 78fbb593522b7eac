"""Ports that are chosen before their server is started."""

from __future__ import annotations

import random
import socket

import pytest

from gpuslice_demo.ports import OURS, RANGE, free_port


@pytest.mark.skipif(int(RANGE.read_text().split()[0]) < OURS.stop, reason="this system gives out all ports")
def test_a_port_that_was_chosen_is_given_to_nobody_who_asks_for_any() -> None:
    """A server on port 0 and each connection that is opened get theirs from the system's range."""
    assert {free_port() in OURS for _ in range(100)} == {True}


def test_a_port_in_use_is_not_chosen() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))
        assert taken.getsockname()[1] not in {free_port() for _ in range(300)}


def test_programs_that_were_seeded_alike_do_not_choose_the_same_ports() -> None:
    def chosen() -> list[int]:
        random.seed(1)
        return [free_port() for _ in range(5)]

    assert chosen() != chosen()


def test_where_the_system_gives_out_all_ports_one_of_these_is_chosen() -> None:
    assert free_port(given_out_from=1024) >= 1024
