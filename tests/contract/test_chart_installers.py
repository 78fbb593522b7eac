"""The vendor's two installers, as the chart brings them by one value."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path

import pytest
import yaml
from kubectl_rig import kubectl_rig

from gpuslice.apps.agent.command import command as agent_command
from gpuslice.apps.agent.command import install_extender as install_extender_command
from gpuslice.apps.agent.command import install_library as install_library_command
from tests.chart import CHART, KUBE_SCHEDULER, NAMED, documents, render


def test_without_a_second_scheduler_only_the_vendors_objects_are_left(helm: str) -> None:
    objects = set(render(helm, "--set", "scheduler.enabled=false", "--no-hooks"))
    plugins = {"gpushare-device-plugin-ds", "device-plugin-evict-ds", "device-plugin-recover-ds"}
    extender = "gpushare-schd-extender"
    accounts = ("gpushare-device-plugin", extender)
    kinds = ("ServiceAccount", "ClusterRole", "ClusterRoleBinding")
    vendors = {("Deployment", extender), ("Service", extender), *(("DaemonSet", name) for name in plugins)}
    vendors |= {(kind, name) for kind in kinds for name in accounts}
    assert objects - vendors == {
        *(("DaemonSet", f"{name.removesuffix('-ds')}-ack-ds") for name in plugins),  # by ACK's label
        *((kind, name) for kind in ("Role", "RoleBinding") for name in (*accounts, f"{extender}-lease")),
        ("ValidatingAdmissionPolicy", "gpuslice-agent-own-node"),  # what an agent's account may write
        ("ValidatingAdmissionPolicyBinding", "gpuslice-agent-own-node"),
        ("ValidatingAdmissionPolicy", "gpuslice-annotations"),  # and what nobody but us
        ("ValidatingAdmissionPolicyBinding", "gpuslice-annotations"),
        ("ClusterRole", "gpuslice-viewer"),  # what the command line reads
        *(("Secret", f"{extender}-{side}") for side in ("tls", "client")),
    }
    assert vendors <= objects


def test_with_the_installers_every_object_of_the_vendor_is_there(helm: str) -> None:
    """What `helm get manifest` lists: hooks are not in it."""
    objects = render(helm, "--set", "installers.enabled=true,scheduler.enabled=false", "--no-hooks")
    for kind in ("ServiceAccount", "ClusterRole", "ClusterRoleBinding"):
        assert {(kind, "gpushare-device-plugin"), (kind, "gpushare-schd-extender")} <= objects.keys()
    for name in ("cgpu-installer", "device-plugin-evict-ds", "gpushare-device-plugin-ds"):
        assert objects["DaemonSet", name]["spec"]["template"]["spec"]["nodeSelector"] == {"cgpu": "true"}
    pod = objects["DaemonSet", "cgpu-installer"]["spec"]["template"]
    assert pod["metadata"]["labels"]["name"] == "cgpu-installer"
    (container,) = pod["spec"]["containers"]
    install_library_command.make_context("install-library", list(container["args"][1:]))
    job = objects["Job", "gpushare-installer"]["spec"]
    assert job["parallelism"] == 3
    assert "completions" not in job
    (container,) = job["template"]["spec"]["containers"]
    parsed = install_extender_command.make_context("install-extender", list(container["args"][1:])).params
    assert not parsed["back"]
    (agent,) = objects["DaemonSet", "gpushare-device-plugin-ds"]["spec"]["template"]["spec"]["containers"]
    assert (
        agent_command.make_context("agent", [*agent["args"][1:], "--node-name=n"]).params["install_library"]
        is False
    )
    (mount,) = [each for each in agent["volumeMounts"] if each["name"] == "library"]
    assert mount["readOnly"] is True


def test_the_notes_leave_the_schedulers_of_masters_to_the_job(helm: str) -> None:
    command = [helm, "install", "cgpu", str(CHART), "--dry-run=client", "-n", "kube-system", *NAMED]
    command += ["--set", "installers.enabled=true,scheduler.enabled=false,installers.masters=5"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    notes = printed[printed.index("\nNOTES:") :]
    assert "kubectl -n kube-system get job gpushare-installer      # 5/1 of 5" in notes
    assert "extenders:" not in notes


def test_the_section_for_masters_is_the_second_schedulers(helm: str) -> None:
    objects = render(helm, "--set", "installers.enabled=true")
    told = yaml.safe_load(objects["ConfigMap", "gpushare-installer"]["data"]["section.yaml"])
    (ours,) = yaml.safe_load(objects["ConfigMap", KUBE_SCHEDULER]["data"]["config.yaml"])["extenders"]
    assert told.pop("urlPrefix") == "https://127.0.0.1:32766/gpushare-scheduler"
    ours.pop("urlPrefix")
    assert told == ours


@pytest.mark.parametrize(("release", "undone"), [("cgpu", "post-upgrade"), ("vendor", None)])
async def test_without_the_value_what_this_release_installed_is_undone_and_nobody_elses(
    helm: str, tmp_path: Path, release: str, undone: str | None
) -> None:
    """The vendor's own chart has a Job of the same name, in the cluster that somebody migrates."""
    owned = {"annotations": {"meta.helm.sh/release-name": release}}
    template = {"spec": {"restartPolicy": "Never", "containers": [{"name": "a", "image": "b"}]}}
    metadata = {"name": "gpushare-installer", "namespace": "kube-system", **owned}
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": {"template": template}}
    async with kubectl_rig(tmp_path) as rig:
        await rig.ok("create", "-f", "-", text=json.dumps(job))
        asked = ("template", "cgpu", str(CHART), "--namespace=kube-system", *NAMED, "--dry-run=server")
        process = await asyncio.create_subprocess_exec(
            helm, *asked, "--is-upgrade", "--set=devicePlugin.ownNodeOnly=false",  # the rig has no policies
            env={"KUBECONFIG": str(tmp_path / "config"), "HOME": str(tmp_path)},
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    jobs = {
        each["metadata"]["name"]: each["metadata"]["annotations"]["helm.sh/hook"]
        for each in documents(out.decode())
        if each["kind"] == "Job"
    }
    assert jobs.get("gpushare-installer-back") == undone


def test_upgrades_clear_the_way_for_the_job_and_removal_undoes_it(helm: str) -> None:
    command = [helm, "template", "cgpu", str(CHART), *NAMED, "--set", "installers.enabled=true"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    jobs = [each for each in yaml.safe_load_all(text) if each and each["kind"] == "Job"]
    hooks = {
        each["metadata"]["annotations"]["helm.sh/hook"]: each
        for each in jobs
        if "annotations" in each["metadata"]
    }
    assert hooks["pre-upgrade,pre-rollback"]["metadata"]["name"] == "gpushare-installer"
    assert hooks["pre-upgrade,pre-rollback"]["spec"]["completions"] == 0, "it runs no pod"
    (container,) = hooks["pre-delete"]["spec"]["template"]["spec"]["containers"]
    assert install_extender_command.make_context("x", [*container["args"][1:], "--node-name=n"]).params[
        "back"
    ]
