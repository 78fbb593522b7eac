"""Answers AdmissionReviews. What is no new or changed pod is let through untouched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpuslice.adapters.wire.review import AdmissionRequest, answer, pod_form
from gpuslice.core.admission import AdmissionRules, User, Verdict, mutate, validate, validate_update
from gpuslice.core.errors import InvalidRequestError
from gpuslice.core.form import difference
from gpuslice.core.hami import HamiRules, remarks, translate


@dataclass(frozen=True, slots=True)
class Reviewer:
    """`hami` is None where the second front door is shut."""

    rules: AdmissionRules
    hami: HamiRules | None = None

    def mutate(self, request: AdmissionRequest) -> dict[str, Any]:
        """The review that goes back, with the pod's patch. Raises `MalformedError`."""
        if not request.is_pod or request.operation != "CREATE":
            return answer(request.uid)
        pod = pod_form(request.object)
        try:
            asked = translate(pod, self.hami) if self.hami is not None else pod
        except InvalidRequestError as error:
            return answer(request.uid, denial=str(error))
        verdict = mutate(asked, self.rules)
        if verdict.denial or verdict.pod is None:
            return answer(request.uid, denial=verdict.denial)
        said = (*verdict.warnings, *(remarks(pod) if self.hami is not None else ()))
        return answer(request.uid, operations=difference(pod, verdict.pod), warnings=said)

    def validate(self, request: AdmissionRequest) -> dict[str, Any]:
        """The review that goes back, yes or no. Raises `MalformedError`."""
        if not request.is_pod:
            return answer(request.uid)
        verdict = Verdict()
        if request.operation == "CREATE":
            verdict = validate(pod_form(request.object), self.rules)
        elif request.operation == "UPDATE":
            old, new = pod_form(request.old_object), pod_form(request.object)
            user = User(request.user_info.username, request.user_info.groups or ())
            verdict = validate_update(old, new, user, self.rules)
        return answer(request.uid, denial=verdict.denial, warnings=verdict.warnings)
