"""The columns ``kubectl get`` shows: the server prints them, kind by kind."""

from __future__ import annotations

from simcluster.cluster.request import Object
from simcluster.cluster.resources import Resource
from simcluster.cluster.tables.column import Column, Printer
from simcluster.cluster.tables.core import CORE
from simcluster.cluster.tables.rest import DEFAULT, REST
from simcluster.cluster.tables.workloads import WORKLOADS

_PRINTERS = {**CORE, **WORKLOADS, **REST}


def printer_of(resource: Resource) -> Printer:
    return _PRINTERS.get(resource.store, DEFAULT)


def definitions(printer: Printer) -> list[Object]:
    return [column.definition() for column in printer.columns]


__all__ = ["Column", "Printer", "definitions", "printer_of"]
