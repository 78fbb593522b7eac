"""ResourceClaims: created for pods from templates, and released when the pods that use them have ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from simcluster.controllers.actions import Action, Create, Tell, delete, patch, patch_status
from simcluster.controllers.ownership import controller_reference, is_going
from simcluster.controllers.pods import is_finished

Object = Mapping[str, Any]

OF_POD = "resource.kubernetes.io/pod-claim-name"
FINALIZER = "resource.kubernetes.io/delete-protection"


def names(pod: Object) -> dict[str, str]:
    """The ResourceClaim behind each of a pod's claims; "" for one that is not created yet."""
    statuses = (pod.get("status") or {}).get("resourceClaimStatuses") or ()
    made = {each["name"]: each.get("resourceClaimName", "") for each in statuses}
    references = pod["spec"].get("resourceClaims") or ()
    return {each["name"]: each.get("resourceClaimName") or made.get(each["name"], "") for each in references}


def templates(pod: Object) -> list[str]:
    references = pod["spec"].get("resourceClaims") or ()
    return [each["resourceClaimTemplateName"] for each in references if "resourceClaimTemplateName" in each]


def make(pod: Object, found: Mapping[str, Object], owned: Sequence[Object]) -> list[Action]:
    """Claims that a pod lacks. `found`: existing templates, by name; `owned`: claims created for the pod."""
    if is_finished(pod) or is_going(pod):
        return [delete("ResourceClaim", claim) for claim in owned if not is_going(claim)]
    made = {(claim["metadata"].get("annotations") or {}).get(OF_POD, ""): claim for claim in owned}
    statuses, actions = [], list[Action]()
    for reference in pod["spec"].get("resourceClaims") or ():
        name, template = reference["name"], reference.get("resourceClaimTemplateName")
        if template is None:
            continue
        if name in made:
            statuses.append({"name": name, "resourceClaimName": made[name]["metadata"]["name"]})
        elif template in found:
            claim = _claim(pod, name, found[template])
            actions.append(Create("ResourceClaim", claim, pod["metadata"]["namespace"]))
        else:
            missing = f'resourceclaimtemplate.resource.k8s.io "{template}" not found'
            words = f'PodResourceClaim {name}: resource claim template "{template}": {missing}'
            actions.append(Tell("FailedResourceClaimCreation", words, "Warning"))
    if statuses:
        actions += patch_status("Pod", pod, {"resourceClaimStatuses": statuses})
    return actions


def _claim(pod: Object, name: str, template: Object) -> Object:
    about, spec = template["spec"].get("metadata") or {}, template["spec"]["spec"]
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {
            **about,
            "generateName": f"{pod['metadata']['name']}-{name}-",
            "annotations": {**(about.get("annotations") or {}), OF_POD: name},
            "ownerReferences": [controller_reference(pod, "v1", "Pod")],
        },
        "spec": spec,
    }


def release(claim: Object, left: set[str]) -> list[Action]:
    """`left`: the uids of pods that no longer use the claim. Without users it holds no device."""
    status = claim.get("status") or {}
    users = status.get("reservedFor") or []
    staying = [each for each in users if each["uid"] not in left]
    version = {"resourceVersion": claim["metadata"]["resourceVersion"]}  # the scheduler may be adding a user
    if staying != users or (is_going(claim) and not staying and status.get("allocation")):
        unused = {} if staying else {"allocation": None, "devices": None}
        change = {"metadata": version, "status": {"reservedFor": staying or None, **unused}}
        return [patch("ResourceClaim", claim, change, status=True)]
    finalizers = claim["metadata"].get("finalizers") or []
    if is_going(claim) and not users and FINALIZER in finalizers:
        others = [each for each in finalizers if each != FINALIZER]
        return [patch("ResourceClaim", claim, {"metadata": {**version, "finalizers": others}})]
    return []
