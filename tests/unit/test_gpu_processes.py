"""How busy the processes of a card are, whatever its driver's clock does."""

from __future__ import annotations

from dataclasses import dataclass, field
from struct import Struct
from typing import Any

from gpuslice.adapters.gpu.processes import ProcessReader

PID = 42
AN_HOUR_S = 3600.0


@dataclass
class Driver:
    """One process on one card, half busy all the time; a sample each second, by the time of day."""

    day_s: float = 1_000_000.0
    samples: list[tuple[int, int, int, int, int, int]] = field(default_factory=list)

    def passes(self, seconds: int = 1) -> None:
        for _ in range(seconds):
            self.day_s += 1
            self.samples.append((PID, int(self.day_s * 1e6) - 1000, 50, 0, 0, 0))

    def array(self, name: str, _: Struct) -> Array:
        return Array(self, name)


@dataclass
class Array:
    driver: Driver
    name: str

    def read(self, card: Any, *more: Any) -> list[tuple[int, ...]]:
        if self.name == "nvmlDeviceGetProcessUtilization":
            return [sample for sample in self.driver.samples if sample[1] > more[0].value]
        return [(PID, 1 << 20, 0, 0)] if "Compute" in self.name and "MPS" not in self.name else []


def reader_of(driver: Driver) -> ProcessReader:
    return ProcessReader("card", "GPU-1", array=driver.array, wall=lambda: driver.day_s)


def test_a_busy_process_is_busy_after_the_time_of_day_was_set_back() -> None:
    driver = Driver()
    reader, now_s = reader_of(driver), 0.0
    driver.passes(3)
    assert [each.sm_ratio for each in reader.read(now_s)] == [0.5]
    driver.day_s -= AN_HOUR_S
    seen = []
    for _ in range(5):
        driver.passes()
        now_s += 1
        seen += [each.sm_ratio for each in reader.read(now_s)]
    assert seen == [0.5] * 5


def test_a_process_that_is_idle_since_the_time_was_set_back_is_not_busy_by_what_it_did_before() -> None:
    driver = Driver()
    reader = reader_of(driver)
    driver.passes(3)
    reader.read(0.0)
    driver.day_s -= AN_HOUR_S
    seen = []
    for now_s in (1.0, 2.0, 3.0, 4.0, 5.0):
        driver.day_s += 1
        seen += [each.sm_ratio for each in reader.read(now_s)]
    assert seen[-1] == 0.0


def test_one_sample_of_the_future_does_not_hide_those_that_follow() -> None:
    driver = Driver()
    reader, now_s = reader_of(driver), 0.0
    driver.passes()
    driver.samples.append((PID, 1 << 62, 50, 0, 0, 0))
    reader.read(now_s)
    driver.samples.pop()
    for _ in range(5):
        driver.passes()
        now_s += 1
        readings = reader.read(now_s)
    assert [each.sm_ratio for each in readings] == [0.5]


def test_what_was_seen_is_not_seen_again() -> None:
    driver = Driver()
    reader = reader_of(driver)
    driver.passes()
    assert [each.sm_ratio for each in reader.read(0.0)] == [0.5]
    driver.day_s += 10
    assert [each.sm_ratio for each in reader.read(10.0)] == [0.0]
