"""Expressions of admission policies (CEL): Google's implementation, with Kubernetes' additions."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from cel_expr_python import cel

from gpuslice.core.quantity import scaled, whole_number

NAMES = ("request", "object", "oldObject", "namespaceObject", "variables", "params")
_DEFINITION = "name: kubernetes\nextensions:\n- name: two-var-comprehensions\n- name: strings\n"
_PATCH = "JSONPatch{"
_MICRO = 1_000_000


class CelError(Exception):
    """An expression that does not compile, or has no value for what it is asked about."""


def evaluate(expression: str, known: Mapping[str, Any]) -> Any:
    """Its value as Python's own. Raises CelError."""
    found = compiled(expression).eval(data=dict.fromkeys(NAMES) | dict(known))
    if found.type() == cel.Type.ERROR:
        raise CelError(str(found.value()))
    return _plain(found)


@cache
def compiled(expression: str) -> Any:
    """Raises CelError where the API server would not take a policy with it."""
    try:
        return _environment().compile(_literals(expression))
    except RuntimeError as error:
        raise CelError(str(error)) from error


@cache
def _environment() -> Any:
    kind = cel.Type
    amounts = kind.DOUBLE  # of a quantity
    functions = [
        _function("quantity", amounts, [kind.STRING], _quantity, member=False),
        _function(
            "isQuantity", kind.BOOL, [kind.STRING], lambda text: scaled(text, 1) is not None, member=False
        ),
        _function("isInteger", kind.BOOL, [amounts], lambda number: float(number).is_integer()),
        _function("asInteger", kind.INT, [amounts], int),
        _function("asApproximateFloat", amounts, [amounts], lambda number: number),
        _function("sum", kind.INT, [kind.List(kind.INT)], sum),
        _function("max", kind.INT, [kind.List(kind.INT)], max),
        _function("jsonpatch.escapeKey", kind.STRING, [kind.STRING], _escaped, member=False),
    ]
    variables = dict.fromkeys(NAMES, kind.DYN)
    return cel.NewEnv(config=cel.NewEnvConfigFromYaml(_DEFINITION), variables=variables, functions=functions)


def _function(
    name: str, result: Any, parameters: Sequence[Any], played: Callable[..., Any], *, member: bool = True
) -> Any:
    overload = cel.Overload(
        f"{name.replace('.', '_')}_here",
        return_type=result,
        parameters=list(parameters),
        is_member=member,
        impl=played,
    )
    return cel.FunctionDecl(name, [overload])


def _quantity(text: str) -> float:
    whole = whole_number(text)
    return float(whole) if whole is not None else (scaled(text, _MICRO) or 0) / _MICRO


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _literals(expression: str) -> str:
    """``JSONPatch{op: …}`` as a map: this implementation knows no type of that name."""
    while (start := expression.find(_PATCH)) >= 0:
        depth, at = 1, start + len(_PATCH)
        while depth and at < len(expression):
            if expression[at] in "'\"":
                at = expression.index(expression[at], at + 1)
            depth += {"{": 1, "}": -1}.get(expression[at], 0)
            at += 1
        inner = re.sub(r"(^|,)(\s*)(op|path|from|value):", r"\1\2'\3':", expression[start + len(_PATCH) : at])
        expression = expression[:start] + "{" + inner + expression[at:]
    return expression


def _plain(found: Any) -> Any:
    value = found.value() if hasattr(found, "value") else found
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, str | bytes) or not hasattr(value, "__iter__"):
        return value
    return [_plain(item) for item in value]
