"""Failures as Kubernetes answers them: a Status object with reason, code and details."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from simcluster.cluster.request import Object, Response, json_response


@dataclass(frozen=True, slots=True)
class Cause:
    """One wrong field of an Invalid answer; ``reason`` such as FieldValueRequired."""

    field: str
    reason: str
    message: str

    def to_dict(self) -> Object:
        return {"reason": self.reason, "message": self.message, "field": self.field}


class ApiError(Exception):
    """A request that is answered with a failure Status; the class that turns it into HTTP is the router."""

    def __init__(self, code: int, reason: str, message: str, details: Object | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.details = details

    def status(self) -> Object:
        status: Object = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
        }
        if self.reason:
            status["reason"] = self.reason
        if self.details is not None:
            status["details"] = self.details
        return status | {"code": self.code}

    def response(self) -> Response:
        answer = json_response(self.status(), self.code)
        after_s = (self.details or {}).get("retryAfterSeconds")
        return (
            replace(answer, headers={**answer.headers, "retry-after": str(after_s)})
            if after_s is not None
            else answer
        )


def _details(kind: str, group: str, name: str = "", **more: Any) -> Object:
    details: Object = {"name": name, "group": group, "kind": kind, **more}
    return {key: value for key, value in details.items() if value}


def qualified(plural: str, group: str) -> str:
    return f"{plural}.{group}" if group else plural


def not_found(plural: str, group: str, name: str) -> ApiError:
    message = f'{qualified(plural, group)} "{name}" not found'
    return ApiError(404, "NotFound", message, _details(plural, group, name))


def no_such_path() -> ApiError:
    """As client-go puts it; `kubectl debug` ends with a panic where the details are not there at all."""
    return ApiError(404, "NotFound", "the server could not find the requested resource", {})


def already_exists(plural: str, group: str, name: str) -> ApiError:
    message = f'{qualified(plural, group)} "{name}" already exists'
    return ApiError(409, "AlreadyExists", message, _details(plural, group, name))


def conflict(plural: str, group: str, name: str, why: str) -> ApiError:
    message = f'Operation cannot be fulfilled on {qualified(plural, group)} "{name}": {why}'
    return ApiError(409, "Conflict", message, _details(plural, group, name))


MODIFIED = "the object has been modified; please apply your changes to the latest version and try again"


def invalid(kind: str, group: str, name: str, causes: list[Cause]) -> ApiError:
    texts = [f"{cause.field}: {cause.message}" for cause in causes]
    listed = texts[0] if len(texts) == 1 else "[" + ", ".join(texts) + "]"
    qualified_kind = f"{kind}.{group}" if group else kind
    details = _details(kind, group, name, causes=[cause.to_dict() for cause in causes])
    return ApiError(422, "Invalid", f'{qualified_kind} "{name}" is invalid: {listed}', details)


def forbidden(plural: str, group: str, name: str, why: str) -> ApiError:
    message = f'{qualified(plural, group)} "{name}" is forbidden: {why}'
    return ApiError(403, "Forbidden", message, _details(plural, group, name))


def bad_request(message: str) -> ApiError:
    return ApiError(400, "BadRequest", message)


def expired(message: str) -> ApiError:
    return ApiError(410, "Expired", message)


def method_not_allowed() -> ApiError:
    message = "the server does not allow this method on the requested resource"
    return ApiError(405, "MethodNotAllowed", message)


def unsupported_media_type(got: str) -> ApiError:
    message = (
        "the body of the request was in an unknown format - accepted media types include: application/json"
        f" (got {got})"
    )
    return ApiError(415, "UnsupportedMediaType", message)


def too_many_requests(message: str, causes: list[Cause] | None = None, retry_after_s: int = 0) -> ApiError:
    details: Object = {}
    if causes:
        details["causes"] = [cause.to_dict() for cause in causes]
    if retry_after_s:
        details["retryAfterSeconds"] = retry_after_s
    return ApiError(429, "TooManyRequests", message, details)
