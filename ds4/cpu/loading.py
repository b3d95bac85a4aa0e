"""Hands a model's weights to the kernels: pointers into the file for matrices, decoded copies of small vectors.

Checks every shape, size and table against the model shape first, so that whatever object provides the tensors, no
kernel reads outside them.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import gguf
import numpy as np

from ds4.backend.contract import Bytes, Float32s, Progress
from ds4.cpu import roles
from ds4.cpu._kernels import DTYPES, Machine, decode_row
from ds4.errors import TensorError

if TYPE_CHECKING:
    from ds4.model.weights import Model, Tensor


def iq2_xxs_grid() -> Float32s:
    """float32 [256, 8]: the magnitudes of the IQ2_XXS format, from gguf-py."""
    gguf.quants.IQ2_XXS.init_grid()  # type: ignore[no-untyped-call]
    return np.ascontiguousarray(np.asarray(gguf.quants.IQ2_XXS.grid, dtype=np.float32).reshape(256, 8))


def row_bytes(dtype: str, n_in: int) -> int | None:
    """Bytes of a row of n_in values; None when they are not whole blocks."""
    block, n_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[dtype]]
    return None if n_in % block else n_in // block * n_bytes


class Binder:
    """Takes tensors by name from a model and checks them."""

    def __init__(self, machine: Machine, model: Model) -> None:
        self.machine = machine
        self.model = model
        self.grid = iq2_xxs_grid()
        machine.set_tables(self.grid)

    def _error(self, name: str, expected: object, found: object) -> TensorError:
        return TensorError(
            f"tensor {name} is not what the cpu backend needs: expected {expected}, found {found}",
            file=str(self.model.path),
            tensor=name,
            expected=expected,
            found=found,
        )

    def take(self, name: str, dims: roles.Shape, dtypes: frozenset[str] = frozenset(DTYPES)) -> Tensor:
        tensor = self.model.weights.get(name)
        if tensor is None:
            raise self._error(name, dims, None)
        if tensor.dtype not in dtypes:
            raise self._error(name, sorted(dtypes), tensor.dtype)
        if tuple(tensor.shape) != dims:
            raise self._error(name, dims, tuple(tensor.shape))
        per_row = row_bytes(tensor.dtype, dims[-1])
        if per_row is None or tensor.data.nbytes != prod(dims[:-1]) * per_row:
            raise self._error(name, f"whole blocks of {tensor.dtype}", f"{tensor.data.nbytes} bytes")
        return tensor

    def mat(self, name: str, dims: roles.Shape) -> tuple[object, str, int, int, int]:
        """(data, dtype, n_in, n_out, row_bytes); n_out of one expert where they are stacked."""
        tensor = self.take(name, dims)
        return tensor.data, tensor.dtype, dims[-1], dims[-2], row_bytes(tensor.dtype, dims[-1]) or 0

    def vec(self, name: str, dims: roles.Shape) -> Float32s:
        tensor = self.take(name, dims)
        out = np.empty((prod(dims[:-1]), dims[-1]), dtype=np.float32)
        for row, data in zip(out, tensor.data.reshape(len(out), -1), strict=True):
            decode_row(tensor.dtype, data, row, self.grid)
        return out.reshape(-1)

    def hash_table(self, name: str) -> Bytes:
        shape = self.model.shape
        tensor = self.take(name, (shape.vocab, shape.n_experts_used), frozenset({"I32"}))
        ids = np.frombuffer(tensor.data, dtype="<i4")
        if ids.min() < 0 or ids.max() >= shape.n_experts:
            raise self._error(name, f"expert ids below {shape.n_experts}", f"{ids.min()} to {ids.max()}")
        data: Bytes = tensor.data
        return data


def bind_weights(machine: Machine, model: Model, progress: Progress | None = None) -> None:
    """Raises TensorError for a tensor that is missing or not as the model shape says."""
    binder, shape = Binder(machine, model), model.shape
    for name, dims in roles.global_mats(shape).items():
        machine.set_mat(name, *binder.mat(name, dims))
    for name, dims in roles.global_vecs(shape).items():
        machine.set_vec(name, binder.vec(name, dims))
    for layer in range(shape.n_layers):
        _bind_layer(binder, layer)
        if progress is not None:
            progress("layers", layer + 1, shape.n_layers)


def _bind_layer(binder: Binder, layer: int) -> None:
    machine, shape, prefix = binder.machine, binder.model.shape, f"blk.{layer}."
    for suffix, dims in roles.layer_mats(shape, layer).items():
        machine.set_layer_mat(layer, suffix, *binder.mat(prefix + suffix, dims))
    for suffix, dims in roles.layer_vecs(shape, layer).items():
        machine.set_layer_vec(layer, suffix, binder.vec(prefix + suffix, dims))
    if shape.is_hash_layer(layer):
        machine.set_layer_table(layer, binder.hash_table(prefix + roles.HASH_TABLE))
    elif prefix + roles.ROUTER_BIAS in binder.model.weights:
        machine.set_layer_vec(layer, roles.ROUTER_BIAS, binder.vec(prefix + roles.ROUTER_BIAS, (shape.n_experts,)))
