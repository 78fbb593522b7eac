"""Equal findings about many objects, merged: a cause that affects two thousand pods is one line."""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpuslice.core.words import counted
from gpuslice.diagnosis.doctor.facts import Facts, Finding, Level

MOST_ALONE = 3
"""Up to this many equal findings are shown one by one, each with its own command."""
MOST_NAMED = 3
_WORDS = re.compile(r"(\d{4}-\d\d-\d\dT[\d:.]+Z?|\w(?:[\w./-]*\w)?)")
_Pieces = tuple[str, ...]
_NUMBER = re.compile(r"[\d.]+")


@dataclass(frozen=True, slots=True)
class Group:
    """A level, a sentence and a fix, with all objects that they are about.

    A word that differs between objects is a placeholder in `what` and `fix`: NAMESPACE, POD, NODE, NAME, TIME
    or N.
    """

    level: Level
    wheres: tuple[str, ...]
    what: str
    fix: str

    @property
    def where(self) -> str:
        """``4 pods: default/a, default/b, default/c and 1 more``; for a single object its own `where`."""
        if len(self.wheres) == 1:
            return self.wheres[0]
        kinds = {each.partition(" ")[0] for each in self.wheres}
        by_name = len(kinds) == 1 and not any("," in each for each in self.wheres)
        names = [each.partition(" ")[2] for each in self.wheres] if by_name else self.wheres
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        noun = kinds.pop() if by_name else "place"
        return f"{counted(len(names), noun)}: {(', ' if by_name else '; ').join(names[:MOST_NAMED])}{more}"


def grouped(findings: Iterable[Finding], facts: Facts) -> list[Group]:
    """In the order of the first finding of each; `facts`: for the names of nodes and pods."""
    names = {pod.metadata.name: "POD" for pod in (*facts.pods, *facts.plugins)}
    names |= {f"{pod.metadata.namespace}/{pod.metadata.name}": "NAMESPACE/POD" for pod in facts.pods}
    names |= {node.metadata.name: "NODE" for node in facts.nodes}
    alike: dict[tuple[Level, _Pieces, _Pieces, _Pieces], list[Finding]] = {}
    for each in findings:
        known = ChainMap(_own_names(each.where), names)
        where, what, fix = (_general(text, known) for text in (each.where, each.what, each.fix))
        alike.setdefault((each.level, where, what, fix), []).append(each)
    groups = []
    for (level, _, general_what, general_fix), members in alike.items():
        if len(members) <= MOST_ALONE:
            groups += [Group(level, (each.where,), each.what, each.fix) for each in members]
            continue
        sentence = _common(general_what, [each.what for each in members])
        cure = _common(general_fix, [each.fix for each in members])
        groups.append(Group(level, tuple(each.where for each in members), sentence, cure))
    return groups


def _own_names(where: str) -> dict[str, str]:
    """Placeholders, by the names that an object has in its own finding."""
    kind, _, key = where.partition(" ")
    namespace, slash, name = key.partition("/")
    placeholder = kind.upper() if kind in ("pod", "node") else "NAME"
    if not slash:
        return {key: placeholder}
    return {key: f"NAMESPACE/{placeholder}", namespace: "NAMESPACE", name: placeholder}


def _general(text: str, names: Mapping[str, str]) -> _Pieces:
    """`text` split into words, with placeholders for words that depend on the object."""
    pieces = _WORDS.split(text)
    for at in range(1, len(pieces), 2):
        word = pieces[at]
        if _NUMBER.fullmatch(word) and word not in names:
            pieces[at] = "N"
        elif word[0].isdecimal() and ":" in word:
            pieces[at] = "TIME"
        else:
            pieces[at] = names.get(word, word)
    return tuple(pieces)


def _common(general: _Pieces, texts: Sequence[str]) -> str:
    """The words that all `texts` have in the same position, and the placeholders of `general` elsewhere."""
    columns = zip(general, *map(_WORDS.split, texts), strict=True)
    return "".join(own[0] if len(set(own)) == 1 else placeholder for placeholder, *own in columns)
