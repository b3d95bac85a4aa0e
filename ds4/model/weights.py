"""Model: an opened and completely checked model file (or set of files), and Tensor, a view of its bytes.

Everything that can be wrong with a file is found by `Model.open`, so that nothing downstream has to ask again.
Weights stay in their file format and in the file's mapping; nothing is copied. Knows no device and no arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ds4.errors import ModelFormatError, TensorError
from ds4.model import gguf, quants, shards
from ds4.model.fingerprint import fingerprint
from ds4.model.mapped import MappedFile
from ds4.model.metadata import read_shape
from ds4.model.roles import Role, tensor_roles
from ds4.model.shape import ModelShape


@dataclass(frozen=True, eq=False)
class Tensor:
    """One weight tensor: where its bytes are and how to read them."""

    name: str
    dtype: str  # a key of ds4.model.quants.FORMATS
    shape: tuple[int, ...]  # numpy order: rows are the last axis
    data: npt.NDArray[np.uint8]  # [n_bytes], read-only view of the file map

    @property
    def n_bytes(self) -> int:
        return self.data.size

    @property
    def row_bytes(self) -> int:
        """Bytes of one row (the last axis), which is contiguous."""
        return quants.row_bytes(self.dtype, self.shape[-1])

    def part(self, start: int, stop: int) -> Tensor:
        """Entries start .. stop - 1 of the first axis as a tensor of its own: rows of a matrix, experts of a stack."""
        if not 0 <= start < stop <= self.shape[0] or len(self.shape) < 2:
            raise IndexError(f"{self.name} has no part {start}:{stop}; its shape is {self.shape}")
        step = self.n_bytes // self.shape[0]
        return Tensor(self.name, self.dtype, (stop - start, *self.shape[1:]), self.data[start * step : stop * step])


class Model:
    """An opened model. Use as a context manager, or call `close`.

    The file must not be changed while the model is open: see `verify_unchanged`.
    """

    path: Path
    shape: ModelShape
    metadata: Mapping[str, Any]
    """GGUF metadata: int, float, bool, str; arrays of strings as list, of numbers as read-only numpy array."""
    ignored: tuple[str, ...]
    """Tensors in the file that the model does not need, such as a draft block's."""

    def __init__(self, path: Path, sources: Sequence[tuple[gguf.Gguf, memoryview]], maps: Sequence[MappedFile]) -> None:
        """For `open` and `from_buffer`: `sources` are parsed files and their bytes, in order of their parts."""
        metadata, placed = shards.merge([source for source, _ in sources])
        self.path = path
        self.shape = read_shape(metadata, str(path))
        self.metadata = MappingProxyType(metadata)
        views = {id(source): np.frombuffer(view, dtype=np.uint8) for source, view in sources}
        for array in views.values():
            array.flags.writeable = False
        found = {
            info.name: Tensor(info.name, info.dtype, info.shape, views[id(source)][info.offset : info.end])
            for source, info in placed
        }
        self._weights: Mapping[str, Tensor] | None = MappingProxyType(_check_weights(self.shape, found, str(path)))
        self.ignored = tuple(name for name in found if name not in self._weights)
        self._maps = tuple(maps)
        self._fingerprint: str | None = None

    @classmethod
    def open(cls, path: str | PathLike[str]) -> Self:
        """Map and check a model file; any part of a split model stands for the whole.

        Raises ModelFormatError, UnsupportedModelError or TensorError, which name the file and the place.
        """
        maps: list[MappedFile] = []
        try:
            return cls._open(Path(path), maps)
        except BaseException:
            for mapped in maps:
                mapped.close()
            raise

    @classmethod
    def _open(cls, path: Path, maps: list[MappedFile]) -> Self:
        def parse(part: Path) -> tuple[gguf.Gguf, MappedFile]:
            maps.append(MappedFile(part))
            return gguf.parse(maps[-1].view, str(part)), maps[-1]

        opened = parse(path)
        parts = [opened if part == path else parse(part) for part in shards.sibling_paths(path, opened[0])]
        return cls(path, [(source, mapped.view) for source, mapped in parts], [mapped for _, mapped in parts])

    @classmethod
    def from_buffer(cls, buffer: bytes | bytearray | memoryview, name: str = "<memory>") -> Self:
        """A model from the bytes of one GGUF file in memory, which must outlive it and stay unchanged."""
        view = memoryview(buffer)
        return cls(Path(name), [(gguf.parse(view, name), view)], ())

    # ------------------------------------------------------------ what it holds

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """Every tensor the model needs, by GGUF name, checked against the model's shape."""
        if self._weights is None:
            raise ModelFormatError("the model was closed; open it again", file=str(self.path), where="path")
        return self._weights

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, each tensor counted fully even where tensors share a range of the file."""
        return sum(tensor.n_bytes for tensor in self.weights.values())

    @property
    def fingerprint(self) -> str:
        """Identity of the weights, 64 hex digits: independent of file names, parts and order, computed once.

        It samples every tensor (see ds4.model.fingerprint), so it tells models apart but proves no integrity.
        """
        if self._fingerprint is None:
            with ExitStack() as stack:
                for mapped in self._maps:
                    stack.enter_context(mapped.sampling())
                self._fingerprint = fingerprint(self.shape, self.weights.values())
        return self._fingerprint

    @property
    def files(self) -> tuple[Path, ...]:
        """The files behind the model, in order of their parts; empty for a model from memory."""
        return tuple(mapped.path for mapped in self._maps)

    # ------------------------------------------------------------ life

    def verify_unchanged(self) -> None:
        """Raise ModelFormatError if a file's size or modification time is not what it was at opening.

        Costs a system call per file. A file that grows or is rewritten in place gives wrong weights, and one that
        is cut kills the process (SIGBUS) at the first touch beyond its new end: call this before long work.
        """
        for mapped in self._maps:
            mapped.verify_unchanged()

    def close(self) -> None:
        """Let go of the files; may be called twice. Tensors handed out before stay readable while they are held."""
        self._weights = None
        for mapped in self._maps:
            mapped.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


# ---------------------------------------------------------------- checks


def _check_weights(shape: ModelShape, found: Mapping[str, Tensor], file: str) -> dict[str, Tensor]:
    """The tensors that the model's roles ask for, each with the right shape, dtype and (for id tables) values."""
    weights: dict[str, Tensor] = {}
    for role in tensor_roles(shape):
        tensor = found.get(role.name)
        if tensor is not None:
            _check_tensor(role, tensor, file)
            weights[role.name] = tensor
        elif not role.optional:
            expected = f"{' or '.join(role.dtypes)} {role.shape}"
            raise TensorError(
                f"tensor '{role.name}' is missing", file=file, tensor=role.name, expected=expected, found=None
            )
    for layer in range(shape.n_layers):
        _check_experts(weights, layer, file)
        if shape.is_hash_layer(layer):
            _check_ids(weights[f"blk.{layer}.ffn_gate_tid2eid.weight"], shape.n_experts, file)
    return weights


def _check_tensor(role: Role, tensor: Tensor, file: str) -> None:
    if tensor.shape != role.shape:
        raise TensorError(
            f"tensor '{role.name}' has the wrong shape (rows last, the reverse of the dims in the file)",
            file=file,
            tensor=role.name,
            expected=role.shape,
            found=tensor.shape,
        )
    if tensor.dtype not in role.dtypes:
        raise TensorError(
            f"tensor '{role.name}' has a dtype that it cannot have",
            file=file,
            tensor=role.name,
            expected=role.dtypes,
            found=tensor.dtype,
        )


def _check_experts(weights: Mapping[str, Tensor], layer: int, file: str) -> None:
    """Gate and up are multiplied together, by one kernel: they share a dtype. Down may differ."""
    gate, up = (weights[f"blk.{layer}.ffn_{half}_exps.weight"] for half in ("gate", "up"))
    if gate.dtype != up.dtype:
        raise TensorError(
            "gate and up experts of a layer must have one dtype",
            file=file,
            tensor=up.name,
            expected=gate.dtype,
            found=up.dtype,
        )


def _check_ids(table: Tensor, n_experts: int, file: str) -> None:
    ids = table.data.view("<i4").reshape(table.shape)
    low, high = int(ids.min()), int(ids.max())
    if low >= 0 and high < n_experts:
        return
    token, slot = (int(i) for i in np.argwhere((ids < 0) | (ids >= n_experts))[0])
    raise TensorError(
        "a table of expert ids names an expert that does not exist",
        file=file,
        tensor=table.name,
        expected=f"0 to {n_experts - 1}",
        found=int(ids[token, slot]),
        token=token,
    )
