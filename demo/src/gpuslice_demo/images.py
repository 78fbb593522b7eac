"""The images of the chart as programs of this machine: gpuslice's own, and kube-scheduler."""

from __future__ import annotations

import sys

from gpuslice import __version__
from gpuslice_demo.places import Places
from simcluster.workload.images import Image

IMAGE = f"registry.example.com/gpuslice:{__version__}"
PROFTESTER = "nvidia/samples:dcgmproftester-2.0.10-cuda11.0-ubuntu18.04"
_RUN = "from gpuslice.apps.cli.main import main; main()"
# the agent's folder is one of this machine, where we may mount nothing
_RUN_HERE = f"import sys; sys.argv += ['--no-region-file-system'] * (sys.argv[1:2] == ['agent']); {_RUN}"
_KUBELET = "/var/lib/kubelet"
_PATHS = {  # our programs' defaults: paths of a container, which are others on this machine
    "GPUSLICE_ROOT": "/var/lib/gpuslice",
    "GPUSLICE_DEVICE_PLUGIN_FOLDER": f"{_KUBELET}/device-plugins",
    "GPUSLICE_POD_RESOURCES_SOCKET": f"{_KUBELET}/pod-resources/kubelet.sock",
    "GPUSLICE_POD_RESOURCES_KUBELET_SOCKET": f"{_KUBELET}/pod-resources/kubelet.sock",
    "GPUSLICE_DRA_PLUGINS": f"{_KUBELET}/plugins",
    "GPUSLICE_DRA_REGISTRY": f"{_KUBELET}/plugins_registry",
    "GPUSLICE_CDI_FOLDER": "/var/run/cdi",
    "GPUSLICE_UNHEALTHY_FILE": "/etc/nvidia-device-plugin/unhealthyDevices.json",
}
_SOONER = {"GPUSLICE_EVERY_S": "0.5", "GPUSLICE_POD_RESOURCES_INTERVAL_S": "0.5"}  # nobody wants to wait here


def images(places: Places) -> dict[str, Image]:
    """By the last part of their names. Our load generator stands in for DCGM's."""
    network = {"LD_PRELOAD": str(places.driver / "libsimnet.so")}
    ours = Image(
        entrypoint=(sys.executable, "-c", _RUN_HERE),
        env={**network, **_SOONER},
        programs={"/usr/share/gpuslice/lib/libgpuslice.so": places.library},
        paths=_PATHS,
    )
    scheduler = places.folder / "kube-scheduler"
    scheduler.write_text(f'#!/bin/sh\nexec {sys.executable} -m simcluster.scheduler "$@"\n')
    scheduler.chmod(0o755)
    return {
        IMAGE.rpartition("/")[2]: ours,
        "kube-scheduler": Image(env=network, programs={"/usr/local/bin/kube-scheduler": scheduler}),
        PROFTESTER: Image(entrypoint=(sys.executable, "-c", _RUN, "load")),
    }
