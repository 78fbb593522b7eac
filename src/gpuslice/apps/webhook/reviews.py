"""Answers AdmissionReviews. All but new or changed pods and what agents write is allowed unchanged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from gpuslice.adapters.limits import LIMITS, Limits
from gpuslice.adapters.wire.review import AdmissionRequest, answer, document_of, pod_form
from gpuslice.apps.webhook.agents import Agents
from gpuslice.core import hami, kai
from gpuslice.core.admission import (
    AdmissionRules,
    User,
    Verdict,
    mutate,
    mutate_ephemeral,
    validate,
    validate_update,
)
from gpuslice.core.claim_shape import as_claims
from gpuslice.core.errors import InvalidRequestError
from gpuslice.core.form import PodForm, difference
from gpuslice.core.hami import HamiRules
from gpuslice.core.kai import KaiRules
from gpuslice.core.lookalikes import HAMI, pod_label_hints, resource_hints
from gpuslice.core.own_node import Write, denial


@dataclass(frozen=True, slots=True)
class Reviewer:
    """`hami` and `kai` are None if pods with those names are left alone, `agents` if policies judge them."""

    rules: AdmissionRules
    hami: HamiRules | None = None
    kai: KaiRules | None = None
    limits: Limits = LIMITS
    agents: Agents | None = None

    def mutate(self, request: AdmissionRequest) -> dict[str, Any]:
        """The review to return, with the pod's patch. Raises `MalformedError`."""
        if request.adds_containers:
            old, new = self._pod(request.old_object), self._pod(request.object)
            changed = mutate_ephemeral(old, new, self.rules)
            return answer(request.uid, operations=difference(new, changed))
        if not request.is_pod or request.operation != "CREATE":
            return answer(request.uid)
        try:
            pod = self._pod(request.object)
            asked = self._in_our_names(pod)
        except InvalidRequestError as error:
            return answer(request.uid, denial=str(error))
        verdict = mutate(asked, self.rules)
        if verdict.denial or verdict.pod is None:
            return answer(request.uid, denial=verdict.denial)
        said = [*verdict.warnings, *self._remarks(pod)]
        names = {name for each in asked.containers for name in (*each.limits, *each.requests)}
        said += resource_hints(sorted(names - set(HAMI) if self.hami is not None else names))
        said += pod_label_hints(asked.labels)
        return answer(request.uid, operations=difference(pod, verdict.pod), warnings=said)

    def claim(self, request: AdmissionRequest) -> dict[str, Any]:
        """The same for a pod that should ask by a claim; the API server selects those by their labels."""
        if not request.is_pod or request.operation != "CREATE":
            return answer(request.uid)
        try:
            pod = self._pod(request.object)
            claiming = as_claims(self._in_our_names(pod))
        except InvalidRequestError as error:
            return answer(request.uid, denial=str(error))
        return answer(request.uid, operations=difference(pod, claiming), warnings=self._remarks(pod))

    def _pod(self, raw: msgspec.Raw) -> PodForm:
        return pod_form(raw, self.limits)

    def _in_our_names(self, pod: PodForm) -> PodForm:
        asked = hami.translate(pod, self.hami) if self.hami is not None else pod
        return kai.translate(asked, self.kai) if self.kai is not None else asked

    def _remarks(self, pod: PodForm) -> list[str]:
        said = hami.remarks(pod) if self.hami is not None else ()
        return [*said, *(kai.remarks(pod, self.kai) if self.kai is not None else ())]

    def validate(self, request: AdmissionRequest) -> dict[str, Any]:
        """The review to return, yes or no. Raises `MalformedError`."""
        user = User(request.user_info.username, request.user_info.groups or ())
        verdict = Verdict()
        try:
            if self.agents is not None and user.name == self.agents.account:
                versions = (document_of(each, self.limits) for each in (request.old_object, request.object))
                write = Write(request.what, request.namespace, request.name, *versions)
                verdict = Verdict(denial(write, self.agents.node_of(request.user_info.extra or {})))
            elif not request.has_pod:
                return answer(request.uid)
            elif request.operation == "CREATE":
                verdict = validate(self._pod(request.object), self.rules, user)
            elif request.operation == "UPDATE":
                old, new = self._pod(request.old_object), self._pod(request.object)
                verdict = validate_update(old, new, user, self.rules)
        except InvalidRequestError as error:
            return answer(request.uid, denial=str(error))
        return answer(request.uid, denial=verdict.denial, warnings=verdict.warnings)
