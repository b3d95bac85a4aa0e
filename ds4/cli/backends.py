"""`ds4 backends`: which backends and plugins are installed, whether they can run here, and if not, why."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass

from ds4.backend.contract import Probe
from ds4.backend.registry import BackendEntry, Registry

HELP = "list the backends that are installed, and why one is not available"
EXAMPLE = """\
example:
  ds4 backends
  ds4 backends --json
  DS4_PLUGINS=cpu ds4 backends
"""


@dataclass(frozen=True)
class Row:
    """What is shown of one backend, or of one plugin that gave none."""

    name: str
    distribution: str
    version: str
    available: bool
    reason: str | None
    devices: tuple[str, ...]
    priority: int | None


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    parser.add_argument("--json", action="store_true", help="print a JSON list instead of a table")


def run(args: argparse.Namespace) -> int:
    registry = Registry.load()
    answers = iter(registry.probe_all(registry.backends()))
    rows = [row_of(entry, None if entry.backend is None else next(answers)) for entry in registry.entries()]
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return 0
    print_table(rows)
    for plugin in registry.plugins():
        others = [hook for hook in plugin.hooks if hook != "ds4_register_backends"]
        if others:
            print(f"{plugin.source} has {', '.join(others)}")
    return 0


def row_of(entry: BackendEntry, probe: Probe | None) -> Row:
    if entry.backend is None or probe is None:
        return Row(entry.name, entry.distribution, entry.version, False, entry.reason, (), None)
    reason = None if probe.available else probe.reason
    devices = tuple(str(device) for device in probe.devices)
    priority = entry.backend.priority
    return Row(entry.name, entry.distribution, entry.version, probe.available, reason, devices, priority)


def print_table(rows: list[Row]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("backend", "distribution", "version", "devices", "available", box=box.SIMPLE_HEAD)
    for row in rows:
        # Text, not str: a reason may hold [brackets], which rich would read as markup.
        cells = (Text(cell) for cell in (row.name, row.distribution, row.version, ", ".join(row.devices)))
        state = Text("yes", style="green") if row.available else Text(f"no: {row.reason}", style="yellow")
        table.add_row(*cells, state)
    # A pipe has no width to fold to: there, every reason stays on its one line.
    console = Console(width=None if sys.stdout.isatty() else 10_000)
    with console.capture() as captured:
        console.print(table)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()).strip("\n"))
