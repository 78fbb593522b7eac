"""Hosts as they stand in addresses."""

from __future__ import annotations


def bracketed(host: str) -> str:
    """As it stands before a port and in a URL: an IPv6 address has brackets there."""
    return f"[{host}]" if ":" in host else host
