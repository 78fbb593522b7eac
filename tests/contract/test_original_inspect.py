"""The open-source ``kubectl-inspect-gpushare`` prints what ours prints, of whatever cluster.

Set GPUSLICE_ORIGINAL_INSPECT to a build of that program (AliyunContainerService/gpushare-device-plugin). It
walks through nodes and pods in the random order of a Go map, so lines are compared as sets.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from simcluster.apiserver.server import ApiServer
from tests.contract.random_api import lines_of, printed, some_cluster

ORIGINAL = os.environ.get("GPUSLICE_ORIGINAL_INSPECT", "")
OURS = Path(sys.executable).parent / "kubectl-inspect-gpushare"

if not ORIGINAL:
    pytest.skip("GPUSLICE_ORIGINAL_INSPECT is not set", allow_module_level=True)


@pytest.mark.parametrize("seed", range(25))
async def test_the_original_prints_the_same(seed: int, tmp_path: Path) -> None:
    api, config = some_cluster(seed), tmp_path / "config"
    async with ApiServer(api.cluster) as server:
        config.write_text(server.kubeconfig())
        for words in ([], ["-d"]):
            ours, theirs = await printed(OURS, config, *words), await printed(ORIGINAL, config, *words)
            if not ours:
                assert "0/0 (0%)" in theirs  # an empty table, where ours says on stderr what to do
            else:
                assert lines_of(ours) == lines_of(theirs)
