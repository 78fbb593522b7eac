"""Questions that users ask: docs/faq.md leads each to one section, and that section holds the answer."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
FAQ = ROOT / "docs/faq.md"
FEWEST = 60
LONGEST_WORDS = 1100
ALIKE = 0.6
"""Of the telling words of two questions, the part that both have."""
COMMON = frozenset(
    re.findall(r"\w+", "a an are can do does how i in is it me my of on or the to what when which who why")
)

ANSWERS: dict[str, tuple[str, ...]] = {
    # writing a pod
    "How do I request part of a card?": ("aliyun.com/gpu-mem", "a whole number from 1"),
    "Why do 4 units give my pod 4301 MiB?": ("16130 MiB has 15 units", "4301 MiB"),
    "How do I request a share of compute?": (
        "aliyun.com/gpu-core.percentage",
        "ack.node.gpu.schedule=core_mem",
    ),
    "Which label gives one pod two cards?": ('aliyun.com/gpu-count: "2"',),
    "Can I change the memory of a running pod?": ("gpuslice resize", "needs room on the pod's card"),
    "Can a pod use memory that nobody requested?": ("gpuslice.io/memory-limit", "borrow"),
    "Which borrower is ended first?": ("First the lowest priority of a pod",),
    "How do pods start all together or not at all?": ("pod-group.scheduling.sigs.k8s.io/min-available",),
    "Which policy lends idle compute to others?": ("`fair`", "all of it while nobody else wants it"),
    "How do I keep my pod off nodes without limits?": ("gpuslice.io/min-tier: library",),
    "How much should I request?": ("Request the peak plus 10 %",),
    "Are there manifests for vLLM, Triton, Ray and Kueue?": (
        "serving/vllm.yaml",
        "serving/triton.yaml",
        "training/raycluster.yaml",
        "queues/kueue.yaml",
    ),
    "Why does my Deployment's update hang on full cards?": ("maxSurge: 0",),
    "Does a pod get cards that are linked by NVLink?": ("the cards whose slowest link is fastest",),
    "Can I share a card without Kubernetes?": ("gpuslice run --mem 4",),
    # when something does not work
    "Why does my pod wait?": ("gpuslice explain POD", "Insufficient GPU Memory in one device"),
    "What does `UnexpectedAdmissionError` mean?": ("no agent was registered at that moment",),
    "Why does CUDA run out of memory below my request?": ("CUDA's own context, which takes 0.3 to 0.6 GiB",),
    "Why does `nvidia-smi` show the whole card?": ("cgpu.disable.isolation=true", "no glibc"),
    "What about Alpine and static programs?": (
        "without a limit: Alpine and others with musl",
        "statically linked",
    ),
    "Why is my program slower than alone?": ("compute is shared too",),
    "Why does the node offer no GPU memory?": ("2 pods hold whole cards", "all cards are out of use"),
    "Which command says what is wrong?": ("Each finding has the command that fixes it",),
    "What happens while an agent is down?": (
        "a container that ends is not restarted until the agent is back",
    ),
    "What happens while the extender is down?": ("new pods wait",),
    "What if kubelet rejects what was placed?": ("back-off", "it has failed for good"),
    "What if kubelet loses its checkpoint?": ("kubelet_internal_checkpoint", "keeps its ids"),
    "What happens when kubelet or the machine restarts?": ("restart of a node's kubelet", "reboot of a node"),
    "Can one part of a card be given out twice?": ("by a second device plugin on the node",),
    "How is a faulty card taken out of use?": ("unhealthy-gpu-NODE",),
    "How do I reset a card that is lost?": ("nvidia-smi -r",),
    "What do I attach to a bug report?": ("/debug/state",),
    # frameworks
    "Which frameworks ran on a real card?": ("JAX", "PyTorch", "CuPy", "Transformers"),
    "What fraction do I give vLLM?": ("--gpu-memory-utilization", "fraction of *your* share"),
    "Are CUDA graphs and memory pools limited?": ("graphs with memory nodes", "`cuMemAllocAsync`, pools"),
    "Does it work under MPS?": ("Two clients of one MPS server are each held to their limit",),
    "Why does gpuslice not run MPS itself?": ("can take down or wedge the server for every container",),
    "Can MIG devices be shared?": ("Keep nodes whose cards are in MIG mode exclusive",),
    "What does isolation cost in speed?": ("transformer step", "The aim is 1.01"),
    "How exactly is a share of compute kept?": ("within 1.5 points of what it is due",),
    "What has never been tested?": ("Not on real hardware",),
    "Does it work with NCCL and tensor parallelism?": ("several real cards have not been tested",),
    # installing and running it
    "What must a cluster have?": ("Kubernetes 1.25 or later", "NVIDIA container toolkit"),
    "What do I set on EKS, GKE or OpenShift?": ("values file for each platform",),
    "Do I need access to the control plane?": ("needs no access to the control plane",),
    "Which pods are privileged, and why?": ("they mount a file system for each container",),
    "Can I try it without a GPU?": ("make demo ARGS=--empty", "cards.json"),
    "Does an upgrade disturb running pods?": ("None of the three restarts or changes a container",),
    "How do I roll back?": ("helm rollback cgpu REVISION",),
    "How do I remove it, and what remains?": ("helm uninstall cgpu", "These remain"),
    "How do I get whole cards back on a node?": ("--overwrite cgpu=false",),
    "How do I keep NVIDIA's device plugin away?": ("wholeCards.daemonSet",),
    "How do I upgrade the NVIDIA driver?": ("gpuOperatorClient=true", "drain nodes"),
    "Can the webhook lock me out?": ("stored unchanged with `failurePolicy: Ignore`",),
    "Who renews the webhook's certificate?": (
        "to renew, delete Secret `gpuslice-webhook-tls`",
        "cert-manager",
    ),
    "Who may call the extender?": ("need a client certificate", "`gpuslice-scheduler`"),
    "Does it work with Argo CD?": ("Certificates that are not made by Helm",),
    "`aliyun.com` or `gpuslice.io`?": ("resourceNames: gpuslice.io", "Decide before your first user arrives"),
    "Can I use claims (DRA) instead?": ("deviceClassName: gpuslice.io",),
    "How do I move a node to claims?": ("gpuslice migrate --to dra NODE",),
    # tenants
    "How can limits hold without a kernel module?": ("/etc/ld.so.preload", "both read-only"),
    "Is it a boundary against malicious tenants?": ("not a security boundary against a malicious tenant",),
    "What can a tenant do to others?": ("have the watchdog end a neighbour's process",),
    "Can the driver enforce the limits?": ("R615 and later", "never seen on such a card"),
    "Can programs past their limit be ended?": ("`stop`", "SIGTERM"),
    "Which rights has each component?": ("`gpushare-device-plugin`", "`gpushare-schd-extender`"),
    "How do I limit a team?": ("requests.aliyun.com/gpu-mem",),
    "How are claims limited by quota?": ("gpuslice.io/claim-memory", "Kueue"),
    "Whom does preemption evict?": ("the fewest of lower priority",),
    "Can I overcommit memory?": ("only what nobody requested is lent",),
    # metrics, scaling and costs
    "Which metrics has each container?": ("gpuslice_container_memory_used_bytes",),
    "Can I replace dcgm-exporter?": ("exporter.enabled=true", "remove dcgm-exporter"),
    "Why are container metrics missing?": ("gpuslice_exporter_attribution_available", "honorLabels: true"),
    "How do I install the alerts?": ("monitoring.alerts.enabled=true",),
    "How do I scale with HPA?": ("pod_gpu_utilization",),
    "How do I scale with KEDA?": ("examples/scaling/keda.yaml",),
    "Does the cluster autoscaler understand it?": ("as if its cards were one", "Karpenter"),
    "Who holds memory and does not use it?": ("gpuslice waste",),
    "How do I bill teams?": ("gpu-teams.json", "OpenCost"),
    "Where do I see all cards in a browser?": ("nodes and their cards, filled by the slices",),
    "How many more cards do we need?": ("--growth 1.2",),
    "How does a policy choose a card?": ("`opportunity-cost` (default)",),
    "How many pods per second are placed?": ("binds 215 to 360 pods/s",),
    "`nvidia-smi` says 100 % although I have 30 %?": ("any kernel ran on the *card*",),
    # other systems, and the code
    "How do I migrate from gpushare?": ("gpushare- cgpu=true",),
    "How do I migrate from ACK's cGPU?": ("remove the vendor's chart there",),
    "What differs from the vendor's?": ("**Different**", "**Not there**"),
    "How do I leave time-slicing?": ("instead of `nvidia.com/gpu: 1`",),
    "How do I migrate from HAMi?": ("webhook.hami.enabled=true",),
    "Do KAI's and Run:ai's annotations work?": ("gpu-fraction", "webhook.kai.enabled"),
    "Can a migration be undone?": ("--undo",),
    "When is another system the better choice?": ("When to choose something else",),
    "Where in the code is something decided?": ("core/units.py",),
    "How do I report a vulnerability?": ("privately",),
    "Does it support AMD, Ascend or other cards?": ("No.",),
    "Is it an Alibaba product?": ("none of their code",),
}
"""By question, what the section must say."""


class Question(NamedTuple):
    text: str
    page: Path
    anchor: str
    """A heading's; empty: what the page says before its first heading below the title."""
    here: str
    """The answer, where docs/faq.md itself has it."""


def questions() -> list[Question]:
    found = []
    for line in FAQ.read_text().splitlines():
        if linked := re.fullmatch(r"- \[(.+)\]\(([^)#]+)(?:#(.+))?\)", line):
            text, target, anchor = linked.groups()
            found.append(Question(text, (FAQ.parent / target).resolve(), anchor or "", ""))
        elif here := re.fullmatch(r"\*\*(.+?)\*\* (.+)", line):
            found.append(Question(here[1], FAQ, "", here[2]))
    return found


def section(page: Path, anchor: str) -> str | None:
    """From that heading to the next of its level or above; None without it. `#` in a listing is none."""
    text: list[str] = []
    level, fenced = 0, False
    for line in page.read_text().splitlines():
        fenced ^= line.startswith("```")
        heading = None if fenced else re.match(r"(#+) (.+)", line)
        if heading and text and (not anchor or len(heading[1]) <= level):
            break
        if heading and not text:
            name = re.sub(r"[^\w -]", "", heading[2].lower()).replace(" ", "-")
            if anchor not in ("", name):
                continue
            level = len(heading[1])
        if heading or text:
            text.append(line)
    return "\n".join(text) or None


def plain(text: str) -> str:
    return " ".join(text.split())


QUESTIONS = questions()


def test_the_list_is_the_one_that_is_checked() -> None:
    """A question that is added to the page says here which words answer it."""
    asked = [question.text for question in QUESTIONS]
    assert len(asked) >= FEWEST
    assert sorted(asked) == sorted(ANSWERS)
    assert len(FAQ.read_text().split()) <= LONGEST_WORDS


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.text)
def test_a_question_leads_to_its_answer(question: Question) -> None:
    assert question.page.is_file()
    found = question.here or section(question.page, question.anchor)
    assert found is not None, f"{question.page.relative_to(ROOT)} has no heading #{question.anchor}"
    assert [phrase for phrase in ANSWERS[question.text] if phrase not in plain(found)] == []


def test_no_question_is_asked_twice() -> None:
    words = {question.text: set(re.findall(r"\w+", question.text.lower())) - COMMON for question in QUESTIONS}
    alike = [
        (one, other)
        for one, other in itertools.combinations(words, 2)
        if len(words[one] & words[other]) > ALIKE * len(words[one] | words[other])
    ]
    assert len(words) == len(QUESTIONS)
    assert alike == []
    answers = [(each.page, each.anchor, ANSWERS[each.text]) for each in QUESTIONS]
    assert len(set(answers)) == len(answers)


def test_a_section_ends_before_the_next_of_its_level(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# T\nintro\n## One!\n1\n```yaml\n# no heading\n```\n### Sub\n2\n## Two\n3\n")
    assert section(page, "") == "# T\nintro"
    assert section(page, "one") == "## One!\n1\n```yaml\n# no heading\n```\n### Sub\n2"
    assert section(page, "two") == "## Two\n3"
    assert section(page, "three") is None
