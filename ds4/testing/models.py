"""Small models for tests, made on the spot: seeded, golden-style, one file each. Knows no backend.

They vary what real files vary (layer kinds, windows, routing, rotary scaling, odd sizes, dtypes) and are small enough
that a slow backend gets through them. Windows are short, so that few tokens reach every edge. The numbers mean nothing;
the seeds are such that no choice (of experts, of index entries) is nearly tied on the texts that tests compare.
"""

from __future__ import annotations

import functools
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np

from ds4.errors import LimitsError
from ds4.model import quants, roles
from ds4.model.roles import Role, tensor_roles
from ds4.model.shape import ModelShape
from ds4.model.synth_header import ALIGNMENT, SPECIALS_FIRST, SPECIALS_LAST, DirectoryEntry, header_bytes
from ds4.model.synth_pools import random_blocks
from ds4.model.synth_presets import PRESETS, Fill, role_dtype, role_fill

DTYPE_PREFIX = "weights-"
"""`weights-Q4_K` has Q4_K wherever files have it and F32 elsewhere."""

_DENSE_GROUPS = (roles.ATTENTION, roles.SHARED, roles.OUTPUT)


@dataclass(frozen=True)
class Recipe:
    """What a model is made of; `dtype_of` says in which dtype a tensor is stored that may have several."""

    shape: ModelShape
    about: str
    seed: int = 0
    dtype_of: Callable[[Role], str] = lambda role: "F32"


def model_names() -> tuple[str, ...]:
    """Every model of the kit, the most general one first; `weights-*` differ in the dtype of their matrices."""
    return tuple(_models())


def recipe(name: str) -> Recipe:
    """What the named model is made of. Raises LimitsError for a name that does not exist."""
    models = _models()
    if name not in models:
        raise LimitsError(f"there is no test model {name!r}; use one of {', '.join(models)}", field="name", value=name)
    return models[name]


def dtypes_of(name: str) -> frozenset[str]:
    """Every dtype that the named model has matrices of."""
    model = recipe(name)
    return frozenset(model.dtype_of(role) for role in _stored(model.shape) if len(role.dtypes) > 1)


def text(name: str, number: int, n: int) -> list[int]:
    """The first n tokens of the numbered random text for a model; control tokens are left out."""
    low, high = len(SPECIALS_FIRST), recipe(name).shape.vocab - len(SPECIALS_LAST)
    draws = np.random.PCG64(1000 + number).random_raw(n)
    return [int(low + draw % np.uint64(high - low)) for draw in draws]


def write_model(name: str, path: str | os.PathLike[str]) -> None:
    """Write a model file; the same name gives the same bytes. Raises LimitsError for an unknown name, OSError."""
    model = recipe(name)
    entries, data = [], bytearray()
    for role in _stored(model.shape):
        dtype = role.dtypes[0] if len(role.dtypes) == 1 else model.dtype_of(role)
        entries.append(DirectoryEntry(role.name, dtype, role.shape, len(data)))
        blocks = tensor_bytes(role, dtype, model)
        data += blocks + bytes(-len(blocks) % ALIGNMENT)
    title = f"ds4 test model {name}: {model.about} (random weights)"
    Path(path).write_bytes(header_bytes(model.shape, title, entries) + data)


def model_path(name: str) -> Path:
    """A file with the named model, written once per process into a folder that goes away at exit."""
    path = Path(_folder().name) / f"{name}.gguf"
    if not path.exists():
        part = path.with_suffix(".part")
        write_model(name, part)
        part.replace(path)
    return path


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="ds4-models-", ignore_cleanup_errors=True)


def _stored(shape: ModelShape) -> Iterator[Role]:
    """Roles that published files store: hash layers have no router bias."""
    for role in tensor_roles(shape):
        if not (role.optional and role.layer is not None and shape.is_hash_layer(role.layer)):
            yield role


# ---------------------------------------------------------------- values


def tensor_bytes(role: Role, dtype: str, model: Recipe) -> bytes:
    """The tensor's bytes; they depend on its name, dtype, shape and the model's seed only."""
    rng = np.random.default_rng(zlib.crc32(f"{role.name}:{model.seed}".encode()))
    fill = golden_fill(role, model.shape)
    n_bytes = quants.tensor_bytes(dtype, role.shape)
    unit = 4 * fill.ids_per_row if fill.kind == "ids" else quants.FORMATS[dtype].block_bytes
    return random_blocks(dtype, fill, rng, n_bytes // unit).tobytes()


def golden_fill(role: Role, shape: ModelShape) -> Fill:
    """Values in which every part of the model shows: wide norms, strong sinks, logits with a deviation of about 3."""
    fill = role_fill(role, shape)
    for ending, other in _SMALL.items():
        if role.suffix.endswith(ending):
            return other
    return replace(fill, scale=fill.scale * _STRENGTH.get(role.group, 1.0)) if fill.kind == "normal" else fill


_SMALL: Mapping[str, Fill] = MappingProxyType(
    {
        "norm.weight": Fill("near one", 0.3),
        "_scale.weight": Fill("near one", 0.2),
        "_base.weight": Fill("normal", 0.8),
        "_ape.weight": Fill("normal", 0.66),
        "attn_sinks.weight": Fill("near one", 0.6),
        "exp_probs_b.bias": Fill("normal", 0.2),
    }
)
_STRENGTH: Mapping[str, float] = MappingProxyType(
    {roles.STREAMS: 2.0, roles.ROUTER: 1.5, roles.ROUTED: 1.3, roles.SHARED: 1.3, roles.OUTPUT: 3.0}
)


# ---------------------------------------------------------------- shapes


def _shape(ratios: tuple[int, ...], base: ModelShape | None = None, clamp: float = 10.0, **sizes: object) -> ModelShape:
    per_layer = {"n_layers": len(ratios), "ratios": ratios, "swiglu_clamp": (clamp,) * len(ratios)}
    return replace(base or _small(), **per_layer, **sizes)  # type: ignore[arg-type]


def _small() -> ModelShape:
    """Flash's constants (also its rotary scaling) over sizes of tens."""
    return replace(
        PRESETS["flash"].shape,
        hidden=64,
        vocab=320,
        n_heads=4,
        head_dim=48,
        rope_dim=16,
        q_lora=32,
        o_groups=2,
        o_lora=16,
        n_experts=8,
        n_experts_used=3,
        ffn_width=32,
        n_hash_layers=0,
        window=16,
        index_heads=8,
        index_dim=32,
        index_top_k=8,
        trained_context=1 << 16,
    )


def _blocks() -> ModelShape:
    """Every row of a matrix is a whole number of the largest blocks (256 values)."""
    return replace(
        _small(),
        hidden=256,
        vocab=288,
        head_dim=64,
        rope_dim=32,
        q_lora=256,
        o_groups=1,
        o_lora=256,
        n_experts=4,
        n_experts_used=2,
        ffn_width=256,
    )


def _odd() -> ModelShape:
    return replace(
        _small(),
        hidden=72,
        vocab=331,
        n_heads=6,
        head_dim=40,
        rope_dim=24,
        q_lora=44,
        o_groups=3,
        o_lora=20,
        n_experts=7,
        ffn_width=28,
        n_hash_layers=1,
        window=21,
        index_heads=10,
        index_dim=36,
        index_top_k=6,
        expert_scale=2.5,
        compress_rope_base=1000.0,
        yarn_factor=4.0,
        yarn_context=128,
        yarn_beta_fast=8.0,
    )


def _pro() -> ModelShape:
    return replace(
        _small(),
        n_experts=6,
        n_experts_used=2,
        n_hash_layers=2,
        window=8,
        index_top_k=4,
        sinkhorn_iters=5,
        hc_eps=1e-5,
        rms_eps=1e-5,
        expert_scale=2.5,
        yarn_factor=1.0,
    )


def _published() -> ModelShape:
    return replace(_blocks(), head_dim=96, q_lora=64, o_groups=2, o_lora=32, n_hash_layers=1, window=32, index_dim=64)


def dtype_in(dtype: str, role: Role) -> str:
    """`dtype` in the roles in which files have it, F32 elsewhere."""
    is_float = dtype in quants.FLOAT_DTYPES
    is_dense = dtype in ("Q8_0", "Q4_0", "Q4_K") and role.group in _DENSE_GROUPS
    return dtype if dtype in role.dtypes and (is_float or is_dense or role.group == roles.ROUTED) else "F32"


@functools.cache
def _models() -> Mapping[str, Recipe]:
    blocks = _shape((4,), _blocks())
    models = {
        "small": Recipe(_shape((0, 4, 128), n_hash_layers=1), "every layer kind once", seed=1),
        "flash": Recipe(
            _shape((0, 0, 4, 128, 4, 128), n_hash_layers=3),
            "all layer kinds in Flash's order, three hash layers",
            seed=12,
        ),
        "pro": Recipe(_shape((128, 128, 4, 128), _pro()), "Pro's order, no rotary scaling, other epsilons", seed=5),
        "odd": Recipe(
            _shape((0, 4, 128, 4), _odd(), clamp=0.75), "odd sizes, strong rotary scaling, a clamp that clips"
        ),
        "long": Recipe(_shape((128, 4), window=32, index_top_k=16), "for long texts: many entries, few kept", seed=2),
        "window": Recipe(_shape((0, 4, 0), window=128), "the published window of 128", seed=5),
        "published": Recipe(
            _shape((0, 4, 128), _published()),
            "dtypes of the published 2-bit files",
            dtype_of=lambda role: role_dtype(role, "q2"),
            seed=2,
        ),
    }
    seeds = {"Q4_K": 1, "Q5_K": 2}
    for dtype in quants.MATRIX_DTYPES:
        if dtype != "F32":
            about = f"{dtype} wherever files have it, F32 elsewhere"
            models[DTYPE_PREFIX + dtype] = Recipe(
                blocks, about, seed=seeds.get(dtype, 0), dtype_of=functools.partial(dtype_in, dtype)
            )
    return MappingProxyType(models)
