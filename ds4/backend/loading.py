"""One plugin at a time: list without importing, load under a guard, check before anything is kept.

Knows pluggy and entry points, and what a backend class must look like. Which backend is used, and what happens to
a plugin that is refused, is for `ds4.backend.registry`, its only user.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pluggy

from ds4.backend import commands, hookspecs
from ds4.backend.commands import Command
from ds4.backend.contract import Backend
from ds4.backend.guard import Refused, guard, said
from ds4.backend.hookspecs import ENTRY_POINT_GROUP, HOOKS, PLUGIN_GROUP
from ds4.backend.observe import Observer, StepRecord
from ds4.backend.versions import misfit

AUTO = "auto"
OWN_DISTRIBUTION = "ds4"
HOOK = "ds4_register_backends"
NAME_FORM = re.compile(r"[a-z][a-z0-9_-]*")


# ---------------------------------------------------------------- listing


@dataclass(frozen=True)
class Source:
    """One entry point of an installed distribution, or a distribution whose entry points cannot be read."""

    name: str
    distribution: str
    version: str
    point: importlib.metadata.EntryPoint | None
    unreadable: BaseException | None = None

    def __str__(self) -> str:
        return f"plugin {self.name} of {self.distribution} {self.version}"

    @property
    def is_own(self) -> bool:
        return _canonical(self.distribution) == OWN_DISTRIBUTION

    @property
    def brings_backend(self) -> bool:
        return self.point is not None and self.point.group == ENTRY_POINT_GROUP


def list_sources(path: Sequence[str] | None) -> list[Source]:
    """Entry points of both groups, ours first, then by distribution and name."""
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
        text = distribution.read_text("entry_points.txt") or ""
        if not any(group in text for group in (ENTRY_POINT_GROUP, PLUGIN_GROUP)):
            return
        points = list(distribution.entry_points)
    except Exception as exc:
        yield Source(name, name, version, None, exc)
        return
    seen: set[str] = set()
    for group in (ENTRY_POINT_GROUP, PLUGIN_GROUP):
        for point in points:
            # What stands in both groups is one plugin.
            if point.group == group and point.value not in seen:
                yield Source(point.name, name, version, point)
        seen.update(point.value for point in points if point.group == group)


def _metadata(distribution: importlib.metadata.Distribution, field: str) -> str:
    try:
        value = distribution.metadata[field]
    except Exception:  # a distribution without readable metadata: named as what it is, and still listed
        value = None
    return value or "unknown"


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


# ---------------------------------------------------------------- loading


@dataclass(frozen=True)
class Plugin:
    """A plugin that was loaded and checked. Its manager holds nothing else: a bad plugin leaves nothing behind."""

    source: Source
    hooks: tuple[str, ...]
    backends: tuple[Backend, ...]
    manager: pluggy.PluginManager

    def observer(self) -> Observer | None:
        """Calls its hook ds4_observe_step."""
        if "ds4_observe_step" not in self.hooks:
            return None
        hook = self.manager.hook.ds4_observe_step

        def observe(record: StepRecord) -> None:
            hook(record=record)

        return observe

    def commands(self, taken: set[str]) -> list[Command]:
        """The commands that it registers, or Refused. `taken` are names that are in use."""
        if commands.HOOK not in self.hooks:
            return []
        return commands.collect(self.manager.hook.ds4_register_commands, str(self.source), taken)


class Loader:
    """Turns entry points into checked plugins and remembers which names of backends are taken."""

    def __init__(self, own_names: set[str]) -> None:
        self._own_names = own_names
        self._owners: dict[str, str] = {}

    def load(self, source: Source) -> Plugin:
        """One plugin with all its backends, or Refused and nothing of it."""
        if source.point is None:
            raise Refused(f"its entry_points.txt cannot be read: {said(source.unreadable)}") from source.unreadable
        plugin = guard(f"importing {source.point.value}", source.point.load)
        _check_version(source, getattr(plugin, "api_version", None), source.point.value)
        manager, hooks = _hooks_of(plugin)
        classes = _registered(source, manager, plugin, hooks)
        if not classes and not source.is_own:
            _check_version(source, getattr(plugin, "api_version", None), source.point.value, must_say=True)
        backends = tuple(_created(source, cls) for cls in classes)
        self._claim(source, [backend.name for backend in backends])
        return Plugin(source, hooks, backends, manager)

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


def _check_version(source: Source, version: Any, what: str, *, must_say: bool = False) -> None:
    if version is None and not must_say:
        return
    sentence = misfit(what, source.distribution, version)
    if sentence is not None:
        raise Refused(sentence)


def _hooks_of(plugin: Any) -> tuple[pluggy.PluginManager, tuple[str, ...]]:
    """A manager that knows the plugin, and the names of the hooks it implements: all are ours and fit."""
    manager = pluggy.PluginManager("ds4")
    manager.add_hookspecs(hookspecs)
    try:
        manager.register(plugin)
    except pluggy.PluginValidationError as exc:
        # pluggy repeats the plugin and the definition first; what is wrong stands in the last line.
        raise Refused(f"its hooks are not valid: {str(exc).splitlines()[-1]}") from exc
    callers = manager.get_hookcallers(plugin) or ()
    for caller in callers:
        if not caller.has_spec() and not all(impl.optionalhook for impl in caller.get_hookimpls()):
            (nearest,) = difflib.get_close_matches(caller.name, HOOKS, n=1, cutoff=0)
            raise Refused(f"it implements an unknown hook {caller.name}; did you mean {nearest}?")
    hooks = tuple(name for name in HOOKS if name in {caller.name for caller in callers})
    for name in HOOKS:
        if name not in hooks and hasattr(plugin, name):
            raise Refused(f"it has {name} but no hook of that name: put @ds4.plugin.hookimpl above it")
    if not hooks:
        raise Refused(_no_hook(plugin))
    return manager, hooks


def _no_hook(plugin: Any) -> str:
    for name in getattr(plugin, "__dict__", ()):
        if name.startswith("ds4_"):
            (nearest,) = difflib.get_close_matches(name, HOOKS, n=1, cutoff=0)
            return f"it has {name} but no hook: put @ds4.plugin.hookimpl above a function {nearest}"
    return f"it has no hook {', '.join(HOOKS[:-1])} or {HOOKS[-1]}"


def _registered(source: Source, manager: pluggy.PluginManager, plugin: Any, hooks: tuple[str, ...]) -> list[Any]:
    """The backend classes that the plugin's hook registers."""
    if HOOK not in hooks:
        if source.brings_backend:
            raise Refused(f"it has no hook {HOOK}; a plugin without backend belongs into the group {PLUGIN_GROUP}")
        return []
    classes: list[Any] = []
    returned = guard(f"its hook {HOOK}", partial(manager.hook.ds4_register_backends, register=classes.append))
    if not classes and returned:
        raise Refused(f"its hook {HOOK} returned {returned[0]!r} and registered nothing; call register(...) instead")
    if not classes:
        raise Refused(f"its hook {HOOK} registered no backend")
    return classes


def _created(source: Source, cls: Any) -> Backend:
    """The backend of a registered class, or Refused."""
    _check_class(source, cls)
    backend: Backend = guard(f"creating {cls.__name__}", cls)
    return backend


def _check_class(source: Source, cls: Any) -> None:
    if not (isinstance(cls, type) and issubclass(cls, Backend)):
        raise Refused(f"it registered {cls!r}, which is not a subclass of ds4.plugin.Backend")
    # What Backend itself says is the newest version, whatever the plugin was written for.
    says = any("api_version" in vars(base) for base in cls.__mro__[: cls.__mro__.index(Backend)])
    version = cls.api_version if says or source.is_own else None
    _check_version(source, version, cls.__name__, must_say=True)
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
