"""The tensor table: which tensors a model of a given shape has, with their shapes and accepted dtypes.

The names and shapes are those of the DeepSeek-V4 GGUF description. Knows no file; the loader checks against this
table, `ds4 synth` writes from it and `ds4 inspect` adds up bytes by its groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ds4.model.quants import FLOAT_DTYPES, MATRIX_DTYPES
from ds4.model.shape import CSA, ModelShape

EMBEDDING = "embedding"
ATTENTION = "attention projections"
COMPRESSORS = "compressors"
INDEXER = "indexer"
STREAMS = "hyper-connections"
ROUTER = "router and norms"
SHARED = "shared expert"
ROUTED = "routed experts"
OUTPUT = "output head"
ID_TABLES = "expert id tables"

GROUPS = (EMBEDDING, ATTENTION, COMPRESSORS, INDEXER, STREAMS, ROUTER, SHARED, ROUTED, OUTPUT, ID_TABLES)
"""What tensors are summed up under. Small vectors count with the matrices they belong to."""

MATRIX = MATRIX_DTYPES
POSITIONS = FLOAT_DTYPES  # ape: a small matrix added, not multiplied; kernels read single elements of it
VECTOR = ("F32",)
TABLE = ("I32",)

TOKEN_EMBD, OUTPUT_WEIGHT = "token_embd.weight", "output.weight"


@dataclass(frozen=True)
class Role:
    name: str
    shape: tuple[int, ...]  # numpy order
    dtypes: tuple[str, ...]  # accepted
    group: str
    layer: int | None = None
    optional: bool = False

    @property
    def suffix(self) -> str:
        """The name without its layer: roles of one suffix have one meaning."""
        return self.name if self.layer is None else self.name.split(".", 2)[2]


def tensor_roles(shape: ModelShape) -> Iterator[Role]:
    """Every tensor of the model, in the order of use."""
    n, hidden = shape.n_streams, shape.hidden
    yield Role(TOKEN_EMBD, (shape.vocab, hidden), MATRIX, EMBEDDING)
    for layer in range(shape.n_layers):
        yield from layer_roles(shape, layer)
    yield Role("output_hc_fn.weight", (n, n * hidden), MATRIX, STREAMS)
    yield Role("output_hc_scale.weight", (1,), VECTOR, STREAMS)
    yield Role("output_hc_base.weight", (n,), VECTOR, STREAMS)
    yield Role("output_norm.weight", (hidden,), VECTOR, ROUTER)
    yield Role(OUTPUT_WEIGHT, (shape.vocab, hidden), MATRIX, OUTPUT)


def layer_roles(shape: ModelShape, layer: int) -> Iterator[Role]:
    """The tensors of one layer, `blk.LAYER.*`, in the order of use."""
    yield from _streams(shape, layer, "attn")
    yield from _attention(shape, layer)
    if shape.ratios[layer]:
        yield from _compressor(shape, layer)
    if shape.ratios[layer] == CSA:
        yield from _indexer(shape, layer)
    yield from _streams(shape, layer, "ffn")
    yield from _router(shape, layer)
    yield from _experts(shape, layer)


def _streams(shape: ModelShape, layer: int, half: str) -> Iterator[Role]:
    mix = (2 + shape.n_streams) * shape.n_streams
    prefix = f"blk.{layer}.hc_{half}"
    yield Role(f"{prefix}_fn.weight", (mix, shape.n_streams * shape.hidden), MATRIX, STREAMS, layer)
    yield Role(f"{prefix}_scale.weight", (3,), VECTOR, STREAMS, layer)
    yield Role(f"{prefix}_base.weight", (mix,), VECTOR, STREAMS, layer)


def _attention(shape: ModelShape, layer: int) -> Iterator[Role]:
    head_dim, width = shape.head_dim, shape.n_heads * shape.head_dim
    low = shape.o_groups * shape.o_lora
    for name, dims, dtypes in (
        ("attn_norm", (shape.hidden,), VECTOR),
        ("attn_q_a", (shape.q_lora, shape.hidden), MATRIX),
        ("attn_q_a_norm", (shape.q_lora,), VECTOR),
        ("attn_q_b", (width, shape.q_lora), MATRIX),
        ("attn_kv", (head_dim, shape.hidden), MATRIX),
        ("attn_kv_a_norm", (head_dim,), VECTOR),
        ("attn_sinks", (shape.n_heads,), VECTOR),
        ("attn_output_a", (low, width // shape.o_groups), MATRIX),
        ("attn_output_b", (shape.hidden, low), MATRIX),
    ):
        yield Role(f"blk.{layer}.{name}.weight", dims, dtypes, ATTENTION, layer)


def _compressor(shape: ModelShape, layer: int) -> Iterator[Role]:
    width, prefix = shape.comp_width(layer), f"blk.{layer}.attn_compressor"
    yield Role(f"{prefix}_ape.weight", (shape.ratios[layer], width), POSITIONS, COMPRESSORS, layer)
    yield Role(f"{prefix}_kv.weight", (width, shape.hidden), MATRIX, COMPRESSORS, layer)
    yield Role(f"{prefix}_gate.weight", (width, shape.hidden), MATRIX, COMPRESSORS, layer)
    yield Role(f"{prefix}_norm.weight", (shape.head_dim,), VECTOR, COMPRESSORS, layer)


def _indexer(shape: ModelShape, layer: int) -> Iterator[Role]:
    dim, prefix = shape.index_dim, f"blk.{layer}.indexer"
    yield Role(f"{prefix}.attn_q_b.weight", (shape.index_heads * dim, shape.q_lora), MATRIX, INDEXER, layer)
    yield Role(f"{prefix}.proj.weight", (shape.index_heads, shape.hidden), MATRIX, INDEXER, layer)
    yield Role(f"{prefix}_compressor_ape.weight", (shape.ratios[layer], 2 * dim), POSITIONS, INDEXER, layer)
    yield Role(f"{prefix}_compressor_kv.weight", (2 * dim, shape.hidden), MATRIX, INDEXER, layer)
    yield Role(f"{prefix}_compressor_gate.weight", (2 * dim, shape.hidden), MATRIX, INDEXER, layer)
    yield Role(f"{prefix}_compressor_norm.weight", (dim,), VECTOR, INDEXER, layer)


def _router(shape: ModelShape, layer: int) -> Iterator[Role]:
    prefix, experts = f"blk.{layer}", shape.n_experts
    yield Role(f"{prefix}.ffn_norm.weight", (shape.hidden,), VECTOR, ROUTER, layer)
    yield Role(f"{prefix}.ffn_gate_inp.weight", (experts, shape.hidden), MATRIX, ROUTER, layer)
    if shape.is_hash_layer(layer):
        ids = (shape.vocab, shape.n_experts_used)
        yield Role(f"{prefix}.ffn_gate_tid2eid.weight", ids, TABLE, ID_TABLES, layer)
    yield Role(f"{prefix}.exp_probs_b.bias", (experts,), VECTOR, ROUTER, layer, optional=True)


def _experts(shape: ModelShape, layer: int) -> Iterator[Role]:
    hidden, ffn = shape.hidden, shape.ffn_width
    for stem, dims in (("gate", (ffn, hidden)), ("up", (ffn, hidden)), ("down", (hidden, ffn))):
        prefix = f"blk.{layer}.ffn_{stem}"
        yield Role(f"{prefix}_exps.weight", (shape.n_experts, *dims), MATRIX, ROUTED, layer)
        yield Role(f"{prefix}_shexp.weight", dims, MATRIX, SHARED, layer)
