"""The hooks a plugin may implement, for pluggy. The project prefix is `ds4_`. docs/hooks.md is made from this file."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Protocol

import pluggy

from ds4.backend.contract import Backend
from ds4.backend.observe import StepRecord

hookspec = pluggy.HookspecMarker("ds4")
hookimpl = pluggy.HookimplMarker("ds4")

ENTRY_POINT_GROUP = "ds4.backends"
"""Entry point group of plugins that bring a backend."""

PLUGIN_GROUP = "ds4.plugins"
"""Entry point group of all other plugins. Any hook works in either group; in this one a backend is not expected."""


class RegisterCommand(Protocol):
    """What `ds4_register_commands` is given."""

    def __call__(
        self,
        name: str,
        help: str,
        configure: Callable[[argparse.ArgumentParser], object],
        run: Callable[[argparse.Namespace], int | None],
    ) -> None: ...


@hookspec
def ds4_register_backends(register: Callable[[type[Backend]], None]) -> None:
    """Brings backends: call `register(MyBackend)` for each backend class.

    When: each time the plugins are loaded, which is when an engine opens by the name of a backend (or "auto") and for
    `ds4 backends`. By: the thread that loads them. Returns: nothing.

    Must be cheap and may not import a driver: that is for `probe` and `open`. The class is created without arguments
    right away. If the hook raises, registers nothing, or registers a class that is refused, the plugin is left out,
    whole, with one PluginWarning.
    """


@hookspec
def ds4_observe_step(record: StepRecord) -> None:
    """Hears of every step that ran on a backend, committed or failed (then `record.error` says why).

    When: after each step of an engine that was opened by the name of a backend (or "auto"), once its sessions have
    moved (or are back where they were) and the engine's lock is free. A step that was refused before it reached the
    backend is not reported. By: the thread that ran the step, before its call returns; where several threads step an
    engine, calls may overlap and come in another order than `record.step`. Returns: nothing.

    Must be quick, since the caller waits, and may not step the engine. If the hook raises, no step fails: the hook is
    switched off for that engine with one PluginWarning, and all other observers go on.
    """


@hookspec
def ds4_register_commands(register: RegisterCommand) -> None:
    """Adds commands to `ds4`: call `register(name, help, configure, run)` for each.

    `name` is lower-case letters, digits, - and _; `help` is one line; `configure(parser)` adds options to an
    argparse.ArgumentParser; `run(args)` does the work and returns the exit code. Errors of `ds4.plugin` that `run`
    raises become one line and exit code 2; anything else is a fault and shows its traceback.

    When: for `ds4 --help`, and when `ds4` is called with a command that is not its own. By: the main thread.
    `configure` and `run` are called only for the command that was asked for. Returns: nothing.

    Must be cheap: import what a command needs inside `run`. If the hook raises, or a name is malformed or is already
    that of another command, all commands of the plugin are left out with one PluginWarning; its other hooks work on.
    """


HOOKS = ("ds4_register_backends", "ds4_observe_step", "ds4_register_commands")
