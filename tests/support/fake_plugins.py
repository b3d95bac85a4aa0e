"""Throw-away distributions in a folder: what pip leaves behind for a one-module plugin, without running pip."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

HOOK = """
@hookimpl
def ds4_register_backends(register):
    register(Fake)
"""


def backend_code(
    name: str = "fake",
    *,
    priority: int = 0,
    probe: str = "return Probe(True, devices=('fake 0',))",
    api_version: int = 1,
    hook: str = HOOK,
) -> str:
    """Source of a plugin module with one backend class `Fake` that opens nothing."""
    return f"""
from ds4.plugin import Backend, Probe, hookimpl

class Fake(Backend):
    name = {name!r}
    api_version = {api_version}
    priority = {priority}
    def probe(self):
        {probe}
    def memory_plan(self, model, limits, options):
        raise NotImplementedError
    def open(self, model, limits, options):
        raise NotImplementedError
{hook}"""


BAD = {
    "bad-import": ("import no_such_driver\n", "ModuleNotFoundError: No module named 'no_such_driver'"),
    "bad-exit": ("raise SystemExit('no device')\n", "SystemExit: no device"),
    "bad-argument": (
        backend_code(hook="@hookimpl\ndef ds4_register_backends(register, config):\n    register(Fake)\n"),
        "its hooks are not valid",
    ),
    "bad-version": (
        backend_code("outdated", api_version=999),
        "version 999 of the plugin API, and this ds4 takes version 1",
    ),
    "bad-name": (backend_code("cpu", priority=1000), "backend name 'cpu' is already that of distribution ds4"),
}
"""The five plugins of field case 49: source, and what must be said about it."""


def _file_name(distribution: str) -> str:
    return distribution.replace("-", "_").replace(".", "_")


class PluginFolder:
    """A folder for sys.path or PYTHONPATH that looks like site-packages."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(
        self,
        distribution: str,
        code: str,
        *,
        version: str = "1.0",
        point: str | None = None,
        value: str | None = None,
        group: str = "ds4.backends",
    ) -> str:
        """Install a distribution of one module; returns the module's name. The entry point is named like it."""
        module = f"{_file_name(distribution)}_plugin"
        (self.path / f"{module}.py").write_text(code, encoding="utf-8")
        points = f"[{group}]\n{point or distribution} = {value or module}\n"
        self.add_info(distribution, points, version=version)
        return module

    def add_info(self, distribution: str, entry_points: str, *, version: str = "1.0") -> None:
        info = self.path / f"{_file_name(distribution)}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n", encoding="utf-8"
        )
        (info / "RECORD").write_text("", encoding="utf-8")
        (info / "entry_points.txt").write_text(entry_points, encoding="utf-8")

    def environment(self, **switches: str) -> dict[str, str]:
        """Environment of a Python process that has these plugins and this ds4, and no DS4_* switch but the given."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("DS4_", "PYTHON", "PYTEST"))}
        return {**kept, "PYTHONPATH": os.pathsep.join([str(self.path), str(ROOT)]), **switches}
