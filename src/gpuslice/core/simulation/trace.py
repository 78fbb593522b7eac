"""Workload traces in the form of the public openb traces: a list of nodes and a list of pods, as CSV.

Nodes: `sn,cpu_milli,memory_mib,gpu,model`. Pods: `name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec`; a
card has 1000 milli, `gpu_spec` lists allowed models as `A|B`. Further columns are ignored.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from gpuslice.core.errors import ContractError
from gpuslice.core.policy.fleet import Fleet, FleetNode, Shape

CARD_MILLI = 1000
MOST_CARDS = 1024  # of one node: no machine has as many, and each costs every node of the fleet
MOST = 10**15  # of anything else


@dataclass(frozen=True, slots=True)
class Trace:
    """The pods of a trace in file order, as shapes; equal ones are one object. Units: milli of a card."""

    name: str
    shapes: tuple[Shape, ...]

    @property
    def units(self) -> int:
        return sum(shape.total_units for shape in self.shapes)


def read_pods(lines: Iterable[str], name: str) -> Trace:
    """The pods of a CSV file; ContractError names the line and field that cannot be read."""
    known: dict[Shape, Shape] = {}
    shapes = []
    for where, row in _rows(lines, name):
        cards = _whole(row, "num_gpu", where)
        shape = Shape(
            units=_whole(row, "gpu_milli", where) if cards else 0,
            cards=cards,
            cpu_milli=_whole(row, "cpu_milli", where, rounded=True),
            memory_mib=_whole(row, "memory_mib", where, rounded=True),
            models=frozenset(model for model in (row.get("gpu_spec") or "").split("|") if model),
        )
        if cards and not 0 < shape.units <= CARD_MILLI:
            raise ContractError(f"{where} gpu_milli", shape.units, f"1 to {CARD_MILLI}")
        shapes.append(known.setdefault(shape, shape))
    if not shapes:
        raise ContractError(name, "", "a header and at least one pod")
    return Trace(name, tuple(shapes))


def read_nodes(lines: Iterable[str], name: str) -> list[FleetNode]:
    """The nodes of a CSV file that have cards; ContractError names the line and field that cannot be read."""
    nodes = []
    for where, row in _rows(lines, name):
        cards = _whole(row, "gpu", where, MOST_CARDS)
        cpu, memory = (_whole(row, field, where, rounded=True) for field in ("cpu_milli", "memory_mib"))
        size = (CARD_MILLI,) * cards
        model = row.get("model") or ""
        node = FleetNode(row.get("sn") or where, size, size, (), model, cpu, memory, cpu, memory)
        if cards:
            nodes.append(node)
    if not nodes:
        raise ContractError(name, "", "a header and at least one node with cards")
    return nodes


def read_samples(lines: Iterable[str], name: str) -> dict[tuple[str, float], float]:
    """Values by pod and time; ContractError names the line that cannot be read."""
    found = {}
    for where, row in _rows(lines, name):
        try:
            at_s, value = float(row["timestamp_anon"]), float(row["value"])
            found[row["container_ip"], at_s] = value
        except (KeyError, TypeError, ValueError):
            raise ContractError(
                where, ",".join(map(str, row.values())), "container_ip,timestamp_anon,value"
            ) from None
        if not (math.isfinite(at_s) and 0 <= value < MOST * CARD_MILLI):
            raise ContractError(f"{where} value", value, "a time, and a number that is not negative")
    return found


def fleet_of(nodes: Sequence[FleetNode]) -> Fleet:
    """A fleet of these nodes, rows in their order."""
    fleet = Fleet()
    for node in nodes:
        fleet.put(node)
    return fleet


def _rows(lines: Iterable[str], name: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Each line of a file, and where it is. Columns may have any case; what divides them is found out."""
    rest = iter(lines)
    header = next(rest, "")
    separator = max(",;\t", key=header.count)
    columns = [column.strip().lower() for column in next(csv.reader([header], delimiter=separator), [])]
    reader = csv.DictReader(rest, columns, delimiter=separator)
    for row in reader:
        yield f"{name}:{reader.line_num + 1}", row


def _whole(row: dict[str, str], field: str, where: str, most: int = MOST, *, rounded: bool = False) -> int:
    """`rounded`: a fraction is rounded up, and else refused: half a card is 500 of `gpu_milli`."""
    if field not in row:
        columns = ", ".join(map(str, row))
        raise ContractError(f"{where.rpartition(':')[0]} columns", columns, f"one named {field}")
    value = row[field] or ""  # None where the line is too short
    try:
        number = math.ceil(float(value))
    except (ValueError, OverflowError):
        raise ContractError(f"{where} {field}", value, "a whole number") from None
    if number < 0:
        raise ContractError(f"{where} {field}", value, "a number that is not negative")
    if number > most:
        raise ContractError(f"{where} {field}", value, f"at most {most}")
    if number != float(value) and not rounded:
        raise ContractError(f"{where} {field}", value, "a whole number")
    return number
