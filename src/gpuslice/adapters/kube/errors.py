"""What the API server can answer besides yes: one class for each reaction of a caller."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from gpuslice.core.errors import GpusliceError, printable

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are not what they should be; strings that are no UTF-8 are apart."""


class StatusCause(msgspec.Struct, gc=False):
    reason: str = ""
    message: str = ""
    field: str = ""


class StatusDetails(msgspec.Struct, gc=False, rename="camel"):
    name: str = ""
    kind: str = ""
    causes: list[StatusCause] | None = None
    retry_after_seconds: float = 0


class Status(msgspec.Struct, gc=False):
    """The `Status` object that Kubernetes answers instead of what was asked for."""

    status: str = ""
    message: str = ""
    reason: str = ""
    code: int = 0
    details: StatusDetails | None = None

    def names_field(self, path: str) -> bool:
        """Whether one of the causes is about the field `path`, as in ``metadata.uid``."""
        return any(cause.field == path for cause in self._causes())

    def has_cause(self, reason: str) -> bool:
        return any(cause.reason == reason for cause in self._causes())

    def _causes(self) -> list[StatusCause]:
        return (self.details.causes if self.details is not None else None) or []


class KubeError(GpusliceError):
    """The API server did not do what was asked. `status` holds its own words."""

    def __init__(self, message: str, status: Status | None = None) -> None:
        super().__init__(message)
        self.status = status or Status()


class NotFoundError(KubeError):
    """The object, or the whole resource, is not there."""


class ConflictError(KubeError):
    """Somebody was first: the object changed, or is another one of the same name. Read and decide again."""


class AlreadyExistsError(KubeError):
    """What should be created is there already, or the pod to be bound has its node."""


class GoneError(KubeError):
    """The resourceVersion or continue token is too old: list again."""


class ForbiddenError(KubeError):
    """We may not do this: no retry helps, an operator must grant it."""


class UnauthorizedError(ForbiddenError):
    """The API server does not know who we are: the credentials are missing, wrong or expired."""


class InvalidError(KubeError):
    """The request itself is wrong; repeating it unchanged cannot help."""


class UnavailableError(KubeError):
    """No answer, or a "not now". Try again later.

    A timeout is not a no: with `outcome_unknown` the server may have done it all the same, so read before
    concluding anything. It is False only where the request surely was not carried out (connection refused,
    429, an admission webhook that cannot be called: that comes before anything is stored). `retry_after_s` is
    what the server asked for, 0 where it did not say.
    """

    def __init__(
        self,
        message: str,
        status: Status | None = None,
        *,
        outcome_unknown: bool = True,
        retry_after_s: float = 0,
    ) -> None:
        super().__init__(message, status)
        self.outcome_unknown = outcome_unknown
        self.retry_after_s = retry_after_s


class ConfigError(GpusliceError):
    """A kubeconfig, in-cluster file or exec plugin that cannot be used; the message says which and why."""

    def __str__(self) -> str:
        return printable(super().__str__())  # names come from the file


_STATUS = msgspec.json.Decoder(Status)

_BY_REASON: dict[str, type[KubeError]] = {
    "AlreadyExists": AlreadyExistsError,
    "Conflict": ConflictError,
    "Expired": GoneError,
    "Gone": GoneError,
}
_BY_CODE: dict[int, type[KubeError]] = {
    401: UnauthorizedError,
    403: ForbiddenError,
    404: NotFoundError,
    409: ConflictError,
    410: GoneError,
    412: ConflictError,
}


_WEBHOOK_FAILED = "Internal error occurred: failed calling webhook "
"""How kube-apiserver begins to tell so (apiserver/pkg/admission/plugin/webhook/errors)."""


def decode_status(body: bytes) -> Status:
    """The Status in `body`; whatever else a proxy or webhook put there becomes its message."""
    try:
        return _STATUS.decode(body)
    except UNREADABLE:
        return Status(message=body[:500].decode(errors="replace").strip())


def error_of(
    code: int, body: bytes, headers: Mapping[str, str] | None = None, *, what: str = ""
) -> KubeError:
    """The exception for a non-2xx answer; `what` is the request in words, as in ``PATCH /api/v1/…``."""
    return error_of_status(decode_status(body), code, headers, what=what)


def error_of_status(
    status: Status, code: int = 0, headers: Mapping[str, str] | None = None, *, what: str = ""
) -> KubeError:
    """The exception for a Status object, also one that came as an ERROR line of a watch."""
    code = code or status.code
    text = _words(status.message or status.reason) or _reason_phrase(code)
    if code == 401:
        text = f"{text}: the API server does not accept these credentials"
    message = f"{what}: {text} (HTTP {code})" if what else f"{text} (HTTP {code})"
    if code == 429 or code >= 500:
        from_details: Any = status.details.retry_after_seconds if status.details is not None else 0
        retry_after = (headers or {}).get("retry-after", "")
        return UnavailableError(
            message,
            status,
            outcome_unknown=code != 429 and not text.startswith(_WEBHOOK_FAILED),
            retry_after_s=float(retry_after) if retry_after.isdecimal() else float(from_details),
        )
    kind = _BY_REASON.get(status.reason) or _BY_CODE.get(code, InvalidError)
    return kind(message, status)


class ToldOnce:
    """A ``with`` around what is tried again and again: the API server's refusals end here, and each is logged
    once, for as long as the next is the same.
    """

    def __init__(self, log: logging.Logger, sentence: str) -> None:
        self._log, self._sentence = log, sentence
        self._problem = ""

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is not None and not isinstance(error, KubeError):
            return False
        problem = "" if error is None else str(error)
        if problem and problem != self._problem:
            self._log.warning(self._sentence, extra={"error": problem})
        self._problem = problem
        return True


def no_answer(body: bytes, what: str) -> UnavailableError:
    """For a 2xx whose body is no object: a proxy answered, and the server may not have been asked."""
    said = _words(body[:500].decode(errors="replace").strip()) or "nothing"
    return UnavailableError(f"{what}: the server answered no object of its API but: {said}")


def _words(text: str) -> str:
    """The words of a web page, such as those of a proxy or a login; other text as it is."""
    return " ".join(re.sub(r"<[^>]*>", " ", text).split()) if text.startswith("<") else text


def _reason_phrase(code: int) -> str:
    from http import HTTPStatus  # not for who succeeds

    try:
        return HTTPStatus(code).phrase
    except ValueError:
        return "no explanation"
