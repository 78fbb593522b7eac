"""The columns ``kubectl get`` shows: the server prints them, kind by kind."""

from __future__ import annotations

from ..request import Object
from ..resources import Resource
from .column import Column, Printer
from .core import CORE
from .rest import DEFAULT, REST
from .workloads import WORKLOADS

_PRINTERS = {**CORE, **WORKLOADS, **REST}


def printer_of(resource: Resource) -> Printer:
    return _PRINTERS.get(resource.store, DEFAULT)


def definitions(printer: Printer) -> list[Object]:
    return [column.definition() for column in printer.columns]


__all__ = ["Column", "Printer", "definitions", "printer_of"]
