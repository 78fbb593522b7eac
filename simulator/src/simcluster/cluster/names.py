"""Which names and labels Kubernetes accepts, and what it says about the others."""

from __future__ import annotations

import re

_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN = rf"{_LABEL}(\.{_LABEL})*"
_LABEL_1035 = r"[a-z]([-a-z0-9]*[a-z0-9])?"
_QUALIFIED = r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]"
_VALUE = rf"({_QUALIFIED})?"

_LABEL_WORDS = "must consist of lower case alphanumeric characters or '-'"
_MESSAGES = {
    _SUBDOMAIN: (
        "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and"
        " must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is"
        f" '{_SUBDOMAIN}')"
    ),
    _LABEL: (
        f"a lowercase RFC 1123 label {_LABEL_WORDS}, and must start and end with an alphanumeric character"
        f" (e.g. 'my-name',  or '123-abc', regex used for validation is '{_LABEL}')"
    ),
    _LABEL_1035: (
        f"a DNS-1035 label {_LABEL_WORDS}, start with an alphabetic character, and end with an alphanumeric"
        f" character (e.g. 'my-name',  or 'abc-123', regex used for validation is '{_LABEL_1035}')"
    ),
    _QUALIFIED: (
        "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an"
        " alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is"
        f" '{_QUALIFIED}')"
    ),
    _VALUE: (
        "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and"
        " must start and end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345',"
        f" regex used for validation is '{_VALUE}')"
    ),
}


def _problems(text: str, pattern: str, longest: int) -> list[str]:
    problems = [] if len(text) <= longest else [f"must be no more than {longest} characters"]
    return problems if re.fullmatch(pattern, text) else [*problems, _MESSAGES[pattern]]


def subdomain_problems(name: str) -> list[str]:
    """What is wrong with a name of most kinds; empty when nothing is."""
    return _problems(name, _SUBDOMAIN, 253)


def label_problems(name: str) -> list[str]:
    """The same for namespaces and containers."""
    return _problems(name, _LABEL, 63)


def service_problems(name: str) -> list[str]:
    return _problems(name, _LABEL_1035, 63)


def path_problems(name: str) -> list[str]:
    """The same for RBAC kinds, whose names may hold almost anything."""
    bad = [part for part in ("/", "%") if part in name]
    return ["may not contain '" + part + "'" for part in bad]


def key_problems(key: str) -> list[str]:
    """What is wrong with a label's or annotation's key."""
    prefix, slash, name = key.rpartition("/")
    if not slash:
        return _problems(name, _QUALIFIED, 63)
    if not prefix:
        return ["prefix part must be non-empty"]
    wrong = [f"prefix part {problem}" for problem in subdomain_problems(prefix)]
    return wrong + _problems(name, _QUALIFIED, 63)


def value_problems(value: str) -> list[str]:
    """What is wrong with a label's value."""
    return _problems(value, _VALUE, 63)
