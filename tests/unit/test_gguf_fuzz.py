"""Thousands of damaged files: each is either loaded or refused with a ModelFormatError, soon and without much memory.

Everything goes through the whole loader (parser, shape, weights). Mutants are seeded and made in place, in memory.
"""

from __future__ import annotations

import random
import struct
import time
import tracemalloc
from itertools import pairwise
from pathlib import Path

import pytest

from ds4.errors import ModelFormatError
from ds4.model.weights import Model
from tests.support import gguf_bytes as gb

GOLDEN = Path(__file__).parents[1] / "golden"
FILES = sorted(path.name for path in GOLDEN.glob("*.gguf"))
MUTANTS = 1500  # per golden file

EDGES = [0, 1, 2, 3, 4, 8, 31, 32, 0x7F, 0x80, 0xFF, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**48, 2**62]
EDGES += [2**63 - 1, 2**63, 2**64 - 1, 2**64 - 32]


def load(data: bytes | bytearray | memoryview) -> bool:
    """Whether the file loads. Any exception but ModelFormatError, and any slow answer, fails the test."""
    started = time.perf_counter()
    try:
        Model.from_buffer(data, "mutant.gguf").close()
        loaded = True
    except ModelFormatError as error:
        assert error.data["file"] == "mutant.gguf" and str(error)
        loaded = False
    assert time.perf_counter() - started < 1.0
    return loaded


def mutate(data: bytearray, header: int, rng: random.Random) -> list[tuple[int, bytes]]:
    """Damage the header in place; returns what was there before, to be undone in reverse order."""
    undo = []
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(header)
        how = rng.randrange(4)
        if how == 0:
            new = bytes([data[at] ^ (1 << rng.randrange(8))])
        elif how == 1:
            new = rng.randbytes(rng.randint(1, 16))
        elif how == 2:
            new = struct.pack("<Q", rng.choice(EDGES))[: rng.choice((4, 8))]
        else:  # a piece of the header over another one
            source = rng.randrange(header)
            new = bytes(data[source : source + rng.randint(1, 64)])
        new = new[: len(data) - at]
        undo.append((at, bytes(data[at : at + len(new)])))
        data[at : at + len(new)] = new
    return undo


@pytest.mark.parametrize("name", FILES)
def test_mutants_of_golden_files(name: str) -> None:
    original = (GOLDEN / name).read_bytes()
    data = bytearray(original)
    header = gb.walk(data).header_end
    rng = random.Random(f"{name} 1")
    loaded = 0
    for _ in range(MUTANTS):
        undo = mutate(data, header, rng)
        loaded += load(data)
        for at, old in reversed(undo):
            data[at : at + len(old)] = old
    assert bytes(data) == original and load(data)
    assert 0 < loaded < MUTANTS / 2, "mutants either never or mostly load: the mutator does not do its work"


def test_mutants_of_single_fields() -> None:
    """Every 4- and 8-byte field of a small model's header takes every edge value in turn."""
    original = gb.small_model((4,), hashed=1).build()
    data = bytearray(original)
    bounds = gb.walk(data).boundaries
    n = 0
    for start, stop in pairwise(bounds):
        if stop - start not in (4, 8):
            continue
        for edge in EDGES:
            data[start:stop] = struct.pack("<Q", edge)[: stop - start]
            load(data)
            n += 1
        data[start:stop] = original[start:stop]
    assert n > 3000 and load(data)


def test_every_cut_of_a_small_model() -> None:
    data = memoryview(gb.small_model((4,), hashed=1).build())
    header = gb.walk(bytes(data)).header_end
    for size in range(header + 64):
        assert not load(data[:size]), size


@pytest.mark.parametrize("name", FILES)
def test_cuts_of_golden_files_at_structural_boundaries(name: str) -> None:
    data = memoryview((GOLDEN / name).read_bytes())
    bounds = gb.walk(bytes(data)).boundaries
    for size in bounds:
        assert not load(data[:size]), size


@pytest.mark.parametrize("name", ["tiny-long.gguf"])
def test_fc34_cuts_through_the_data(name: str) -> None:
    data = memoryview((GOLDEN / name).read_bytes())
    header = gb.walk(bytes(data)).header_end
    for size in [*range(4096, len(data), 4096), len(data) - 1]:
        with pytest.raises(ModelFormatError) as caught:
            Model.from_buffer(data[:size], "cut.gguf")
        if size > header:
            assert caught.value.data["tensor"] and caught.value.data["size"] == size < caught.value.data["needed"]


def test_mutants_need_little_memory() -> None:
    data = bytearray((GOLDEN / "tiny-long.gguf").read_bytes())
    header = gb.walk(data).header_end
    rng = random.Random("memory")
    load(data)
    tracemalloc.start()
    try:
        for _ in range(150):
            undo = mutate(data, header, rng)
            load(data)
            for at, old in reversed(undo):
                data[at : at + len(old)] = old
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20
