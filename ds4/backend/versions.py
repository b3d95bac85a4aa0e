"""Which plugins this ds4 takes: the versions of the plugin API that it speaks. docs/compatibility.md is the promise.

When `ds4.plugin.API_VERSION` grows: add a line to RELEASES; raise MIN_API_VERSION only when the promise allows.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ds4.backend.contract import API_VERSION

MIN_API_VERSION = 1
"""Oldest plugin API that this ds4 takes; the newest is API_VERSION."""

RELEASES: Mapping[int, str] = MappingProxyType({1: "0.1 or newer"})
"""Versions of the plugin API, and the releases of ds4 that take plugins written for them."""


def misfit(
    what: str, distribution: str, version: Any, *, oldest: int = MIN_API_VERSION, newest: int = API_VERSION
) -> str | None:
    """None if a plugin written for that version fits, else a sentence that says which versions would."""
    spoken = f"version {newest}" if oldest == newest else f"versions {oldest} to {newest}"
    this = f"this ds4 takes {spoken}"
    if version is None:
        return (
            f"{what} does not say for which version of the plugin API it was written ({this}): "
            f"add api_version = {newest}"
        )
    if not isinstance(version, int) or isinstance(version, bool):
        return f"{what} has the api_version {version!r}, which is not a whole number ({this})"
    if oldest <= version <= newest:
        return None
    written = f"{what} was written for version {version} of the plugin API, and {this}"
    fitting = f"install a {distribution} written for {newest}"
    if version in RELEASES:
        return f"{written}: {fitting}, or ds4 {RELEASES[version]}"
    if version > newest:
        return f"{written}: install a newer ds4, or a {distribution} written for {newest}"
    return f"{written}: {fitting}"
