"""The GGML element types ds4 reads: ids, block sizes, and a plain decoder. Knows no file layout and no model.

A row (the last axis of a tensor) is a whole number of blocks, stored one after the other without padding.
`dequantize` is the readable truth that tests and tools compare with; backends decode inside their kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ds4.errors import TensorError


@dataclass(frozen=True)
class BlockFormat:
    name: str
    ggml_id: int  # number of the type in a GGUF tensor directory
    block: int  # elements per block
    block_bytes: int


_FORMATS = (
    BlockFormat("F32", 0, 1, 4),
    BlockFormat("F16", 1, 1, 2),
    BlockFormat("Q4_0", 2, 32, 18),
    BlockFormat("Q8_0", 8, 32, 34),
    BlockFormat("Q2_K", 10, 256, 84),
    BlockFormat("Q4_K", 12, 256, 144),
    BlockFormat("Q5_K", 13, 256, 176),
    BlockFormat("Q6_K", 14, 256, 210),
    BlockFormat("IQ2_XXS", 16, 256, 66),
    BlockFormat("I32", 26, 1, 4),
    BlockFormat("BF16", 30, 1, 2),
    BlockFormat("MXFP4", 39, 32, 17),
)

FORMATS: Mapping[str, BlockFormat] = MappingProxyType({f.name: f for f in _FORMATS})
FORMAT_BY_ID: Mapping[int, BlockFormat] = MappingProxyType({f.ggml_id: f for f in _FORMATS})

MATRIX_DTYPES = tuple(name for name in FORMATS if name != "I32")
"""Every dtype a weight matrix may have."""

FLOAT_DTYPES = ("F32", "F16", "BF16")

OTHER_NAMES: Mapping[int, str] = MappingProxyType(
    {3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 11: "Q3_K", 15: "Q8_K", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S"}
    | {20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 27: "I64", 28: "F64", 29: "IQ1_M"}
    | {34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4"}
)
"""Types that exist but that ds4 does not read; only for messages."""


def type_name(ggml_id: int) -> str:
    """How to show a type number in a message: `39 (MXFP4)`, `250 (unknown)`."""
    known = FORMAT_BY_ID.get(ggml_id)
    return f"{ggml_id} ({known.name if known else OTHER_NAMES.get(ggml_id, 'unknown')})"


def row_bytes(dtype: str, n_elements: int) -> int:
    """Bytes of a row of `n_elements`, which must be a whole number of blocks."""
    fmt = FORMATS[dtype]
    if n_elements % fmt.block:
        raise ValueError(f"a {dtype} row has a multiple of {fmt.block} elements, not {n_elements}")
    return n_elements // fmt.block * fmt.block_bytes


def tensor_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor of this numpy shape (row = last axis)."""
    return prod(shape[:-1]) * row_bytes(dtype, shape[-1])


class BlockData(Protocol):
    """What `dequantize` needs of a tensor; `ds4.model.weights.Tensor` is one."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def data(self) -> npt.NDArray[np.uint8]: ...


def dequantize(tensor: BlockData) -> npt.NDArray[np.float32]:
    """The weights as a new float32 array of `tensor.shape`. Raises TensorError for I32, which holds ids.

    The result is 4 bytes per element: take `Tensor.part` of a large tensor first.
    """
    fmt = FORMATS[tensor.dtype]
    if tensor.dtype == "I32":
        raise TensorError(
            "a table of ids has no weights to decode", tensor=tensor.name, expected=MATRIX_DTYPES, found="I32"
        )
    # gguf imports slowly (its constants alone are thousands of lines), and opening a model does not need it.
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize as decode

    rows = tensor.data.reshape(-1, row_bytes(tensor.dtype, tensor.shape[-1]))
    values = decode(rows, GGMLQuantizationType(fmt.ggml_id))
    return np.array(values, dtype=np.float32).reshape(tensor.shape)


def read_ids(tensor: BlockData) -> npt.NDArray[np.int32]:
    """A table of ids as a read-only int32 array of `tensor.shape`. Raises TensorError for anything but I32."""
    if tensor.dtype != "I32":
        raise TensorError(
            "only a table of ids has ids to read; weights are for dequantize",
            tensor=tensor.name,
            expected="I32",
            found=tensor.dtype,
        )
    ids = tensor.data.view("<i4").reshape(tensor.shape)
    return np.asarray(ids, dtype=np.int32)
