"""When an X.509 certificate ends, read from its DER without a library of its own.

Source of the structure: RFC 5280, section 4.1. Nothing is verified here: who trusts a certificate is the
client's affair, when it runs out is the operator's.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from datetime import UTC, datetime

_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----(.+?)-----END CERTIFICATE-----", re.DOTALL)
_UTC_TIME, _GENERALIZED_TIME, _VERSION = 0x17, 0x18, 0xA0


def ends(pem: bytes) -> datetime | None:
    """When the first certificate of `pem` runs out; None when there is none that can be read."""
    match = _PEM.search(pem)
    if match is None:
        return None
    try:
        certificate = next(_elements(base64.b64decode(match[1])))[1]
        signed = next(_elements(certificate))[1]
        fields = [each for each in _elements(signed) if each[0] != _VERSION]
        validity = fields[3][1]  # serial number, signature, issuer, validity
        tag, not_after = list(_elements(validity))[1]
        text = not_after.decode("ascii")
        if tag == _UTC_TIME:  # two digits of the year: 50 to 99 are of the last century
            text = ("19" if int(text[:2]) >= 50 else "20") + text
        elif tag != _GENERALIZED_TIME:
            return None
        return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)
    except (ValueError, IndexError, StopIteration):
        return None


def _elements(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Tag and content of each DER element in a row."""
    at = 0
    while at < len(data):
        tag, length, at = data[at], data[at + 1], at + 2
        if length & 0x80:
            octets = length & 0x7F
            length, at = int.from_bytes(data[at : at + octets]), at + octets
        if at + length > len(data):
            raise ValueError("an element is longer than its surroundings")
        yield tag, data[at : at + length]
        at += length
