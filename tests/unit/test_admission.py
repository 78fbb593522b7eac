"""Admission: what is changed of a pod, what is denied, and that any pod gets an answer."""

from __future__ import annotations

import base64

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuslice.adapters.wire.errors import MalformedError
from gpuslice.adapters.wire.review import decode_review
from gpuslice.apps.webhook.reviews import Reviewer
from gpuslice.apps.webhook.settings import WebhookSettings
from gpuslice.core.admission import AdmissionRules, EnvSource
from gpuslice.core.contract import (
    ANN_ASSIGNED,
    ANN_INDEX,
    GPU_COUNT,
    GPU_MEM,
)
from gpuslice.core.hami import HamiRules
from simcluster.cluster.patch import json_patch
from tests.builders import api_container, api_pod
from tests.unit.admission_rig import HAMI, Object, denial, env_of, invalid, mutated, review, with_env

# -- environment -------------------------------------------------------------------------------------------


def test_a_pods_own_choice_of_card_is_taken_out_and_its_author_told() -> None:
    pod = with_env({"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}, {"name": "MODE", "value": "train"})
    assert env_of(mutated(pod)) == {"MODE": "train"}
    response = Reviewer(AdmissionRules()).mutate(decode_review(review(pod)))["response"]
    assert response["warnings"][0].startswith('container "main": env["NVIDIA_VISIBLE_DEVICES"] is taken out')


def test_what_env_from_could_bring_unseen_is_covered_by_the_pods_annotations() -> None:
    pod = with_env(envFrom=[{"configMapRef": {"name": "anything"}}])
    env = env_of(mutated(pod))
    assert env["NVIDIA_VISIBLE_DEVICES"] == {
        "fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.annotations['gpuslice.io/visible-devices']"}
    }
    assert env["ALIYUN_COM_GPU_MEM_IDX"]["fieldRef"]["fieldPath"] == f"metadata.annotations['{ANN_INDEX}']"
    assert env["ALIYUN_COM_GPU_MEM_CONTAINER"] == "4"


def test_annotations_are_written_everywhere_or_nowhere_when_set_so() -> None:
    assert "ALIYUN_COM_GPU_MEM_POD" in env_of(mutated(api_pod(), AdmissionRules(env=EnvSource.ALWAYS)))
    hidden = with_env(envFrom=[{"configMapRef": {"name": "anything"}}])
    assert env_of(mutated(hidden, AdmissionRules(env=EnvSource.NEVER))) == {}


def test_the_amount_of_one_card_is_told_where_a_pod_is_on_several() -> None:
    pod = api_pod(memory="8", labels={GPU_COUNT: "4"})
    env = env_of(mutated(pod, AdmissionRules(env=EnvSource.ALWAYS)))
    assert env["ALIYUN_COM_GPU_MEM_CONTAINER"] == "2"


def test_switching_the_limit_off_is_kept_where_it_is_allowed() -> None:
    pod = with_env({"name": "CGPU_DISABLE", "value": "true"})
    lenient = AdmissionRules(allow_no_isolation=True)
    assert env_of(mutated(pod, lenient)) == {"CGPU_DISABLE": "true"}
    assert not invalid(pod, lenient)
    assert env_of(mutated(pod)) == {}
    assert 'env["CGPU_DISABLE"] is "true"' in invalid(pod)


def mounting(path: str, *env: Object) -> Object:
    return with_env(*env, volumeMounts=[{"name": "own", "mountPath": path}])


def test_what_enforces_limits_cannot_be_mounted_over() -> None:
    """Datadog's and Dynatrace's webhooks add such a mount to every container."""
    said = invalid(mounting("/etc/ld.so.preload"))
    assert said.startswith(
        'container "main": volumeMounts[0].mountPath is "/etc/ld.so.preload", must be another'
    )
    assert 'terminationMessagePath is "/etc/gpuslice/x"' in invalid(
        with_env(terminationMessagePath="/etc/gpuslice/x")
    )
    assert 'volumeDevices[0].devicePath is "/etc/ld.so.preload"' in invalid(
        with_env(volumeDevices=[{"name": "own", "devicePath": "/etc/ld.so.preload"}])
    )
    for through_a_link in ("/lib/gpuslice/libgpuslice.so", "/var/run/gpuslice/GPU-1"):
        assert f'mountPath is "{through_a_link}"' in invalid(mounting(through_a_link))
    beside = api_container(name="beside") | {
        "volumeMounts": [{"name": "own", "mountPath": "/etc/ld.so.preload"}]
    }
    assert not invalid(api_pod(containers=[api_container("4"), beside])), "it has no card"
    lenient = AdmissionRules(allow_no_isolation=True)
    assert invalid(mounting("/etc/ld.so.preload"), lenient)
    without_limit = mounting("/etc/ld.so.preload", {"name": "CGPU_DISABLE", "value": "true"})
    assert not invalid(without_limit, lenient)


def test_a_node_chosen_by_hand_is_warned_about() -> None:
    """Without a scheduler nobody chooses a card, and an agent on a node with several gives none."""
    answer = Reviewer(AdmissionRules()).mutate(decode_review(review(api_pod(node="n1"))))["response"]
    (warning,) = answer["warnings"]
    assert answer["allowed"]
    assert "a node with several refuses the pod" in warning


def test_a_container_that_asks_for_no_card_sees_none() -> None:
    beside = {"name": "logs", "image": "logs", "env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]}
    pod = api_pod(containers=[api_container("4"), beside])
    assert env_of(mutated(pod), 1) == {"NVIDIA_VISIBLE_DEVICES": "void"}
    assert env_of(mutated(pod, AdmissionRules(hide_cards=False)), 1) == {"NVIDIA_VISIBLE_DEVICES": "all"}
    of_zero = api_pod(containers=[api_container("4"), {**api_container("0", "logs"), "env": beside["env"]}])
    assert env_of(mutated(of_zero), 1) == {"NVIDIA_VISIBLE_DEVICES": "void"}


def test_what_was_not_repaired_is_denied_by_name() -> None:
    pod = with_env({"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"})
    assert invalid(pod).startswith(
        'container "main": env["NVIDIA_VISIBLE_DEVICES"] is "all", must be left out'
    )
    for rules in (AdmissionRules(), AdmissionRules(env=EnvSource.ALWAYS)):
        assert not invalid(mutated(pod, rules), rules)


# -- the rest of a pod -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given_name", "becomes"), [("", "ours"), ("default-scheduler", "ours"), ("theirs", "theirs")]
)
def test_the_scheduler_is_set_where_it_was_left_open(given_name: str, becomes: str) -> None:
    pod = api_pod(schedulerName=given_name)
    assert mutated(pod, AdmissionRules(scheduler="ours"))["spec"]["schedulerName"] == becomes


@pytest.mark.parametrize(("given_name", "becomes"), [(None, "nvidia"), ("", "nvidia"), ("kata", "kata")])
def test_the_runtime_class_is_set_where_none_is_named(given_name: str | None, becomes: str) -> None:
    pod = api_pod(runtimeClassName=given_name)
    assert mutated(pod, AdmissionRules(runtime_class="nvidia"))["spec"]["runtimeClassName"] == becomes
    assert mutated(pod)["spec"]["runtimeClassName"] == given_name
    other = api_pod(containers=[{"name": "c"}])
    assert mutated(other, AdmissionRules(runtime_class="nvidia")) == other


TOLERATED = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}


@pytest.mark.parametrize(
    ("own", "added"),
    [
        (None, True),
        ([{"key": "sku", "operator": "Equal", "value": "gpu"}], True),
        ([{"key": "nvidia.com/gpu", "operator": "Equal", "value": "other", "effect": "NoSchedule"}], True),
        ([{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoExecute"}], True),
        ([TOLERATED], False),
        ([{"key": "nvidia.com/gpu", "operator": "Exists"}], False),
        ([{"operator": "Exists"}], False),
    ],
)
def test_a_pod_tolerates_the_taint_of_gpu_nodes_as_one_that_requests_whole_cards(
    own: list[Object] | None, added: bool
) -> None:
    changed = mutated(api_pod(tolerations=own))
    assert changed["spec"]["tolerations"] == ([*(own or []), TOLERATED] if added else own)
    assert mutated(changed) == changed
    other = api_pod(containers=[{"name": "c"}], tolerations=own)
    assert mutated(other) == other


def test_without_a_scheduler_of_our_own_the_pod_keeps_its_name() -> None:
    assert mutated(api_pod(schedulerName="default-scheduler"))["spec"]["schedulerName"] == "default-scheduler"


def test_a_copied_pod_does_not_bring_its_models_card_along() -> None:
    pod = api_pod(annotations={ANN_INDEX: "3", ANN_ASSIGNED: "true", "team": "a"})
    assert mutated(pod)["metadata"]["annotations"] == {"team": "a"}


def test_other_pods_and_mirrors_of_static_pods_are_left_alone() -> None:
    other = api_pod(containers=[{"name": "a", "env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]}])
    assert mutated(other, AdmissionRules(scheduler="ours")) == other
    zero = api_pod(memory="0")
    assert mutated(zero, AdmissionRules(scheduler="ours")) == zero
    assert not invalid(zero)
    mirror = api_pod(memory="4.5", annotations={"kubernetes.io/config.mirror": "x"})
    assert mutated(mirror, AdmissionRules(scheduler="ours")) == mirror
    assert not invalid(mirror)


# -- denials -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pod", "sentence"),
    [
        (api_pod(memory="4.5"), 'container "main": limits["aliyun.com/gpu-mem"] is "4.5", must be a whole'),
        (api_pod(memory="4Gi"), 'container "main": limits["aliyun.com/gpu-mem"] is "4Gi"'),
        (api_pod(memory="7", labels={GPU_COUNT: "2"}), "must be a multiple of 2"),
        (api_pod(labels={GPU_COUNT: "two"}), 'label "aliyun.com/gpu-count" is "two"'),
        (
            api_pod(containers=[api_container("4", **{"aliyun.com/gpu-core.percentage": "7"})]),
            'limits["aliyun.com/gpu-core.percentage"] is "7", must be a multiple of 5',
        ),
        (
            api_pod(containers=[api_container(**{"aliyun.com/gpu-core.percentage": "10"})]),
            "must be accompanied by limits of aliyun.com/gpu-mem",
        ),
        (
            api_pod(containers=[api_container("4", **{"nvidia.com/gpu": "1"})]),
            'limits["nvidia.com/gpu"] is "1", must be left out beside aliyun.com/gpu-mem',
        ),
        (
            api_pod(containers=[{"name": "main", "resources": {"requests": {GPU_MEM: "4"}}}]),
            'requests["aliyun.com/gpu-mem"] is "4", must be the same as limits',
        ),
    ],
)
def test_a_denial_names_the_field(pod: Object, sentence: str) -> None:
    assert sentence in denial(pod)
    assert sentence in invalid(pod)


@pytest.mark.parametrize(
    ("name", "text", "must_be"),
    [
        ("gpuslice.io/when-idle", "swap", "must be keep or park"),
        ("gpuslice.io/idle-after", "5", "such as 5m"),
        ("gpuslice.io/park", "please", "must be park or wake"),
    ],
)
def test_what_is_said_of_idle_pods_is_checked_when_they_are_new_and_when_it_changes(
    name: str, text: str, must_be: str
) -> None:
    wrong = api_pod(annotations={name: text})
    assert f'metadata.annotations["{name}"] is "{text}", ' in invalid(wrong)
    assert must_be in invalid(wrong)
    assert must_be in invalid(wrong, operation="UPDATE", old=api_pod())
    assert not invalid(wrong, operation="UPDATE", old=wrong)


def test_annotations_that_leave_no_room_for_ours_are_denied_after_all_mutation() -> None:
    large = api_pod(annotations={"theirs": "x" * 262_000})
    assert 'metadata.annotations: size in bytes is "262006", must be at most' in invalid(large)
    assert not invalid(api_pod(annotations={"theirs": "x" * 260_000}))
    assert not invalid(api_pod(memory="0", annotations={"theirs": "x" * 262_000}))


def test_a_request_that_differs_from_its_limit_is_denied() -> None:
    container = {"name": "main", "resources": {"limits": {GPU_MEM: "4"}, "requests": {GPU_MEM: "2"}}}
    assert 'requests["aliyun.com/gpu-mem"] is "2"' in denial(api_pod(containers=[container]))


def test_other_objects_are_let_through() -> None:
    body = msgspec.json.decode(review({"spec": {"replicas": "any"}}))
    body["request"]["resource"]["resource"] = "deployments"
    request = decode_review(msgspec.json.encode(body))
    for answer in (Reviewer(AdmissionRules()).mutate(request), Reviewer(AdmissionRules()).validate(request)):
        assert answer["response"] == {"uid": "u1", "allowed": True}


@pytest.mark.parametrize("body", [b"", b"{}", b"[1]", b'{"kind":"AdmissionReview"}', b"\xff"])
def test_what_is_no_review_is_called_malformed(body: bytes) -> None:
    with pytest.raises(MalformedError):
        decode_review(body)


# -- any pod -----------------------------------------------------------------------------------------------

NAMES = st.sampled_from(["a", "b", "NVIDIA_VISIBLE_DEVICES", "CGPU_DISABLE", "ALIYUN_COM_GPU_MEM_IDX"])
AMOUNTS = st.one_of(
    st.integers(-2, 200),
    st.sampled_from(["4", "0", "4.5", "4Gi", "", "1e3", "8"]),
    st.floats(allow_nan=False, allow_infinity=False),
)
RESOURCES = st.sampled_from(
    [
        GPU_MEM,
        "aliyun.com/gpu-core.percentage",
        "nvidia.com/gpu",
        "nvidia.com/gpumem",
        "nvidia.com/gpumem-percentage",
        "nvidia.com/gpucores",
        "nvidia.com/priority",
        "cpu",
    ]
)
ENV = st.lists(
    st.one_of(
        st.fixed_dictionaries({"name": NAMES, "value": st.text(max_size=4)}),
        st.fixed_dictionaries(
            {"name": NAMES, "valueFrom": st.just({"fieldRef": {"fieldPath": "spec.nodeName"}})}
        ),
    ),
    max_size=4,
)
CONTAINER = st.fixed_dictionaries(
    {"name": st.text(max_size=4)},
    optional={
        "resources": st.fixed_dictionaries(
            {},
            optional={
                name: st.dictionaries(RESOURCES, AMOUNTS, max_size=3) for name in ("limits", "requests")
            },
        ),
        "env": ENV,
        "envFrom": st.lists(st.just({"configMapRef": {"name": "x"}}), max_size=1),
        "restartPolicy": st.just("Always"),
    },
)
TEXTS = st.sampled_from(["", "1", "2", "x", "a100", "GPU-1", "true"])
KEYS = st.sampled_from(
    [
        GPU_COUNT,
        ANN_INDEX,
        "a/b~c",
        "nvidia.com/use-gputype",
        "nvidia.com/nouse-gputype",
        "nvidia.com/numa-bind",
    ]
)
MAPS = st.one_of(st.none(), st.dictionaries(KEYS, TEXTS, max_size=3))
PODS = st.builds(
    lambda labels, annotations, containers, inits, affinity: {
        "metadata": {"name": "p", "labels": labels, "annotations": annotations},
        "spec": {"containers": containers, "initContainers": inits, "affinity": affinity},
    },
    MAPS,
    MAPS,
    st.lists(CONTAINER, min_size=1, max_size=3),
    st.one_of(st.none(), st.lists(CONTAINER, max_size=2)),
    st.sampled_from([None, {}, {"nodeAffinity": None}, {"podAffinity": {}, "nodeAffinity": {}}]),
)
RULES = st.builds(
    AdmissionRules,
    scheduler=st.sampled_from(["", "ours"]),
    runtime_class=st.sampled_from(["", "nvidia"]),
    env=st.sampled_from(list(EnvSource)),
    allow_no_isolation=st.booleans(),
    hide_cards=st.booleans(),
)


@given(pod=PODS, rules=RULES, hami=st.sampled_from([None, HAMI, HamiRules(unit="MiB")]))
def test_any_pod_gets_an_answer_whose_patch_applies_once_and_for_all(
    pod: Object, rules: AdmissionRules, hami: HamiRules | None
) -> None:
    reviewer = Reviewer(rules, hami)
    response = reviewer.mutate(decode_review(review(pod)))["response"]
    if not response["allowed"]:
        assert response["status"]["message"]
        return
    if "patch" not in response:
        return
    changed = json_patch(pod, msgspec.json.decode(base64.b64decode(response["patch"])))
    again = reviewer.mutate(decode_review(review(changed)))["response"]
    again.pop("warnings", None)  # what cannot be translated stays, and is named each time
    assert again == {"uid": "u1", "allowed": True}
    assert not invalid(changed, rules)
    assert {each["name"] for each in changed["spec"]["containers"]} == {
        each["name"] for each in pod["spec"]["containers"]
    }


# -- settings and warnings ----------------------------------------------------------------------------------


def test_settings_become_rules() -> None:
    chosen = WebhookSettings(
        scheduler_name="ours", runtime_class_name="nvidia", annotation_writers=("extender",)
    )
    assert chosen.rules == AdmissionRules(
        scheduler="ours", runtime_class="nvidia", writers=frozenset({"extender"}), gate_groups=True
    )
    assert chosen.hami is None
    assert WebhookSettings(accept_hami=True, hami_card_units=80).hami == HamiRules(card_units=80)


def warnings(pod: Object, hami: HamiRules | None = None) -> list[str]:
    response = Reviewer(AdmissionRules(), hami).mutate(decode_review(review(pod)))["response"]
    assert response["allowed"]
    return list(response.get("warnings", []))


def test_what_is_nearly_right_is_let_through_and_its_author_warned() -> None:
    (told,) = warnings(api_pod(memory="4", labels={"aliyun.com/gpu-cuont": "2"}))
    assert told == "label aliyun.com/gpu-cuont means nothing; did you mean aliyun.com/gpu-count?"
    asks = {"name": "main", "resources": {"limits": {"aliyun.com/gpu-mm": "4"}}}
    assert "did you mean aliyun.com/gpu-mem?" in warnings(api_pod(memory=None, containers=[asks]))[0]
    hami = {"name": "main", "resources": {"limits": {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "3000"}}}
    assert "nothing in this cluster translates it" in warnings(api_pod(memory=None, containers=[hami]))[0]
    assert not any(
        "translates" in each for each in warnings(api_pod(memory=None, containers=[hami]), hami=HAMI)
    )
