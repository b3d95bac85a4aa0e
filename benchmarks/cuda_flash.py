"""Decode and prefill speed of the cuda backend on a synthetic full-size Flash file, as CSV.

    python benchmarks/cuda_flash.py --out flash.csv                    # 81 GiB in /dev/shm, about a minute to write
    python benchmarks/cuda_flash.py --layers 6 --rows 1 8 --kernels    # a cut model, with times per kernel

A decode line is the median step of N sessions at one context: `Engine.eval_batch` with the token already known, so
sampling is not in it. `floor` is the bytes of the weights a step must touch over the copy bandwidth given with --gbps.
A mixed line is a step of 8 decoding sessions at context 512 and `context` tokens of another session's prompt. A memory
line has the GiB that are planned (ms_median) and taken from the device (ms_min, ms_max).
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import ds4
from ds4.model import synth
from ds4.model.weights import Model

COPIES = 20  # launches that are timed together
COLUMNS = ("kind", "rows", "context", "ms_median", "ms_min", "ms_max", "tokens_per_s", "floor_share", "launches")


def floor_bytes(model: Model, n_rows: int) -> float:
    """Bytes that a step of n_rows independent rows must read: dense matrices once, expected distinct experts."""
    shape = model.shape
    share = 1 - (1 - shape.n_experts_used / shape.n_experts) ** n_rows
    total = 0.0
    for name, tensor in model.weights.items():
        if name == "token_embd.weight" or name.endswith("tid2eid.weight"):
            continue
        total += tensor.n_bytes * (share if name.endswith("_exps.weight") else 1.0)
    return total


def fill(engine: ds4.Engine, n: int, length: int, rng: np.random.Generator) -> list[ds4.Session]:
    sessions = [engine.create_session() for _ in range(n)]
    for session in sessions:
        session.feed(rng.integers(3, engine.shape.vocab, length).tolist())
    return sessions


def decode(engine: ds4.Engine, sessions: list[ds4.Session], steps: int, rng: np.random.Generator) -> list[float]:
    """Seconds of each step."""
    times = []
    for _ in range(steps):
        tokens = rng.integers(3, engine.shape.vocab, len(sessions)).tolist()
        items = [ds4.DecodeItem(session, token) for session, token in zip(sessions, tokens, strict=True)]
        start = time.perf_counter()
        engine.eval_batch(items)
        times.append(time.perf_counter() - start)
    return times


def mixed(
    engine: ds4.Engine, sessions: list[ds4.Session], n_prompt: int, steps: int, rng: np.random.Generator
) -> list[float]:
    """Seconds of each step in which all sessions decode and one more reads n_prompt tokens."""
    times = []
    for _ in range(steps):
        with engine.create_session() as reader:
            tokens = rng.integers(3, engine.shape.vocab, len(sessions)).tolist()
            work = [(session, [token]) for session, token in zip(sessions, tokens, strict=True)]
            work.append((reader, rng.integers(3, engine.shape.vocab, n_prompt).tolist()))
            start = time.perf_counter()
            engine.step(work)
            times.append(time.perf_counter() - start)
    return times


def device_bytes_used(engine: ds4.Engine) -> tuple[int, int]:
    """(bytes of the device that are taken, all of them), by whomever."""
    runner: Any = engine.runner
    free, total = runner.device.run("asking for memory", runner.device.driver.mem_get_info)
    return total - free, total


def kernel_times(engine: ds4.Engine, n_rows: int, context: int) -> list[tuple[str, int, float]]:
    """(kernel, launches, microseconds in all) of one step of the last plan's arrays.

    A kernel's launches of all layers are timed as one graph, at least COPIES of them: other layers' weights are not in
    the cache, and what the event costs drops out. Streams and sums are worthless afterwards, sessions are as before.
    """
    runner: Any = engine.runner
    from ds4_cuda.launches import bucket_of

    limits = engine.limits
    same: dict[str, list[Any]] = {}
    for one in runner._sequence.shared(bucket_of(n_rows, n_rows, context, limits.max_rows or 1, limits.context)):
        same.setdefault(f"{one.name} {one.grid}", []).append(one)

    def measure() -> list[tuple[str, int, float]]:
        launcher = runner._launcher
        found = []
        for name, launches in same.items():
            many = launches * -(-COPIES // len(launches))
            if launcher.api is None:
                micros = best_of(runner, partial(launcher.launch, many))
            else:
                graph = launcher.capture(many)
                micros = best_of(runner, partial(launcher.run, graph))
                launcher.destroy(graph)
            found.append((name, len(launches), micros * len(launches) / len(many)))
        return sorted(found, key=lambda row: -row[2])

    times: list[tuple[str, int, float]] = runner.device.run("timing kernels", measure)
    return times


def best_of(runner: Any, work: Callable[[], None], n: int = 3) -> float:
    """Microseconds on the device."""
    begin, end = runner.device.driver.Event(), runner.device.driver.Event()
    best = float("inf")
    for _ in range(n):
        begin.record(runner._stream)
        work()
        end.record(runner._stream)
        end.synchronize()
        best = min(best, end.time_since(begin) * 1000)
    return best


def write_model(args: argparse.Namespace) -> Path:
    path = Path(args.file)
    if not path.exists():
        plan = synth.plan("flash", n_layers=args.layers, mix="q2", seed=0)
        start = time.perf_counter()
        synth.write(plan, path, writers=args.threads)
        print(f"wrote {path}, {plan.n_bytes / 2**30:.1f} GiB in {time.perf_counter() - start:.0f} s", flush=True)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", default="/dev/shm/flash.gguf")
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--contexts", type=int, nargs="*", default=[512])
    parser.add_argument("--prefill", type=int, nargs="*", default=[512, 2048])
    parser.add_argument("--mixed", type=int, nargs="*", default=[128, 512], help="prompt tokens beside 8 decode rows")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--gbps", type=float, default=3979.0)
    parser.add_argument("--inexact", action="store_true", help="Engine.open(exact=False)")
    parser.add_argument("--kernels", action="store_true", help="times per kernel after each decode line")
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    path = write_model(args)
    rng = np.random.default_rng(0)
    top = max([*args.contexts, *args.prefill, 512]) + args.steps + 64
    limits = ds4.Limits(
        sessions=max([*args.rows, 9 if args.mixed else 1]), context=top, max_rows=max(2048, max(args.rows))
    )
    start = time.perf_counter()
    with ds4.Engine.open(path, "cuda", limits, exact=not args.inexact) as engine:
        print(f"opened in {time.perf_counter() - start:.1f} s: {engine.memory_plan}", flush=True)
        out = open(args.out, "w", newline="") if args.out else sys.stdout  # noqa: SIM115  (closed below)
        table = csv.writer(out)
        table.writerow(COLUMNS)
        used, _ = device_bytes_used(engine)
        gib = [f"{n_bytes / 2**30:.2f}" for n_bytes in (engine.memory_plan.total, used, used)]
        table.writerow(["memory", "", "", *gib, "", "", ""])
        for context in args.contexts:
            for n in args.rows:
                sessions = fill(engine, n, context, rng)
                times = decode(engine, sessions, args.steps, rng)[4:]
                step = median(times)
                share = floor_bytes(engine.model, n) / (args.gbps * 1e9) / step
                row = ["decode", n, context, *(f"{1e3 * t:.3f}" for t in (step, min(times), max(times)))]
                table.writerow([*row, f"{n / step:.1f}", f"{share:.3f}", getattr(engine.runner, "n_launches", 0)])
                out.flush()
                if args.out:
                    print(row, f"{n / step:.1f} tok/s, {share:.3f} of the floor", flush=True)
                if args.kernels:
                    for name, count, micros in kernel_times(engine, n, context + args.steps):
                        print(f"    {micros:9.1f} us  {count:4d} x {name}", flush=True)
                for session in sessions:
                    session.close()
        sessions = fill(engine, 8, 512, rng) if args.mixed else []
        for n_prompt in args.mixed:
            times = mixed(engine, sessions, n_prompt, 8, rng)[2:]
            step, n = median(times), 8 + n_prompt
            row = ["mixed", 8, n_prompt, *(f"{1e3 * t:.3f}" for t in (step, min(times), max(times)))]
            table.writerow([*row, f"{n / step:.1f}", "", getattr(engine.runner, "n_launches", 0)])
            if args.out:
                print(row, flush=True)
        for session in sessions:
            session.close()
        for length in args.prefill:
            times = []
            for _ in range(3):
                with engine.create_session() as session:
                    tokens = rng.integers(3, engine.shape.vocab, length).tolist()
                    start = time.perf_counter()
                    session.feed(tokens)
                    times.append(time.perf_counter() - start)
            if args.kernels:
                for name, count, micros in kernel_times(engine, length, length):
                    print(f"    {micros:9.1f} us  {count:4d} x {name}", flush=True)
            step = min(times[1:])
            table.writerow(["prefill", length, 0, f"{1e3 * step:.3f}", "", "", f"{length / step:.1f}", "", ""])
            if args.out:
                print("prefill", length, f"{length / step:.1f} tok/s", flush=True)
        if args.out:
            out.close()


if __name__ == "__main__":
    main()
