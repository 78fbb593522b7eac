"""Reads an exporter's page back: what Prometheus sees, for programs that show it or compare with it."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass

from gpuslice.core.errors import GpusliceError

_NUMBER = r"[-+]?(?:\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+|Inf|NaN)"
_SAMPLE = re.compile(rf"([a-zA-Z_:][\w:]*)(?:\{{(.*)\}})? ({_NUMBER})(?: -?\d+)?", re.ASCII)
# a name begins where no word goes on: else a long word is looked at from each of its letters
_LABEL = re.compile(r'(?<!\w)([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"', re.ASCII)
_ESCAPED = re.compile(r'\\[\\"n]')
_ESCAPES = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}


MOST_PAGE_BYTES = 64 << 20


class ScrapeError(GpusliceError):
    """The page cannot be had; the message names the address."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of a page."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Page:
    """One scrape."""

    samples: tuple[Sample, ...]

    def find(self, name: str, **labels: str) -> list[Sample]:
        """Samples of a metric that carry these labels."""
        return [one for one in self.samples if one.name == name and labels.items() <= one.labels.items()]


def parse(text: str, prefix: str = "") -> Page:
    """A page in the text format 0.0.4. Lines that are no sample, or none of `prefix`, are left out."""
    lines = text.split("\n")  # not splitlines: a label's value may hold all that ends lines elsewhere
    matches = (_SAMPLE.fullmatch(line) for line in lines if line.startswith(prefix))
    return Page(tuple(Sample(m[1], labels_of(m[2] or ""), float(m[3])) for m in matches if m))


def labels_of(text: str) -> dict[str, str]:
    """The labels that stand between braces, with the braces or without."""
    return {
        name: _ESCAPED.sub(lambda found: _ESCAPES[found[0]], value) if "\\" in value else value
        for name, value in _LABEL.findall(text)
    }


def fetch(url: str, timeout_s: float = 5.0, prefix: str = "") -> Page:
    """Scrape `url` now, what begins with `prefix`. Raises `ScrapeError`.

    `timeout_s` is for each word of it, four times that for the whole: a thread that waits has no other end.
    """
    import http.client  # not for who only reads a page
    import urllib.request

    if not url.startswith(("http://", "https://")):
        raise ScrapeError(f"{url} must be an http or https URL")
    try:
        parts, size_bytes, deadline_s = [], 0, time.monotonic() + 4 * timeout_s
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            while part := answer.read1(1 << 16):
                parts.append(part)
                size_bytes += len(part)
                if size_bytes > MOST_PAGE_BYTES:
                    raise OSError(f"the page has more than {MOST_PAGE_BYTES >> 20} MiB")
                if time.monotonic() > deadline_s:
                    raise OSError("the page comes too slowly")
            if answer.length:
                raise OSError("the page is cut off")
        return parse(b"".join(parts).decode("utf-8", "replace"), prefix)
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)  # of urllib's errors, what is behind them
        raise ScrapeError(f"{url}: {getattr(reason, 'strerror', None) or reason}") from error
