"""The real kubectl against a simulated node: logs, exec, and the seeds' programs on a simulated card."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from simcluster import gpu
from tests import HANG_S
from tests.integration.sim_node import NATIVE, Node, make_pod, simulated_node, state_of

KUBECTL = Path(sys.executable).parent / "kubectl"
pytestmark = pytest.mark.skipif(
    not (NATIVE / "libcuda.so.1").exists() or not KUBECTL.exists(),
    reason="needs `make native` and the kubectl of `make setup`",
)
SEEDS = "registry.cn-shanghai.aliyuncs.com/tensorflow-samples"


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    state = gpu.create(tmp_path / "gpus", ["V100-SXM2-16GB"])
    async with simulated_node(tmp_path, driver=NATIVE, gpu_state=state) as one:
        (tmp_path / "kubeconfig").write_text(one.server.kubeconfig())
        yield one


def kubectl_environment(node: Node) -> dict[str, str]:
    folder = node.settings.root.parent
    return {"KUBECONFIG": str(folder / "kubeconfig"), "HOME": str(folder), "PATH": os.environ["PATH"]}


async def kubectl(node: Node, *arguments: str, stdin: bytes = b"") -> tuple[int, str]:
    """Exit status and everything that was printed."""
    process = await asyncio.create_subprocess_exec(
        KUBECTL,
        *arguments,
        env=kubectl_environment(node),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await asyncio.wait_for(process.communicate(stdin), HANG_S)
    assert process.returncode is not None
    return process.returncode, output.decode()


def visible(image: str, **container: object) -> dict[str, object]:
    env = [
        {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"},
        {"name": "ALIYUN_COM_GPU_MEM_DEV", "value": "15"},
        {"name": "ALIYUN_COM_GPU_MEM_CONTAINER", "value": "3"},
    ]
    return {"image": image, "command": None, "env": env, **container}


async def used_mib(node: Node, pod: str, wanted: int) -> None:
    """Waits until nvidia-smi in the pod shows `wanted`."""
    query = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
    deadline = asyncio.get_running_loop().time() + HANG_S
    while True:
        _, shown = await kubectl(node, "exec", pod, "--", *query)
        if shown.strip() == str(wanted):
            return
        assert asyncio.get_running_loop().time() < deadline, (
            f"nvidia-smi shows {shown.strip()} MiB, not {wanted}"
        )


async def test_a_port_of_a_pod_is_forwarded(node: Node) -> None:
    """The notebook listens on its pod's own address; several connections at once, and one to no listener."""
    await node.create(
        make_pod("notebook", container={"image": "tensorflow/tensorflow:1.4.1-gpu-py3", "command": None})
    )
    await node.wait_pod("notebook", lambda it: state_of(it) == "running")
    following = kubectl(node, "logs", "-f", "--limit-bytes=20", "notebook")
    assert (await following)[1].startswith("[I NotebookApp]")
    config = node.settings.root.parent / "kubeconfig"
    process = await asyncio.create_subprocess_exec(
        KUBECTL, "port-forward", "pod/notebook", ":8888", ":1",
        env={"KUBECONFIG": str(config), "HOME": str(config.parent)},
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    ports: dict[str, int] = {}
    while len(ports) < 2:
        line = (await asyncio.wait_for(process.stdout.readline(), HANG_S)).decode()
        if found := re.search(r"127\.0\.0\.1:(\d+) -> (\d+)", line):
            ports[found[2]] = int(found[1])
    async with aiohttp.ClientSession() as session:
        for pages in (1, 8):
            answers = [session.get(f"http://127.0.0.1:{ports['8888']}/tree") for _ in range(pages)]
            for answer in await asyncio.gather(*answers):
                assert "Jupyter Notebook" in await answer.text()
        with pytest.raises(aiohttp.ClientError):
            await session.get(f"http://127.0.0.1:{ports['1']}/")
    with contextlib.suppress(ProcessLookupError):  # some kubectl end when one of the ports has no listener
        process.terminate()
    await process.communicate()


async def test_logs_follow_previous_and_tail(node: Node) -> None:
    await node.create(make_pod("one", command="echo first; echo second >&2; sleep 0.2; exit 1"))
    await node.wait_pod("one", lambda it: state_of(it) == "CrashLoopBackOff")
    assert await kubectl(node, "logs", "one", "--tail=1", "--previous") == (0, "second\n")
    await node.create(
        make_pod("two", command="for n in 1 2 3; do echo $n; sleep 0.1; done", restartPolicy="Never")
    )
    await node.wait_pod("two", lambda it: state_of(it) == "running")
    assert await kubectl(node, "logs", "-f", "two") == (0, "1\n2\n3\n")


async def test_logs_of_a_container_that_never_started_say_why(node: Node) -> None:
    await node.create(make_pod("one", container={"image": "nowhere.example/none:1"}))
    await node.wait_pod("one", lambda it: state_of(it) == "ImagePullBackOff")
    code, text = await kubectl(node, "logs", "one")
    assert code == 1
    assert text == (
        'Error from server (BadRequest): container "main" in pod "one" is waiting to start: '
        "trying and failing to pull image\n"
    )


async def test_exec_carries_streams_and_the_exit_status(node: Node) -> None:
    await node.create(make_pod("one"))
    await node.wait_pod("one", lambda it: state_of(it) == "running")
    assert await kubectl(node, "exec", "-i", "one", "--", "cat", stdin=b"through\n") == (0, "through\n")
    odd = "a & b=1 + %41\nc"  # what means something in an address
    assert await kubectl(node, "exec", "one", "--", "printf", "%s", odd) == (0, odd)
    code, text = await kubectl(node, "exec", "one", "--", "sh", "-c", "echo out; exit 5")
    assert (code, text) == (5, "out\ncommand terminated with exit code 5\n")
    code, text = await kubectl(node, "exec", "one", "--", "no-such-program")
    assert code != 0
    assert "executable file not found" in text


async def test_debug_starts_a_container_in_a_pod_that_runs(node: Node) -> None:
    """It has no card, and ends without its pod."""
    await node.create(make_pod("one"))
    await node.wait_pod("one", lambda it: state_of(it) == "running")
    code, text = await kubectl(
        node, "debug", "one", "--image=busybox", "-c", "look", "--", "sh", "-c", "echo seen"
    )
    assert code == 0, text

    def ended(pod: dict[str, Any]) -> bool:
        found = pod["status"].get("ephemeralContainerStatuses") or [{}]
        return "terminated" in found[0].get("state", {})

    pod = await node.wait_pod("one", ended)
    assert state_of(pod) == "running"
    assert (await kubectl(node, "logs", "one", "-c", "look"))[1] == "seen\n"
    code, text = await kubectl(node, "delete", "pod", "one", "--wait=true")
    assert code == 0, text


@pytest.mark.skipif(shutil.which("script") is None, reason="needs script(1) of bsdutils for a terminal")
async def test_exec_gives_a_terminal(node: Node) -> None:
    await node.create(make_pod("one"))
    await node.wait_pod("one", lambda it: state_of(it) == "running")
    process = await asyncio.create_subprocess_exec(
        "script", "-qec", f"{KUBECTL} exec -it one -- sh", "/dev/null",
        env={**kubectl_environment(node), "TERM": "dumb"},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    output, _ = await asyncio.wait_for(process.communicate(b"tty; echo sum $((40 + 2)); exit\n"), HANG_S)
    assert b"/dev/pts/" in output
    assert b"sum 42" in output


async def test_the_seeds_programs_use_what_their_documents_show(node: Node) -> None:
    await node.create(make_pod("alloc", container=visible(f"{SEEDS}/cuda-malloc:3G")))
    await used_mib(node, "alloc", 3193 + 10)  # the idle card's 10 MiB: nothing isolates here
    code, _ = await kubectl(node, "delete", "pod", "alloc", "--grace-period=1")
    assert code == 0
    await node.create(make_pod("player", container=visible("cheyang/gpu-player:v2")))
    await used_mib(node, "player", 1929)
    assert await node.log("player") == "0.1\n"


async def test_a_program_that_wants_too_much_crashes_with_the_seeds_sentence(node: Node) -> None:
    for name in ("one", "two"):
        await node.create(make_pod(name, container=visible(f"{SEEDS}/cuda-malloc:6G")))
        await node.wait_pod(name, lambda it: state_of(it) == "running")
    await used_mib(node, "one", 2 * (6144 + 121) + 10)
    await node.create(make_pod("three", container=visible(f"{SEEDS}/cuda-malloc:6G")))
    await node.wait_pod("three", lambda it: state_of(it) == "CrashLoopBackOff")
    assert await node.log("three") == (
        "CUDA error at cgpu_cuda_malloc.cu:119 code=2(cudaErrorMemoryAllocation) "
        '"cudaMalloc( (void**)&dev_c, malloc_size)"\n'
    )


async def test_a_list_of_objects_is_applied_like_a_file_of_them(node: Node) -> None:
    items = [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"of": name}}
        for name in ("one", "two")
    ]
    document = json.dumps({"apiVersion": "v1", "kind": "List", "items": items}).encode()
    code, text = await kubectl(node, "apply", "-f", "-", stdin=document)
    assert (code, text) == (0, "configmap/one created\nconfigmap/two created\n")
