"""One plugin at a time: list without importing, load under a guard, check before anything is kept.

Knows pluggy and entry points, and what a backend class must look like. Which backend is used, and what happens to
a plugin that is refused, is for `ds4.backend.registry`, its only user.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import pluggy

from ds4.backend import hookspecs
from ds4.backend.contract import API_VERSION, Backend
from ds4.backend.hookspecs import ENTRY_POINT_GROUP

T = TypeVar("T")

AUTO = "auto"
OWN_DISTRIBUTION = "ds4"
HOOK = "ds4_register_backends"
NAME_FORM = re.compile(r"[a-z][a-z0-9_-]*")


class Refused(Exception):
    """The plugin cannot be used; the text says why. `__cause__` is what the plugin raised, if it did."""


def guard(what: str, call: Callable[[], T]) -> T:
    """Run a plugin's code. Whatever it raises is its own failure, SystemExit included; Ctrl-C is the user's."""
    try:
        return call()
    except (KeyboardInterrupt, Refused):
        raise
    except BaseException as exc:
        raise Refused(f"{what} raised {said(exc)}") from exc


def said(exc: BaseException | None) -> str:
    """An exception as part of one line."""
    try:
        text = " ".join(str(exc).split())
    except Exception:
        text = "(its message cannot be shown)"
    text = text if len(text) <= 400 else text[:400] + "..."
    return f"{type(exc).__name__}: {text}" if text else type(exc).__name__


# ---------------------------------------------------------------- listing


@dataclass(frozen=True)
class Source:
    """One entry point of an installed distribution, or a distribution whose entry points cannot be read."""

    name: str
    distribution: str
    version: str
    point: importlib.metadata.EntryPoint | None
    unreadable: BaseException | None = None

    @property
    def is_own(self) -> bool:
        return _canonical(self.distribution) == OWN_DISTRIBUTION


def list_sources(path: Sequence[str] | None) -> list[Source]:
    """Entry points of the group, ours first, then by distribution and name."""
    found = importlib.metadata.distributions() if path is None else importlib.metadata.distributions(path=list(path))
    seen: set[str] = set()
    sources: list[Source] = []
    for distribution in found:
        key = _canonical(_metadata(distribution, "Name"))
        # The first one on the path is the one that imports; a source folder's egg-info repeats an installed one.
        if key not in seen:
            sources.extend(_points(distribution))
        seen.add(key)
    return sorted(sources, key=lambda s: (not s.is_own, _canonical(s.distribution), s.name))


def _points(distribution: importlib.metadata.Distribution) -> Iterator[Source]:
    # Read by hand and not with importlib.metadata.entry_points(): there, one unreadable file of any package
    # in the environment stops the whole list.
    name, version = _metadata(distribution, "Name"), _metadata(distribution, "Version")
    try:
        if ENTRY_POINT_GROUP not in (distribution.read_text("entry_points.txt") or ""):
            return
        points = [point for point in distribution.entry_points if point.group == ENTRY_POINT_GROUP]
    except Exception as exc:
        yield Source(name, name, version, None, exc)
        return
    for point in points:
        yield Source(point.name, name, version, point)


def _metadata(distribution: importlib.metadata.Distribution, field: str) -> str:
    try:
        value = distribution.metadata[field]
    except Exception:  # a distribution without readable metadata: named as what it is, and still listed
        value = None
    return value or "unknown"


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


# ---------------------------------------------------------------- loading


class Loader:
    """Turns entry points into checked backends and remembers which names are taken."""

    def __init__(self, own_names: set[str]) -> None:
        self._own_names = own_names
        self._owners: dict[str, str] = {}

    def load(self, source: Source) -> list[Backend]:
        """All backends of one plugin, or Refused and none of them."""
        if source.point is None:
            raise Refused(f"its entry_points.txt cannot be read: {said(source.unreadable)}") from source.unreadable
        plugin = guard(f"importing {source.point.value}", source.point.load)
        backends = []
        for cls in _registered(plugin):
            _check_class(cls)
            backends.append(guard(f"creating {cls.__name__}", cls))
        self._claim(source, [backend.name for backend in backends])
        return backends

    def _claim(self, source: Source, names: list[str]) -> None:
        for i, name in enumerate(names):
            owner = self._owners.get(name)
            if name in names[:i]:
                owner = source.distribution
            elif owner is None and name in self._own_names and not source.is_own:
                owner = OWN_DISTRIBUTION
            if owner is not None:
                raise Refused(f"backend name {name!r} is already that of distribution {owner}")
        self._owners.update((name, source.distribution) for name in names)


def _registered(plugin: Any) -> list[Any]:
    """What the plugin's hook registers. A manager of its own, so that a bad plugin leaves nothing behind."""
    manager = pluggy.PluginManager("ds4")
    manager.add_hookspecs(hookspecs)
    try:
        manager.register(plugin)
    except pluggy.PluginValidationError as exc:
        # pluggy repeats the plugin and the definition first; what is wrong stands in the last line.
        raise Refused(f"its hooks are not valid: {str(exc).splitlines()[-1]}") from exc
    for caller in manager.get_hookcallers(plugin) or ():
        if not caller.has_spec() and not all(impl.optionalhook for impl in caller.get_hookimpls()):
            raise Refused(f"it implements an unknown hook {caller.name}; did you mean {HOOK}?")
    classes: list[Any] = []
    returned = guard(f"its hook {HOOK}", lambda: getattr(manager.hook, HOOK)(register=classes.append))
    if not classes:
        raise Refused(_no_backend(manager, plugin, returned))
    return classes


def _no_backend(manager: pluggy.PluginManager, plugin: Any, returned: list[Any]) -> str:
    if returned:
        return f"its hook {HOOK} returned {returned[0]!r} and registered nothing; call register(...) instead"
    if manager.get_hookcallers(plugin):
        return f"its hook {HOOK} registered no backend"
    alike = [name for name in getattr(plugin, "__dict__", ()) if name.startswith("ds4_")]
    if alike:
        return f"it has {alike[0]} but no hook: put @ds4.plugin.hookimpl above a function {HOOK}(register)"
    return f"it has no hook {HOOK}"


def _check_class(cls: Any) -> None:
    if not (isinstance(cls, type) and issubclass(cls, Backend)):
        raise Refused(f"it registered {cls!r}, which is not a subclass of ds4.plugin.Backend")
    version = getattr(cls, "api_version", None)
    if version != API_VERSION:
        raise Refused(
            f"{cls.__name__} is written for version {version} of the backend contract, and this ds4 has version "
            f"{API_VERSION}: install versions of both that fit"
        )
    missing = sorted(getattr(cls, "__abstractmethods__", ()))
    if missing:
        raise Refused(f"{cls.__name__} does not implement {', '.join(missing)}")
    name = getattr(cls, "name", None)
    if not isinstance(name, str) or not NAME_FORM.fullmatch(name) or name == AUTO:
        raise Refused(
            f"{cls.__name__} has the name {name!r}; a backend needs one of lower-case letters, digits, - and _ "
            f"that begins with a letter and is not {AUTO!r}"
        )
    if not isinstance(cls.priority, int):
        raise Refused(f"{cls.__name__} has the priority {cls.priority!r}, which is not a whole number")
