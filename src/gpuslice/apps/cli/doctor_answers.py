"""Checks from inside the cluster whether our services answer: ``gpuslice doctor --answers URL``."""

from __future__ import annotations

import base64
import ssl
from collections.abc import Iterator, Sequence
from http.client import HTTPException
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import urlopen

from gpuslice.core.errors import words_of
from gpuslice.diagnosis.doctor.facts import EXTENDER, Facts, Finding, Level, hook_service

TIMEOUT_S = 5.0


def places_of(urls: Sequence[str]) -> list[tuple[str, str]]:
    """Namespace and name of the services in URLs of the form ``http://NAME.NAMESPACE.svc…``."""
    return [place for url in urls if (place := _place(url)) is not None]


def answers(facts: Facts, urls: Sequence[str]) -> Iterator[Finding]:
    """Each of `urls` must answer with success."""
    for url in urls:
        place = _place(url)
        slices = facts.slices_of(*place) if place is not None else []
        hooks = [hook for hook in facts.hooks if place is not None and hook_service(hook) == place]
        if not slices or any(each.get("endpoints") for each in slices):  # unknown: only a request can tell
            clients = (each.get("clientConfig") for hook in hooks for each in hook.get("webhooks") or ())
            trusted = next((each["caBundle"] for each in clients if each and each.get("caBundle")), "")
            if why := ask(url, base64.b64decode(trusted).decode("ascii", "replace")):
                fix = "see whether the pods behind it are ready, their logs, and network policies before them"
                yield Finding(Level.ERROR, url, f"does not answer: {why}", fix)
        elif place is not None and place[1] != EXTENDER:  # the extender has its own check
            # only a note if its pods run on nodes that share cards, and there is none yet
            level = Level.ERROR if hooks or facts.labelled() else Level.NOTE
            fix = f"kubectl -n {place[0]} get all -l component={place[1]}, and the events of what is there"
            if level is Level.NOTE:
                fix = f"label a node with cards {facts.node_label}=true, if pods of it are expected"
            yield Finding(level, url, "has no pod behind it", fix)


def _place(url: str) -> tuple[str, str] | None:
    try:
        name, _, rest = (urlsplit(url).hostname or "").partition(".")
    except ValueError:  # of brackets that are no address
        return None
    namespace, _, kind = rest.partition(".")
    return (namespace, name) if kind == "svc" or kind.startswith("svc.") else None


def ask(url: str, authority: str) -> str:
    """Why `url` did not answer with success; "" if it did. `authority`: PEM; "" for the system's."""
    try:
        context = ssl.create_default_context(cadata=authority or None)
        with urlopen(url, timeout=TIMEOUT_S, context=context):
            return ""
    except HTTPError as error:
        said = " ".join(error.read(500).decode("utf-8", "replace").split())
        return f"{said or error.reason} (HTTP {error.code})"
    except (OSError, ValueError, HTTPException) as error:
        reason = getattr(error, "reason", error)  # urllib's errors wrap the cause
        return words_of(reason) if isinstance(reason, Exception) else str(reason)
