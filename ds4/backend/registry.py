"""The plugins of this environment: which backends there are, which can run here, which one to take; who observes
steps; which commands there are besides ds4's own. Opens no model.

Built-in plugins (distribution `ds4`) come first and own their names; after them the order is that of the
distributions' names, so that what wins never depends on the order of installation. How one plugin is found, loaded
and checked is the job of `ds4.backend.loading`.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from ds4 import env
from ds4.backend.commands import Command
from ds4.backend.contract import Backend, Probe
from ds4.backend.guard import Refused, guard
from ds4.backend.loading import AUTO, Loader, Plugin, Source, list_sources
from ds4.backend.observe import Observer
from ds4.backend.probing import ask
from ds4.errors import BackendError, BackendUnavailableError, PluginError, PluginWarning, SettingError


@dataclass(frozen=True)
class BackendEntry:
    """One backend, or one plugin that gave none. `reason` says why `backend` is None, in one sentence."""

    name: str  # the backend's name; the entry point's when there is no backend
    distribution: str
    version: str
    backend: Backend | None
    reason: str | None


class Registry:
    """The plugins of this environment. Immutable after `load`, except for `note`, which `choose` writes."""

    def __init__(
        self, entries: Iterable[BackendEntry], plugins: Iterable[Plugin] = (), *, is_strict: bool = False
    ) -> None:
        self._entries = tuple(entries)
        self._plugins = tuple(plugins)
        self._is_strict = is_strict
        self.note: str | None = None
        """What the user should know about the last `choose("auto")`: which better backends were passed over, why."""

    @classmethod
    def load(
        cls, only: Sequence[str] | None = None, strict: bool | None = None, *, path: Sequence[str] | None = None
    ) -> Registry:
        """Load the installed plugins.

        `only` picks entry points by name (default: the switch DS4_PLUGINS, else all). `strict` makes the first
        plugin that cannot be used a PluginError (default: DS4_STRICT_PLUGINS); else each is one PluginWarning.
        `path` is where installed distributions are looked for (default: sys.path).

        Raises SettingError or BackendError when a picked name does not exist, SettingError for a bad switch.
        """
        strict = env.read("DS4_STRICT_PLUGINS") if strict is None else strict
        sources = list_sources(path)
        picked, left_out = _pick(sources, only)
        loader = Loader({source.name for source in sources if source.is_own})
        entries: list[BackendEntry] = []
        plugins: list[Plugin] = []
        for source in sources:
            if source.name not in picked:
                entries.append(_without_backend(source, left_out))
                continue
            try:
                plugin = guard("loading it", partial(loader.load, source))
            except Refused as refused:
                _report(source, f"{source} is left out", refused, strict)
                entries.append(_without_backend(source, str(refused)))
                continue
            plugins.append(plugin)
            entries.extend(BackendEntry(b.name, source.distribution, source.version, b, None) for b in plugin.backends)
        return cls(entries, plugins, is_strict=strict)

    def entries(self) -> tuple[BackendEntry, ...]:
        """Everything found, in load order: backends, and plugins that gave none with the reason."""
        return self._entries

    def backends(self) -> tuple[Backend, ...]:
        """The usable backends, in load order. Whether they are available here is for `probe` to say."""
        return tuple(entry.backend for entry in self._entries if entry.backend is not None)

    def get(self, name: str) -> Backend:
        """The backend of that name, available or not. Raises BackendError with what there is instead."""
        for backend in self.backends():
            if backend.name == name:
                return backend
        close = difflib.get_close_matches(name, [backend.name for backend in self.backends()], n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise BackendError(f"there is no backend {name!r}{hint}; known: {self._listing()}", backend=name)

    def plugins(self) -> tuple[Plugin, ...]:
        """The plugins that were loaded, in load order; those that were not are in `entries`, with the reason."""
        return self._plugins

    def observers(self) -> tuple[tuple[Observer, str], ...]:
        """The plugins' observers of steps, in load order, each with the words that name it in a warning."""
        found = ((plugin.observer(), f"the step observer of {plugin.source}") for plugin in self._plugins)
        return tuple((observer, label) for observer, label in found if observer is not None)

    def commands(self, taken: Collection[str] = ()) -> tuple[Command, ...]:
        """The plugins' commands, in load order. `taken` are names that no plugin can have: ds4's own.

        A plugin whose hook fails, or that registers a command that cannot be, has none of its commands in the list: one
        PluginWarning says why, or a PluginError where plugins are loaded strictly.
        """
        commands: list[Command] = []
        for plugin in self._plugins:
            try:
                commands += plugin.commands({*taken, *(command.name for command in commands)})
            except Refused as refused:
                _report(plugin.source, f"the commands of {plugin.source} are left out", refused, self._is_strict)
        return tuple(commands)

    def probe(self, backend: Backend) -> Probe:
        """backend.probe(), except that one that fails, or takes longer than DS4_PROBE_TIMEOUT seconds, is an absent
        device with that reason."""
        return self.probe_all([backend])[0]

    def probe_all(self, backends: Sequence[Backend]) -> list[Probe]:
        """`probe` of several backends, all at once: the time limit is for all of them together."""
        return ask(backends, env.read("DS4_PROBE_TIMEOUT"))

    def choose(self, name: str = AUTO) -> Backend:
        """The backend to open a model on: the named one, or for "auto" the available one of highest priority.

        Priorities below 0 are never chosen by themselves; equal ones by load order. Sets `note`. Raises
        BackendUnavailableError when the backend (for "auto": every one) is absent here, BackendError when the
        name is unknown.
        """
        self.note = None
        return self._best() if name == AUTO else self._available(name)

    def _available(self, name: str) -> Backend:
        backend = self.get(name)
        probe = self.probe(backend)
        if not probe.available:
            message = f"backend {name} is not available: {probe.reason}"
            raise BackendUnavailableError(message, backend=name, reason=probe.reason)
        return backend

    def _best(self) -> Backend:
        absent: list[str] = []
        eligible = [backend for backend in self.backends() if backend.priority >= 0]
        # One after the other: a device that is not going to be used should not be woken up.
        for backend in sorted(eligible, key=lambda backend: -backend.priority):
            probe = self.probe(backend)
            if probe.available:
                if absent:
                    self.note = f"using backend {backend.name}; not available: {'; '.join(absent)}"
                return backend
            absent.append(f"{backend.name} ({probe.reason})")
        reason = "; ".join(absent) or f"none is chosen by itself; known: {self._listing()}"
        raise BackendUnavailableError(f"no backend is available: {reason}", backend=AUTO, reason=reason)

    def _listing(self) -> str:
        if not self._entries:
            return "none, not even ds4's own: run `pip install -e .` in the source folder"
        return ", ".join(
            entry.name if entry.backend is not None else f"{entry.name} of {entry.distribution} ({entry.reason})"
            for entry in self._entries
        )


def _report(source: Source, what: str, refused: Refused, strict: bool) -> None:
    """One warning, or the PluginError that it is where plugins are loaded strictly."""
    message = f"{what}: {refused}"
    if strict:
        data = {"distribution": source.distribution, "reason": str(refused)}
        raise PluginError(message, **data) from refused.__cause__
    warnings.warn(PluginWarning(message), stacklevel=3)


def _without_backend(source: Source, reason: str) -> BackendEntry:
    return BackendEntry(source.name, source.distribution, source.version, None, reason)


def _pick(sources: Sequence[Source], only: Sequence[str] | None) -> tuple[set[str], str]:
    """Names of the entry points to load, and the reason to give for the others."""
    names = {source.name for source in sources}
    chosen = env.read("DS4_PLUGINS") if only is None else only
    if chosen is None:
        return names, ""
    shown = ",".join(chosen)
    for name in chosen:
        if name in names:
            continue
        message = f"there is no plugin {name!r}; installed: {', '.join(sorted(names)) or 'none'}"
        if only is None:
            raise SettingError(f"DS4_PLUGINS cannot be {shown!r}: {message}", name="DS4_PLUGINS", value=shown)
        raise BackendError(message, backend=name)
    return set(chosen), f"left out by {'DS4_PLUGINS' if only is None else 'only'}={shown}"
