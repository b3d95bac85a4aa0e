"""What the CPU kernels refuse before anything is allocated: options and shapes that they cannot run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds4.backend.contract import Options
from ds4.backend.layout import ITEM_BYTES
from ds4.cpu._kernels import MAX_PAIRS, MAX_STREAMS
from ds4.errors import LimitsError, UnsupportedModelError
from ds4.model.shape import CSA, KIND_NAMES

if TYPE_CHECKING:
    from ds4.model.weights import Model


def check_options(options: Options) -> None:
    """Raises LimitsError."""
    if options.cache_dtype not in ITEM_BYTES:
        raise LimitsError(
            f"the cpu backend has no cache of dtype {options.cache_dtype!r}: use {' or '.join(ITEM_BYTES)}",
            field="cache_dtype",
            value=options.cache_dtype,
        )
    if options.threads is not None and options.threads < 1:
        raise LimitsError("threads must be at least 1, or None", field="threads", value=options.threads)


def check_shape(model: Model, options: Options) -> None:
    """Raises UnsupportedModelError with the reason."""
    shape = model.shape
    csa = CSA in shape.ratios
    problems = {
        "compress_ratios": f"must be among {sorted(KIND_NAMES)}" if set(shape.ratios) - set(KIND_NAMES) else "",
        "hyper_connection.count": "" if 1 <= shape.n_streams <= MAX_STREAMS else f"must be 1 to {MAX_STREAMS}",
        "rope.dimension_count": _rope_problem(shape.rope_dim, shape.head_dim, shape.index_dim if csa else None),
        "output_group_count": "must divide head_count" if shape.n_heads % shape.o_groups else "",
        "expert_used_count": "" if 1 <= shape.n_experts_used <= shape.n_experts else "must be 1 to expert_count",
        "ds4_roundings": _rounding_problem(model, csa) if options.ds4_roundings else "",
    }
    for where, problem in problems.items():
        if problem:
            raise UnsupportedModelError(
                f"the cpu backend cannot run this model: {problem}", file=str(model.path), where=where
            )


def _rope_problem(rope_dim: int, head_dim: int, index_dim: int | None) -> str:
    if rope_dim < 2 or rope_dim % 2 or rope_dim // 2 > MAX_PAIRS:
        return f"must be even and at most {2 * MAX_PAIRS}"
    if rope_dim > head_dim or (index_dim is not None and rope_dim > index_dim):
        return "must not exceed the head or the index dimension"
    return ""


def _rounding_problem(model: Model, csa: bool) -> str:
    """FP8 works on groups of 64 plain channels, the indexer's transform and FP4 on powers of two from 32 up."""
    shape = model.shape
    if (shape.head_dim - shape.rope_dim) % 64:
        return f"its cache roundings need head - rotary channels ({shape.head_dim - shape.rope_dim}) in groups of 64"
    dim = shape.index_dim
    if csa and (dim % 32 or dim & (dim - 1)):
        return f"its index roundings need a power of two of at least 32 channels, not {dim}"
    return ""
