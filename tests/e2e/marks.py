"""Where the tests of this folder run: on a control plane, else they are skipped and say why."""

from __future__ import annotations

import pytest

from tests.e2e import control_plane

ON_A_CONTROL_PLANE = [
    pytest.mark.e2e,
    pytest.mark.skipif(bool(control_plane.missing()), reason=control_plane.missing()),
]
