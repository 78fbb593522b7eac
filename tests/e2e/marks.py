"""Where the tests of this folder run: on a control plane, else they are skipped and say why."""

from __future__ import annotations

import pytest

from tests.e2e import control_plane

ON_A_CONTROL_PLANE = [
    pytest.mark.e2e,
    pytest.mark.skipif(bool(control_plane.missing()), reason=control_plane.missing()),
]
_KNOWS_CLAIMS = control_plane.missing() != "" or control_plane.minor_version() >= 34
WHERE_CLAIMS_ARE_KNOWN = [
    *ON_A_CONTROL_PLANE,
    pytest.mark.skipif(not _KNOWS_CLAIMS, reason="there are no claims before Kubernetes 1.34"),
]
