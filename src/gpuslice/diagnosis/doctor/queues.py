"""Checks of what Kueue learns of cards."""

from __future__ import annotations

from collections.abc import Iterator

from gpuslice.adapters.kube.kueue import ADMISSION_CHECKS
from gpuslice.core.contract import CARD_FIT
from gpuslice.diagnosis.doctor.facts import Facts, Finding, Level, answers_kueue


def card_fit(facts: Facts) -> Iterator[Finding]:
    """An extender that answers Kueue, and no check that asks it."""
    asked = {each["spec"].get("controllerName") for each in facts.admission_checks}
    if CARD_FIT in asked or not facts.knows(ADMISSION_CHECKS) or not any(map(answers_kueue, facts.own_pods)):
        return
    yield Finding(
        Level.WARNING,
        "AdmissionCheck",
        f"of controller {CARD_FIT} does not exist: Kueue admits by sums alone what no card can hold",
        "create one and name it in the ClusterQueues (docs/operate/dra.md#quota-and-queues), or set "
        "extender.cardFit=false",
    )
