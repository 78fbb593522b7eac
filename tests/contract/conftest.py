"""What the tests of contracts share."""

from __future__ import annotations

import pytest

from tests import tools


@pytest.fixture(scope="session")
def helm() -> str:
    return str(tools.find("helm"))
