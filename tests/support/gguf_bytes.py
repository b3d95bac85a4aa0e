"""GGUF files built by hand, right or deliberately wrong, and an independent walk through their structure.

Nothing here uses ds4's reader: what it builds and where it sees boundaries comes from the format's description alone.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

U8, I8, U16, I16, U32, I32, F32, BOOL, STR, ARR, U64, I64, F64 = range(13)
FORMATS = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", I64: "q", F64: "d"}
GGML_F32, GGML_F16, GGML_Q8_0, GGML_Q4_K, GGML_I32, GGML_BF16, GGML_MXFP4 = 0, 1, 8, 12, 26, 30, 39


def text(value: str | bytes, length: int | None = None) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data) if length is None else length) + data


def pair(key: str | bytes, value_type: int, payload: bytes) -> bytes:
    """A metadata pair with any payload, fitting or not."""
    return text(key) + struct.pack("<I", value_type) + payload


def scalar(key: str, value_type: int, value: float) -> bytes:
    return pair(key, value_type, struct.pack("<" + FORMATS[value_type], value))


def string(key: str, value: str | bytes) -> bytes:
    return pair(key, STR, text(value))


def array(key: str, item_type: int, values: Sequence[Any], count: int | None = None) -> bytes:
    if item_type == STR:
        data = b"".join(text(v) for v in values)
    else:
        data = struct.pack(f"<{len(values)}{FORMATS[item_type]}", *values)
    return pair(key, ARR, struct.pack("<IQ", item_type, len(values) if count is None else count) + data)


@dataclass
class TensorSpec:
    name: str | bytes
    dims: tuple[int, ...]  # as in the file: row length first
    ggml_id: int = GGML_F32
    data: bytes = b""
    offset: int | None = None  # relative; None: the next free aligned place
    n_dims: int | None = None


@dataclass
class GgufBytes:
    """A GGUF file in the making; every field may lie."""

    pairs: dict[str, bytes] = field(default_factory=dict)
    tensors: list[TensorSpec] = field(default_factory=list)
    magic: bytes = b"GGUF"
    version: bytes = struct.pack("<I", 3)
    n_pairs: int | None = None
    n_tensors: int | None = None
    alignment: int = 32

    def copy(self) -> GgufBytes:
        return replace(self, pairs=dict(self.pairs), tensors=[replace(t) for t in self.tensors])

    def tensor(self, name: str) -> TensorSpec:
        return next(t for t in self.tensors if t.name == name)

    def build(self) -> bytes:
        n_pairs = len(self.pairs) if self.n_pairs is None else self.n_pairs
        n_tensors = len(self.tensors) if self.n_tensors is None else self.n_tensors
        out = [self.magic, self.version, struct.pack("<QQ", n_tensors, n_pairs), *self.pairs.values()]
        data = bytearray()
        for spec in self.tensors:
            offset = len(data) if spec.offset is None else spec.offset
            n_dims = len(spec.dims) if spec.n_dims is None else spec.n_dims
            out.append(text(spec.name) + struct.pack(f"<I{len(spec.dims)}Q", n_dims, *spec.dims))
            out.append(struct.pack("<IQ", spec.ggml_id, offset))
            if spec.offset is None:
                data += spec.data + bytes(-len(spec.data) % self.alignment)
        header = b"".join(out)
        return header + bytes(-len(header) % self.alignment) + bytes(data)


def one_tensor(**changes: Any) -> GgufBytes:
    """A well-formed file of one F32 tensor, 8 x 4, that is no model."""
    spec = TensorSpec("t", (8, 4), GGML_F32, bytes(8 * 4 * 4))
    return GgufBytes({"a": scalar("a", U32, 1)}, [replace(spec, **changes)])


# ---------------------------------------------------------------- a small model

_P = "deepseek4."


def model_pairs(
    ratios: Sequence[int], *, hidden: int, vocab: int, experts: int, used: int, ffn: int, hashed: int
) -> dict[str, bytes]:
    """The metadata of a very small model, by key."""
    whole = {
        "block_count": len(ratios),
        "context_length": 512,
        "embedding_length": hidden,
        "vocab_size": vocab,
        "attention.head_count": 2,
        "attention.head_count_kv": 1,
        "attention.key_length": 32,
        "attention.value_length": 32,
        "rope.dimension_count": 16,
        "attention.q_lora_rank": 32,
        "attention.output_group_count": 2,
        "attention.output_lora_rank": 16,
        "attention.sliding_window": 8,
        "attention.indexer.head_count": 2,
        "attention.indexer.key_length": 32,
        "attention.indexer.top_k": 4,
        "expert_count": experts,
        "expert_used_count": used,
        "expert_feed_forward_length": ffn,
        "expert_shared_count": 1,
        "hash_layer_count": hashed,
        "hyper_connection.count": 2,
        "hyper_connection.sinkhorn_iterations": 3,
        "rope.scaling.original_context_length": 65536,
    }
    real = {
        "hyper_connection.epsilon": 1e-6,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "expert_weights_scale": 1.5,
        "rope.freq_base": 1e4,
        "attention.compress_rope_freq_base": 1.6e5,
        "rope.scaling.factor": 16.0,
        "rope.scaling.yarn_beta_fast": 32.0,
        "rope.scaling.yarn_beta_slow": 1.0,
    }
    pairs = {"general.architecture": string("general.architecture", "deepseek4")}
    pairs |= {_P + k: scalar(_P + k, U32, v) for k, v in whole.items()}
    pairs |= {_P + k: scalar(_P + k, F32, v) for k, v in real.items()}
    pairs[_P + "expert_weights_norm"] = scalar(_P + "expert_weights_norm", BOOL, True)
    pairs[_P + "attention.compress_ratios"] = array(_P + "attention.compress_ratios", I32, list(ratios))
    pairs[_P + "swiglu_clamp_exp"] = array(_P + "swiglu_clamp_exp", F32, [10.0] * len(ratios))
    return pairs


def model_tensors(
    ratios: Sequence[int], *, hidden: int, vocab: int, experts: int, used: int, ffn: int, hashed: int
) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """(name, dims as in the file, ggml type) of every tensor of that model: everything F32 but the id tables."""
    n, dim, heads, lora = 2, 32, 2, 32
    yield "token_embd.weight", (hidden, vocab), GGML_F32
    for i, ratio in enumerate(ratios):
        b = f"blk.{i}."
        for half in ("attn", "ffn"):
            yield f"{b}hc_{half}_fn.weight", (n * hidden, (2 + n) * n), GGML_F32
            yield f"{b}hc_{half}_scale.weight", (3,), GGML_F32
            yield f"{b}hc_{half}_base.weight", ((2 + n) * n,), GGML_F32
        dims: dict[str, tuple[int, ...]] = {
            "attn_norm": (hidden,),
            "attn_q_a": (hidden, lora),
            "attn_q_a_norm": (lora,),
            "attn_q_b": (lora, heads * dim),
            "attn_kv": (hidden, dim),
            "attn_kv_a_norm": (dim,),
            "attn_sinks": (heads,),
            "attn_output_a": (dim, 32),
            "attn_output_b": (32, hidden),
            "ffn_norm": (hidden,),
            "ffn_gate_inp": (hidden, experts),
        }
        if ratio:
            width = dim * (2 if ratio == 4 else 1)
            dims |= {"attn_compressor_ape": (width, ratio), "attn_compressor_norm": (dim,)}
            dims |= {"attn_compressor_kv": (hidden, width), "attn_compressor_gate": (hidden, width)}
        if ratio == 4:
            dims |= {"indexer.attn_q_b": (lora, 64), "indexer.proj": (hidden, 2), "indexer_compressor_norm": (dim,)}
            dims |= {"indexer_compressor_ape": (64, 4), "indexer_compressor_kv": (hidden, 64)}
            dims |= {"indexer_compressor_gate": (hidden, 64)}
        for stem, size in (("gate", (hidden, ffn)), ("up", (hidden, ffn)), ("down", (ffn, hidden))):
            dims |= {f"ffn_{stem}_exps": (*size, experts), f"ffn_{stem}_shexp": size}
        yield from ((f"{b}{name}.weight", shape, GGML_F32) for name, shape in dims.items())
        if i < hashed:
            yield f"{b}ffn_gate_tid2eid.weight", (used, vocab), GGML_I32
        else:
            yield f"{b}exp_probs_b.bias", (experts,), GGML_F32
    yield "output_hc_fn.weight", (n * hidden, n), GGML_F32
    yield "output_hc_scale.weight", (1,), GGML_F32
    yield "output_hc_base.weight", (n,), GGML_F32
    yield "output_norm.weight", (hidden,), GGML_F32
    yield "output.weight", (hidden, vocab), GGML_F32


def small_model(ratios: Sequence[int] = (0, 4, 128), hashed: int = 1, hidden: int = 32, ffn: int = 32) -> GgufBytes:
    """A loadable model with zero weights and no tokenizer, about 150 kB."""
    sizes = {"hidden": hidden, "vocab": 16, "experts": 4, "used": 2, "ffn": ffn, "hashed": hashed}
    tensors = []
    for name, dims, ggml_id in model_tensors(ratios, **sizes):
        n = 4
        for d in dims:
            n *= d
        tensors.append(TensorSpec(name, dims, ggml_id, bytes(n)))
    return GgufBytes(model_pairs(ratios, **sizes), tensors)


# ---------------------------------------------------------------- structure of a good file


@dataclass
class Structure:
    boundaries: list[int]  # positions between any two fields of the header, ascending
    pairs: Mapping[str, tuple[int, int]]  # key: first byte of the value type, end
    names: Mapping[str, int]  # tensor name: position of its text
    types: Mapping[str, int]  # tensor name: position of its type number
    header_end: int


def walk(data: bytes | bytearray) -> Structure:
    """Every field boundary of a well-formed file."""
    at = 24
    cuts = [4, 8, 16, 24]

    def number(fmt: str) -> int:
        nonlocal at
        (value,) = struct.unpack_from("<" + fmt, data, at)
        at += struct.calcsize(fmt)
        cuts.append(at)
        return int(value)

    def words() -> str:
        nonlocal at
        length = number("Q")
        at += length
        cuts.append(at)
        return bytes(data[at - length : at]).decode()

    def value(value_type: int) -> None:
        nonlocal at
        if value_type == STR:
            words()
        elif value_type == ARR:
            item, count = number("I"), number("Q")
            for _ in range(count):
                value(item)
        else:
            at += struct.calcsize(FORMATS[value_type])
            cuts.append(at)

    n_tensors, n_pairs = struct.unpack_from("<QQ", data, 8)
    pairs: dict[str, tuple[int, int]] = {}
    for _ in range(n_pairs):
        key, start = words(), at
        value(number("I"))
        pairs[key] = (start, at)
    names: dict[str, int] = {}
    types: dict[str, int] = {}
    for _ in range(n_tensors):
        name = words()
        names[name] = at - len(name.encode())
        for _ in range(number("I")):
            number("Q")
        types[name] = at
        number("I"), number("Q")
    return Structure(sorted(set(cuts)), pairs, names, types, at)
