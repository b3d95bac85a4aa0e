"""`ds4 synth PRESET OUT`: write a synthetic model file. Owns options and progress display; ds4.model.synth works."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from ds4.errors import LimitsError
from ds4.model import synth
from ds4.model.synth_presets import MIXES, PRESETS

HELP = "write a model file with random weights at full shapes, for benchmarks and tests"
EXAMPLE = """\
examples:
  ds4 synth mini mini.gguf
  ds4 synth flash flash.gguf --sparse
"""

_PLAIN_STEP = 10  # per cent between two lines of plain progress


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    presets = "; ".join(f"{name}: {preset.meaning}" for name, preset in PRESETS.items())
    parser.add_argument("preset", choices=tuple(PRESETS), help=presets)
    parser.add_argument("out", metavar="OUT", help="the file to write")
    parser.add_argument("--layers", type=int, metavar="N", help="only the first N layers")
    parser.add_argument("--mix", choices=tuple(MIXES), help="dtypes of the routed experts (default: see the presets)")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights (default 0)")
    parser.add_argument("--sparse", action="store_true", help="header and a hole: zero weights that take no disk space")
    parser.add_argument("--alias", action="store_true", help="layers of a kind share bytes: small, not for timing")
    parser.add_argument("--procs", type=int, metavar="N", help="writers at work at once (default: one per CPU)")
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")


def run(args: argparse.Namespace) -> int:
    if args.procs is not None and args.procs < 1:
        raise LimitsError("--procs must be at least 1", field="procs", value=args.procs)
    plan = synth.plan(args.preset, n_layers=args.layers, mix=args.mix, seed=args.seed, alias=args.alias)
    started = time.monotonic()
    with _progress() as progress:
        synth.write(plan, args.out, sparse=args.sparse, writers=args.procs, force=args.force, progress=progress)
    seconds = time.monotonic() - started
    print(f"{args.out}: {plan.n_bytes} bytes, {len(plan.tensors)} tensors, mix {plan.mix}, {seconds:.1f} s")
    return 0


def _progress() -> AbstractContextManager[synth.Progress]:
    console = Console(stderr=True)
    return _bar(console) if console.is_terminal else _lines()


@contextmanager
def _bar(console: Console) -> Iterator[synth.Progress]:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("preparing", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)


@contextmanager
def _lines() -> Iterator[synth.Progress]:
    shown = 0

    def show(what: str, done: int, total: int) -> None:
        nonlocal shown
        percent = 100 * done // total
        if percent // _PLAIN_STEP > shown:
            shown = percent // _PLAIN_STEP
            print(f"{what}: {percent} %", file=sys.stderr, flush=True)

    yield show
