"""`ds4 plugin new` and `ds4 plugin check`: start a backend package, and see whether a backend does what ds4 asks.

Owns the two commands' options and what they print. The package is written by `ds4.cli.skeleton`, the check is done by
`ds4.cli._plugin_check`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ds4.backend.registry import Registry
from ds4.cli import skeleton
from ds4.errors import BackendError

HELP = "write a new backend package, or check a backend"
EXAMPLE = """\
examples:
  ds4 plugin new mine
  ds4 plugin check mine
  ds4 plugin check mine --area reference
  ds4 plugin check mine --full --json
"""
NEXT = """\
{folder}: a package with a backend in plain NumPy, ready to be changed. Next:
  python -m pip install -e {folder}
  ds4 plugin check {name}
Its README.md says where to begin.
"""
FAILED = 1
"""Exit code of a check that found something wrong."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)
    new = actions.add_parser("new", help="write a new backend package", description=skeleton.ABOUT)
    new.add_argument("name", metavar="NAME", help="name of the backend: lower-case letters, digits, underscores")
    new.add_argument("--dir", type=Path, default=Path(), metavar="DIR", help="folder to put it into (default: here)")
    check = actions.add_parser(
        "check",
        help="check an installed backend, and compare its speed with that of cpu",
        description="Probe a backend, run the conformance suite on it and measure it. Exit code 1 if anything fails.",
    )
    check.add_argument("name", metavar="NAME", help="name of the backend")
    check.add_argument("--full", action="store_true", help="the whole conformance suite, and longer measurements")
    check.add_argument(
        "--area",
        action="append",
        metavar="AREA",
        help="only this area of the suite, such as reference or laws, and no benchmark; may be repeated",
    )
    check.add_argument("--json", action="store_true", help="print a JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    return write_new(args.name, args.dir) if args.action == "new" else check(args)


def write_new(name: str, parent: Path) -> int:
    """Raises BackendError for a name that cannot be used or is taken, OutputError where nothing can be written."""
    skeleton.Names.of(name)
    for entry in Registry.load().entries():
        if entry.name == name:
            raise BackendError(
                f"there is a backend called {name} already, of the installed distribution {entry.distribution} "
                f"{entry.version}: choose another name",
                backend=name,
                distribution=entry.distribution,
            )
    print(NEXT.format(folder=skeleton.write(name, parent), name=name), end="")
    return 0


def check(args: argparse.Namespace) -> int:
    """Raises BackendError for a name that does not exist, LimitsError for such an area."""
    from ds4.cli import _plugin_check

    with _plugin_check.watching() as progress:
        report = _plugin_check.check(args.name, full=args.full, areas=args.area, progress=progress)
    print(json.dumps(report.as_data(), indent=2) if args.json else report)
    return 0 if report.ok else FAILED
