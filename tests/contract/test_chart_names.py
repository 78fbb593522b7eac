"""The chart knows the names of ours that are protected from the one list of them.

python -m tests.contract.test_chart_names    # writes the chart's file anew
"""

from __future__ import annotations

from collections.abc import Iterable

from gpuslice.core import contract
from gpuslice.core.annotations import PLACEMENT_ANNOTATIONS
from gpuslice.core.container_files import OUR_PATHS
from gpuslice.core.contract import AGENT, NODE_ANNOTATION_WRITERS, POD_ANNOTATION_WRITERS
from tests.chart import CHART

FILE = CHART / "templates" / "_contract.tpl"
OF_AUTHORS = {
    contract.ANN_LATENCY_CLASS,
    contract.ANN_REQUEST,
    contract.ANN_LIMIT,
    contract.ANN_SHOWN_MEMORY,
    contract.ANN_ADVICE,
    contract.ANN_WHEN_IDLE,
    contract.ANN_IDLE_AFTER,
    contract.ANN_PARK,
}
"""Annotations that who makes a pod writes."""
SLASH = r"/+(\./+)*"  # as in a path that nobody has cleaned
OF_OTHER_OBJECTS = {contract.ANN_MIGRATION}


def text() -> str:
    def listed(name: str, names: Iterable[str]) -> str:
        words = ", ".join(f"'{each}'" for each in names)
        return f'{{{{- define "gpuslice.{name}" -}}}}\n[{words}]\n{{{{- end }}}}\n'

    def of_agent(writers: dict[str, tuple[str, ...]]) -> Iterable[str]:
        return (name for name, who in writers.items() if AGENT in who)

    ours = (SLASH.join(each.strip("/").replace(".", r"\.").split("/")) for each in OUR_PATHS)
    processes = SLASH.join(("proc", "(self|thread-self|[0-9]+)"))
    hiding = rf"^/*(\./+)*({'|'.join((*ours, processes))})(/|$)|(^|/)\.\.(/|$)"
    return "\n".join(
        (
            "{{- /* Written by tests/contract/test_chart_names.py from core/contract.py: lists of CEL. */}}",
            listed("podAnnotations", POD_ANNOTATION_WRITERS),
            listed("podAnnotationsOfAgent", of_agent(dict(POD_ANNOTATION_WRITERS))),
            listed("nodeAnnotationsOfAgent", of_agent(dict(NODE_ANNOTATION_WRITERS))),
            listed("nodeAmountsOfAgent", contract.NODE_AMOUNTS_OF_AGENT),
            f"{{{{- define \"gpuslice.hidingPath\" -}}}}\nr'{hiding}'\n{{{{- end }}}}\n",
        )
    )


def test_the_chart_has_the_names_of_the_contract() -> None:
    assert FILE.read_text() == text(), "python -m tests.contract.test_chart_names"


def test_each_annotation_of_ours_has_its_writers() -> None:
    ours = {value for name, value in vars(contract).items() if name.startswith("ANN_")}
    assert ours == {*POD_ANNOTATION_WRITERS, *OF_AUTHORS, *OF_OTHER_OBJECTS}
    assert set(PLACEMENT_ANNOTATIONS) <= set(POD_ANNOTATION_WRITERS)
    nodes = {
        value for name, value in vars(contract).items() if name.startswith("NODE_") and isinstance(value, str)
    }
    assert nodes == set(NODE_ANNOTATION_WRITERS)


if __name__ == "__main__":
    FILE.write_text(text())
