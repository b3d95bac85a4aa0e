"""Synthetic models: full shapes, random weights, for benchmarks and tests. The numbers mean nothing.

`plan` lays a file out, `write` writes it: under a temporary name first, so that a half-written file never carries
the final one. Writers are threads, because writing from a pool is all system calls and holds no GIL.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from ds4.errors import LimitsError, OutputError
from ds4.model import quants
from ds4.model.roles import tensor_roles
from ds4.model.shape import ModelShape
from ds4.model.synth_header import ALIGNMENT, DirectoryEntry, header_bytes
from ds4.model.synth_pools import CHUNK, Pool, make_pool
from ds4.model.synth_presets import MIXES, PRESETS, Fill, preset_shape, role_dtype, role_fill

Progress = Callable[[str, int, int], None]
"""progress(what, bytes done, bytes in all)"""

_PIECE = 64 << 20
"""Bytes of one job: small enough to share evenly, large enough to be few."""


@dataclass(frozen=True)
class Placed:
    """A tensor with its place; `shared` when an earlier tensor's bytes stand for it."""

    entry: DirectoryEntry
    n_bytes: int
    fill: Fill
    shared: bool


@dataclass(frozen=True)
class SynthPlan:
    preset: str
    mix: str
    seed: int
    shape: ModelShape
    header: bytes
    tensors: tuple[Placed, ...]
    n_bytes: int  # of the whole file


def plan(
    preset: str, *, n_layers: int | None = None, mix: str | None = None, seed: int = 0, alias: bool = False
) -> SynthPlan:
    """Lay out a synthetic model of a preset, cut to `n_layers`; mix q2, q4 or q8 (of the routed experts).

    `alias` lets all layers of a kind share their bytes: a small file for correctness runs, useless for timing.
    Raises LimitsError for a preset, mix or number of layers that does not exist.
    """
    shape = preset_shape(preset, n_layers)
    mix = PRESETS[preset].mix if mix is None else mix
    if mix not in MIXES:
        raise LimitsError(f"there is no mix {mix!r}; use one of {', '.join(MIXES)}", field="mix", value=mix)
    placed, data_bytes = _lay_out(shape, mix, alias)
    title = f"synthetic {preset} ({shape.n_layers} layers, {mix}, random weights)"
    header = header_bytes(shape, title, [p.entry for p in placed])
    return SynthPlan(preset, mix, seed, shape, header, tuple(placed), len(header) + data_bytes)


def _lay_out(shape: ModelShape, mix: str, alias: bool) -> tuple[list[Placed], int]:
    placed: list[Placed] = []
    offset = 0
    seen: dict[object, int] = {}
    for role in tensor_roles(shape):
        if role.optional and role.layer is not None and shape.is_hash_layer(role.layer):
            continue  # the router's bias: hash layers do not use it and published files leave it out there
        dtype = role_dtype(role, mix)
        n_bytes = quants.tensor_bytes(dtype, role.shape)
        key = (role.suffix, dtype, role.shape) if alias else role.name
        shared = key in seen
        if not shared:
            seen[key] = offset
            offset += -(-n_bytes // ALIGNMENT) * ALIGNMENT
        entry = DirectoryEntry(role.name, dtype, role.shape, seen[key])
        placed.append(Placed(entry, n_bytes, role_fill(role, shape), shared))
    return placed, offset


# ---------------------------------------------------------------- writing


def write(
    plan: SynthPlan,
    out: str | os.PathLike[str],
    *,
    sparse: bool = False,
    writers: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> None:
    """Write the file; `sparse` writes only the header and a hole: enough for a loader, zero weights, no disk space.

    The same plan gives the same bytes, whatever `writers` is. Raises OutputError, and then leaves nothing behind.
    """
    path = Path(out)
    _check_room(path, len(plan.header) if sparse else plan.n_bytes, force)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(part, "xb") as file:
            file.write(plan.header)
            file.truncate(plan.n_bytes)
            file.flush()
            if not sparse:
                _write_data(plan, file.fileno(), writers or os.cpu_count() or 1, progress)
        os.replace(part, path)
    except OSError as exc:
        raise OutputError(f"cannot write the file: {exc.strerror or exc}", file=str(path)) from exc
    finally:
        with contextlib.suppress(FileNotFoundError):  # gone after os.replace, the usual case
            part.unlink()


def _check_room(path: Path, needed: int, force: bool) -> None:
    if not path.parent.is_dir():
        raise OutputError(f"the folder {path.parent} does not exist", file=str(path))
    if path.is_dir() or (path.exists() and not force):
        raise OutputError("the file exists already; delete it or choose another name", file=str(path))
    free = shutil.disk_usage(path.parent).free
    if needed > free:
        raise OutputError(
            f"the file needs {needed / 1e9:.1f} GB, and its disk has {free / 1e9:.1f} GB free",
            file=str(path),
            needed=needed,
            free=free,
        )


def _write_data(plan: SynthPlan, fd: int, writers: int, progress: Progress | None) -> None:
    """Pool by pool, so that only one is in memory; its tensors in pieces, several at once."""
    groups: defaultdict[tuple[str, Fill], list[Placed]] = defaultdict(list)
    for tensor in plan.tensors:
        if not tensor.shared:
            groups[tensor.entry.dtype, tensor.fill].append(tensor)
    total = sum(tensor.n_bytes for tensors in groups.values() for tensor in tensors)
    done = 0
    executor = ThreadPoolExecutor(writers)
    try:
        for (dtype, fill), tensors in groups.items():
            pool = make_pool(dtype, fill, plan.seed, max(tensor.n_bytes for tensor in tensors))
            jobs: list[Future[int]] = [
                executor.submit(_write_piece, fd, pool, *piece)
                for piece in _pieces(tensors, pool, len(plan.header), plan.seed)
            ]
            for job in as_completed(jobs):
                done += job.result()
                if progress is not None:
                    progress("writing", done, total)
    finally:
        executor.shutdown(cancel_futures=True)


def _pieces(tensors: Sequence[Placed], pool: Pool, data_start: int, seed: int) -> Iterator[tuple[int, int, int]]:
    """(file offset, bytes, place in the pool) of every job."""
    for tensor in tensors:
        start = pool.start(tensor.entry.name, seed)
        for at in range(0, tensor.n_bytes, _PIECE):
            n_bytes = min(_PIECE, tensor.n_bytes - at)
            yield data_start + tensor.entry.offset + at, n_bytes, (start + at) % pool.period


def _write_piece(fd: int, pool: Pool, offset: int, n_bytes: int, place: int) -> int:
    view = pool.data.data
    left = n_bytes
    while left:
        written = os.pwrite(fd, view[place : place + min(left, CHUNK)], offset)
        offset, left, place = offset + written, left - written, (place + written) % pool.period
    return n_bytes
