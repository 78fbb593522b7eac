"""The columns ``kubectl get`` shows: the server prints them, kind by kind."""

from __future__ import annotations

from gpuslice.sim.cluster.request import Object
from gpuslice.sim.cluster.resources import Resource
from gpuslice.sim.cluster.tables.column import Column, Printer
from gpuslice.sim.cluster.tables.core import CORE
from gpuslice.sim.cluster.tables.rest import DEFAULT, REST
from gpuslice.sim.cluster.tables.workloads import WORKLOADS

_PRINTERS = {**CORE, **WORKLOADS, **REST}


def printer_of(resource: Resource) -> Printer:
    return _PRINTERS.get(resource.store, DEFAULT)


def definitions(printer: Printer) -> list[Object]:
    return [column.definition() for column in printer.columns]


__all__ = ["Column", "Printer", "definitions", "printer_of"]
