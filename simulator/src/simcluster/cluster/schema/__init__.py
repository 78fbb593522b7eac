"""Which fields Kubernetes objects have: one table for decoding, patching, ownership, OpenAPI and protobuf."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from importlib import resources

SCALARS = frozenset(
    {"str", "int", "bool", "bytes", "float", "Quantity", "IntOrString", "Time", "MicroTime", "Raw"}
)


@dataclass(frozen=True, slots=True)
class Field:
    """One field: ``type`` is a scalar's name or a message's full name, ``shape`` one, list or map.

    ``omits_zero``: an empty string, 0 and false are the same as nothing (Go's plain ``omitempty``).
    """

    name: str
    number: int
    type: str
    shape: str = "one"
    inline: bool = False
    patch: tuple[str, ...] = ()
    key: str = ""
    map_keys: tuple[str, ...] = ()
    is_set: bool = False
    atomic: bool = False
    omits_zero: bool = False
    is_message: bool = False


@dataclass(frozen=True, slots=True)
class Message:
    """A message: ``fields`` as JSON shows them (inlined ones flattened), ``numbered`` as protobuf does."""

    name: str
    atomic: bool = False
    fields: dict[str, Field] = field(default_factory=dict)
    numbered: dict[int, Field] = field(default_factory=dict)


class Schema:
    """All messages by full name, such as ``core.v1.PodSpec``."""

    def __init__(self, messages: dict[str, Message]) -> None:
        self._messages = messages

    def message(self, name: str) -> Message:
        return self._messages[name]

    def get(self, name: str) -> Message | None:
        return self._messages.get(name)

    def names(self) -> list[str]:
        return list(self._messages)


@cache
def standard_schema() -> Schema:
    """The tables beside this file, parsed once."""
    messages: dict[str, Message] = {}
    for file in resources.files(__package__).iterdir():
        if file.name.endswith(".txt"):
            messages |= _parse(file.name.removesuffix(".txt"), file.read_text("utf-8"))
    for message in messages.values():
        _flatten(message, messages)
    return Schema(messages)


def _parse(package: str, text: str) -> dict[str, Message]:
    messages: dict[str, Message] = {}
    current = Message("")
    for line in text.splitlines():
        words = line.split()
        if line.startswith(" "):
            name, number, type_name, *attributes = words
            options = dict(word.partition("=")[::2] for word in attributes)
            shape = {"[": "list", "{": "map"}.get(type_name[0], "one")
            inner = type_name.strip("[]{}")
            full = inner if inner in SCALARS or "." in inner else f"{package}.{inner}"
            parsed = Field(
                name=name.removeprefix("*"),
                number=int(number),
                type=full,
                is_message=full not in SCALARS,
                shape=shape,
                inline=name.startswith("*"),
                patch=tuple(options["patch"].split(",")) if "patch" in options else (),
                key=options.get("key", ""),
                map_keys=tuple(options["map"].split(",")) if "map" in options else (),
                is_set="set" in options,
                atomic="atomic" in options,
                omits_zero="omit" in options,
            )
            current.numbered[parsed.number] = parsed
        else:
            current = Message(f"{package}.{words[0]}", atomic="atomic" in words)
            messages[current.name] = current
    return messages


def _flatten(message: Message, messages: dict[str, Message]) -> None:
    if message.fields:
        return
    for item in message.numbered.values():
        if item.inline:
            _flatten(messages[item.type], messages)
            message.fields.update(messages[item.type].fields)
        else:
            message.fields[item.name] = item
