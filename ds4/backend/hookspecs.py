"""The hooks a plugin may implement, for pluggy. The project prefix is `ds4_`."""

from __future__ import annotations

from collections.abc import Callable

import pluggy

from ds4.backend.contract import Backend

hookspec = pluggy.HookspecMarker("ds4")
hookimpl = pluggy.HookimplMarker("ds4")

ENTRY_POINT_GROUP = "ds4.backends"


@hookspec
def ds4_register_backends(register: Callable[[type[Backend]], None]) -> None:
    """Called once, when the registry loads the plugin, by the thread that first needs a backend.

    Call `register(MyBackend)` for each backend class. Must be cheap and may not import a driver.
    """
