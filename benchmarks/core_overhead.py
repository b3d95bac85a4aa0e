"""Time the core spends per row outside the backend: validate, reserve, plan, commit. CSV on stdout.

    python benchmarks/core_overhead.py [--rows 1 4 16 64] [--repeat 5]

The runner does nothing, so a step's time is the core's own plus seven empty Python calls and one small allocation. The
budget is 2 microseconds per row.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from typing import Any

import ds4
from ds4 import DecodeItem
from ds4.testing import NullBackend, NullModel, NullRunner


class IdleRunner(NullRunner):
    def begin(self, plan: Any) -> None: ...
    def encode_batch_shared(self, plan: Any) -> None: ...
    def end(self, plan: Any) -> None: ...
    def read_logits(self, plan: Any, out: Any) -> None: ...
    def publish(self, plan: Any) -> None: ...


class IdleBackend(NullBackend):
    def open(self, model: Any, limits: Any, options: Any) -> IdleRunner:
        return IdleRunner(model, limits, options, None)


def decode(rows: int) -> tuple[int, float]:
    """(steps, seconds): `rows` sessions, one token each."""
    limits = ds4.Limits(sessions=rows, context=8192, max_rows=rows)
    with ds4.Engine.open(NullModel(), IdleBackend(), limits) as engine:
        items = [DecodeItem(engine.create_session(), 5) for _ in range(rows)]
        start = time.perf_counter()
        for _ in range(4000):
            engine.eval_batch(items)
        return 4000, time.perf_counter() - start


def prefill(rows: int) -> tuple[int, float]:
    """(steps, seconds): one session, `rows` tokens a step."""
    limits = ds4.Limits(sessions=1, context=rows * 200, max_rows=rows)
    with ds4.Engine.open(NullModel(), IdleBackend(), limits) as engine:
        session, prompt = engine.create_session(), [5] * rows * 200
        start = time.perf_counter()
        session.feed(prompt)
        return 200, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    out = csv.writer(sys.stdout)
    out.writerow(["kind", "rows", "us_per_step", "us_per_row"])
    for kind, measure in (("decode", decode), ("prefill", prefill)):
        for rows in args.rows:
            best = min(seconds / steps for steps, seconds in (measure(rows) for _ in range(args.repeat)))
            out.writerow([kind, rows, f"{best * 1e6:.2f}", f"{best * 1e6 / rows:.3f}"])


if __name__ == "__main__":
    main()
