"""Whether the extenders of tests have what only saves time: not with ``pytest --without-speedups``.

Without it the same pods must get the same cards, only later, so all suites of scheduling pass either way.
"""

from __future__ import annotations

import os

VARIABLE = "GPUSLICE_TESTS_WITHOUT_SPEEDUPS"
ABOUT_SPEEDUPS = (
    "test_extender_nomination",
    "test_nomination_leavers",
    "test_extender_batch_preemption",
    "test_batch_preemption_stories",
)
"""Files that test them, and so need them."""


def with_speedups() -> bool:
    return VARIABLE not in os.environ
