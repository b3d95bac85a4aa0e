"""What synthetic models look like: shapes, dtypes of the published mixes, and how each tensor is filled.

Knows no file and no bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from ds4.errors import LimitsError
from ds4.model import roles
from ds4.model.roles import Role
from ds4.model.shape import CSA, HCA, SLIDING, ModelShape


@dataclass(frozen=True)
class Preset:
    shape: ModelShape
    mix: str  # the default one
    meaning: str


def _schedule(n_layers: int, first_two: int) -> tuple[int, ...]:
    """The published layer order: two layers of one kind, then CSA and HCA in turn."""
    return tuple(first_two if i < 2 else CSA if i % 2 == 0 else HCA for i in range(n_layers))


_FLASH = ModelShape(
    n_layers=43,
    hidden=4096,
    vocab=129280,
    n_heads=64,
    head_dim=512,
    rope_dim=64,
    q_lora=1024,
    o_groups=8,
    o_lora=1024,
    n_experts=256,
    n_experts_used=6,
    ffn_width=2048,
    n_hash_layers=3,
    window=128,
    index_heads=64,
    index_dim=128,
    index_top_k=512,
    n_streams=4,
    sinkhorn_iters=20,
    hc_eps=1e-6,
    rms_eps=1e-6,
    expert_scale=1.5,
    swiglu_clamp=(10.0,) * 43,
    rope_base=10000.0,
    compress_rope_base=160000.0,
    yarn_factor=16.0,
    yarn_context=65536,
    yarn_beta_fast=32.0,
    yarn_beta_slow=1.0,
    ratios=_schedule(43, SLIDING),
    trained_context=1048576,
)
_PRO = replace(
    _FLASH,
    n_layers=61,
    hidden=7168,
    n_heads=128,
    q_lora=1536,
    o_groups=16,
    n_experts=384,
    ffn_width=3072,
    index_top_k=1024,
    expert_scale=2.5,
    swiglu_clamp=(10.0,) * 61,
    ratios=_schedule(61, HCA),
)
_MINI = replace(
    _FLASH,
    n_layers=16,
    hidden=1024,
    vocab=32768,
    n_heads=16,
    head_dim=256,
    q_lora=512,
    o_groups=4,
    o_lora=256,
    n_experts=32,
    n_experts_used=4,
    ffn_width=1024,
    index_heads=16,
    index_top_k=128,
    swiglu_clamp=(10.0,) * 16,
    ratios=_schedule(16, SLIDING),
    trained_context=65536,
)
_TINY = replace(
    _FLASH,
    n_layers=6,
    hidden=256,
    vocab=512,
    n_heads=8,
    head_dim=96,
    rope_dim=32,
    q_lora=128,
    o_groups=2,
    o_lora=64,
    n_experts=8,
    n_experts_used=2,
    ffn_width=256,
    window=64,
    index_heads=4,
    index_dim=64,
    index_top_k=32,
    swiglu_clamp=(10.0,) * 6,
    ratios=_schedule(6, SLIDING),
    trained_context=4096,
)

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "flash": Preset(_FLASH, "q2", "DeepSeek-V4-Flash, 81 GiB with the default mix"),
        "pro": Preset(_PRO, "q2", "DeepSeek-V4-Pro, 433 GiB with the default mix"),
        "mini": Preset(_MINI, "q8", "Flash's layer kinds in about 2 GB"),
        "tiny": Preset(_TINY, "q8", "Flash's layer kinds in about 15 MB"),
    }
)

MIXES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {  # routed experts: gate and up, down
        "q2": ("IQ2_XXS", "Q2_K"),
        "q4": ("Q4_K", "Q4_K"),
        "q8": ("Q8_0", "Q8_0"),
    }
)
"""The published dtype mixes differ in the routed experts only."""

_PUBLISHED: Mapping[str, str] = MappingProxyType(
    {roles.EMBEDDING: "F16", roles.STREAMS: "F16", roles.COMPRESSORS: "F16", roles.INDEXER: "F16"}
    | {roles.ROUTER: "F16", roles.ATTENTION: "Q8_0", roles.SHARED: "Q8_0", roles.OUTPUT: "Q8_0"}
)


def preset_shape(name: str, n_layers: int | None = None) -> ModelShape:
    """The shape of a preset, cut to its first `n_layers` layers. Raises LimitsError."""
    if name not in PRESETS:
        raise LimitsError(f"there is no preset {name!r}; use one of {', '.join(PRESETS)}", field="preset", value=name)
    shape = PRESETS[name].shape
    if n_layers is None:
        return shape
    if not 1 <= n_layers <= shape.n_layers:
        raise LimitsError(f"{name} has 1 to {shape.n_layers} layers", field="layers", value=n_layers)
    return replace(
        shape,
        n_layers=n_layers,
        n_hash_layers=min(shape.n_hash_layers, n_layers),
        ratios=shape.ratios[:n_layers],
        swiglu_clamp=shape.swiglu_clamp[:n_layers],
    )


def role_dtype(role: Role, mix: str) -> str:
    """The dtype that the published file of a mix has for a role."""
    if len(role.dtypes) == 1:
        return role.dtypes[0]
    if role.group == roles.ROUTED:
        gate_up, down = MIXES[mix]
        return down if role.suffix.startswith("ffn_down") else gate_up
    return _PUBLISHED[role.group]


# ---------------------------------------------------------------- values

Kind = Literal["normal", "near one", "constant", "ids"]


@dataclass(frozen=True)
class Fill:
    """Random values of a tensor: normal with deviation `scale`; 1 + that; the constant; rows of distinct ids."""

    kind: Kind
    scale: float = 0.0
    n_ids: int = 0
    ids_per_row: int = 0


def role_fill(role: Role, shape: ModelShape) -> Fill:
    """Values scaled so that activations stay finite: matrices by their fan-in, norms near one."""
    name = role.suffix
    if role.group == roles.ID_TABLES:
        return Fill("ids", n_ids=shape.n_experts, ids_per_row=shape.n_experts_used)
    if name.endswith("norm.weight"):
        return Fill("near one", 0.05)
    if name.endswith("_scale.weight"):
        return Fill("constant", 0.5)
    if name.endswith(("_base.weight", "_ape.weight")):
        return Fill("normal", 0.2)
    if name == "attn_sinks.weight":
        return Fill("normal", 0.5)
    if name == "exp_probs_b.bias":
        return Fill("normal", 0.05)
    if name == roles.TOKEN_EMBD:
        return Fill("normal", 1.0)
    return Fill("normal", float(role.shape[-1]) ** -0.5)
