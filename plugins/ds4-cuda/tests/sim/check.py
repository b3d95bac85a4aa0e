"""Runs a golden model through the real kernels on the CPU and compares: see --help.

python plugins/ds4-cuda/tests/sim/check.py --case quant-iq2 --tokens 200 [--inexact] [--chunk 37] [--fallback]

--tree: the root of another source tree whose kernels and ds4_cuda are run. Without it: those of this tree.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="quant-iq2", help="a file of tests/golden; default quant-iq2")
    parser.add_argument("--tokens", type=int, default=100, help="of the case, from its beginning; default 100")
    parser.add_argument("--chunk", type=int, default=1, help="tokens per step; default 1")
    parser.add_argument("--inexact", action="store_true", help="open with exact=False")
    parser.add_argument("--fallback", action="store_true", help="by the reference path, token by token")
    parser.add_argument("--half", action="store_true", help="float16 cache")
    parser.add_argument("--same", action="store_true", help="also token by token, and compare all bits")
    parser.add_argument("--checks", action="store_true", help="trap misaligned access, wide shifts, array bounds")
    parser.add_argument("--order", type=int, default=0, help="turns of threads: 0 ascending, 1 descending, else a seed")
    parser.add_argument("--tree", type=Path, help="root of the source tree to test; default: this one")
    return parser.parse_args()


def run(options: argparse.Namespace, golden: Any, chunk: int, *, fallback: bool) -> tuple[Any, Any]:
    """Logits of the tokens, and the driver."""
    import numpy as np
    from sim_open import open_engine

    tokens = golden["tokens"][: options.tokens].tolist()
    engine, cuda = open_engine(
        options.path,
        exact=not options.inexact,
        cache_dtype="float16" if options.half else "float32",
        checks=options.checks,
        order=options.order,
        sessions=1,
        context=max(1024, options.tokens),
        max_rows=max(chunk, 16),
    )
    with engine:
        engine.core.force_fallback = fallback
        session, rows = engine.create_session(), []
        for first in range(0, len(tokens), chunk):
            rows.append(session.feed(tokens[first : first + chunk], logits="all").copy())
    return np.concatenate(rows), cuda


def compare(rows: Any, golden: Any, n: int) -> None:
    import numpy as np

    kept = golden["positions"] < n
    want, found = golden["logits"][kept], rows[golden["positions"][kept]]
    error = np.abs(found.astype(np.float64) - want)
    rms, std = float(np.sqrt((error**2).mean())), float(want.std())
    agree = float((found.argmax(1) == want.argmax(1)).mean())
    worst = int(error.max(1).argmax())
    print(
        f"max {error.max():.3g} (position {golden['positions'][kept][worst]}), rms {rms:.3g}, "
        f"{100 * rms / std:.4f} % of the deviation, argmax {100 * agree:.1f} %, of {len(want)} positions"
    )


def main() -> int:
    options = arguments()
    own = HERE.parents[3]
    tree = (options.tree or own).resolve()
    core = tree if list(tree.glob("ds4/_core.*.so")) else own  # a tree whose core is not built runs with this one's
    sys.path[:0] = [str(HERE), str(tree / "plugins" / "ds4-cuda"), str(core)]
    import numpy as np

    options.path = own / "tests" / "golden" / f"{options.case}.gguf"
    with np.load(options.path.with_suffix(".npz")) as data:
        golden = {name: data[name] for name in ("tokens", "positions", "logits")}
    options.tokens = min(options.tokens, len(golden["tokens"]))
    begin = time.perf_counter()
    rows, cuda = run(options, golden, options.chunk, fallback=options.fallback)
    print(f"{time.perf_counter() - begin:.1f} s, of which in kernels {sum(cuda.seconds.values()):.1f}")
    for name, seconds in sorted(cuda.seconds.items(), key=lambda item: -item[1])[:12]:
        print(f"  {seconds:7.2f} s {cuda.counts[name]:6d} x {name}")
    compare(rows, golden, options.tokens)
    if options.same:
        other, _ = run(options, golden, 1, fallback=False)
        rows_differ = np.flatnonzero((rows.view(np.uint32) != other.view(np.uint32)).any(1))
        print("the same bits as token by token" if not len(rows_differ) else f"other bits in rows {rows_differ[:10]}")
        return int(len(rows_differ) > 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
