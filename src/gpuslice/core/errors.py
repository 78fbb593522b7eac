"""One class for each reaction of a caller."""

import re

LONGEST_VALUE = 200
_LOGIN = re.compile(r"//[^/]*@")


class GpusliceError(Exception):
    """Base of every error that gpuslice raises itself."""


def words_of(error: Exception) -> str:
    """Why it failed, on one line, without the system's error number and path, or a parser's position."""
    if isinstance(error, UnicodeDecodeError):
        return "it is no text"
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return printable(" ".join(str(text).replace('in "<byte string>",', "at").split()))


def shown(value: object) -> str:
    """What somebody wrote, for logs, events and terminals: at most a line, without control characters, and
    without a URL's password."""
    text = without_login(str(value))
    return printable(text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}…")


def without_login(text: str) -> str:
    """With "…" for the user and password of a URL."""
    return _LOGIN.sub("//…@", text)


def printable(text: str) -> str:
    """Text as ps(1) shows other users' commands: nothing in it ends a line or controls a terminal."""
    return text if text.isprintable() else "".join(one if one.isprintable() else "?" for one in text)


class FieldError(GpusliceError):
    """The message names the field, its value and what would be right."""

    def __init__(self, field: str, value: object, must_be: str) -> None:
        super().__init__(f'{field} is "{shown(value)}", must be {must_be}')
        self.field = field


class InvalidRequestError(FieldError):
    """A pod asks for something that can never be given; its author must be told."""


class ContractError(FieldError):
    """An annotation, ConfigMap or payload of the contract cannot be read; ignore and report it."""
