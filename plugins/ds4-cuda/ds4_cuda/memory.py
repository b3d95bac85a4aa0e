"""The device memory of an opened model, and the Run and Layer records that point into it.

Owns every allocation; `free` gives all of them back. Runs on the device's owner thread.
"""

from __future__ import annotations

import math
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from ds4.plugin import CacheLayout, Limits, ModelShape, Progress
from ds4_cuda import work
from ds4_cuda.kernels import Kernels
from ds4_cuda.records import HASH_TABLE, LAYER, LAYER_MATS, LAYER_VECS, RUN, STEP, record
from ds4_cuda.weights import Arena, Uploader


def frequencies(shape: ModelShape, *, compressed: bool) -> npt.NDArray[np.float64]:
    """float64 [rope_dim // 2], radians per position; compressed layers have their own base and YaRN interpolation."""
    n = shape.rope_dim
    pair = np.arange(n // 2, dtype=np.float64)
    base = shape.compress_rope_base if compressed else shape.rope_base
    plain = np.asarray(base ** (-2 * pair / n), dtype=np.float64)
    if not compressed or shape.yarn_factor <= 1:
        return plain

    def pair_of(beta: float) -> float:
        return n * math.log(shape.yarn_context / (beta * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(pair_of(shape.yarn_beta_fast)), 0)
    high = min(math.ceil(pair_of(shape.yarn_beta_slow)), n - 1)
    ramp = np.clip((pair - low) / max(high - low, 0.001), 0, 1)
    return np.asarray(plain / shape.yarn_factor * ramp + plain * (1 - ramp), dtype=np.float64)


def iq2_xxs_grid() -> npt.NDArray[np.uint8]:
    """uint8 [256, 8]: the magnitudes of the IQ2_XXS format, from gguf-py."""
    gguf.quants.IQ2_XXS.init_grid()
    return np.ascontiguousarray(np.asarray(gguf.quants.IQ2_XXS.grid).reshape(256, 8).astype(np.uint8))


def iq2_xxs_tables() -> npt.NDArray[np.uint32]:
    """uint32 [256 + 128]: a nibble per weight that selects its magnitude, then one whose bit 2 is its sign.

    The eighth sign is the parity of the seven stored ones (the format's rule).
    """
    grid = iq2_xxs_grid()
    shifts = np.arange(8, dtype=np.uint32) * 4
    which = np.searchsorted(np.unique(grid), grid).astype(np.uint32)
    seven = np.arange(128, dtype=np.uint32)[:, None] >> np.arange(7, dtype=np.uint32) & 1
    signs = np.concatenate([seven, seven.sum(axis=1, keepdims=True) & 1], axis=1).astype(np.uint32) * 4
    return np.concatenate([(which << shifts).sum(axis=1), (signs << shifts).sum(axis=1)]).astype(np.uint32)


class DeviceMemory:
    """Slabs, pages, step buffers, work buffers and weights of one model."""

    def __init__(
        self,
        driver: Any,
        kernels: Kernels,
        stream: Any,
        model: Any,
        limits: Limits,
        layout: CacheLayout,
        *,
        roundings: bool,
        int8: bool,
        progress: Progress | None,
    ) -> None:
        self.driver, self.shape, self.limits, self.layout = driver, model.shape, limits, layout
        self._kernels, self._stream, self._progress = kernels, stream, progress
        self._arenas: list[Arena] = []
        try:
            self._allocate(model, roundings, int8)
            self._upload(model)
            self.layer_table = self._table()
        except BaseException:
            self.free()
            raise

    def _arena(self, n_bytes: int, *, zero: bool = False) -> Arena:
        arena = Arena(self.driver, n_bytes)
        self._arenas.append(arena)
        if zero:
            self.driver.memset_d8(arena.base, 0, n_bytes)
        return arena

    def _allocate(self, model: Any, roundings: bool, int8: bool) -> None:
        shape, limits, layout = self.shape, self.limits, self.layout
        self.slabs = self._arena(max(limits.sessions * layout.slab_bytes, 256), zero=True)
        self.pages = self._arena(max((limits.pages or 0) * layout.page_bytes, 256), zero=True)
        kinds, ints = work.twin_kinds(model, int8=int8), work.step_ints(limits)
        floats = work.work_floats(shape, limits, kinds)
        buffers = self._arena(
            sum(work.aligned(4 * n) for n in floats.values()) + work.aligned(4 * sum(ints.values())), zero=True
        )
        self.step_at = buffers.take(4 * sum(ints.values()))
        self.step_offset = dict(zip(ints, np.cumsum([0, *ints.values()]).tolist(), strict=False))
        places = {name: buffers.take(4 * n) for name, n in floats.items()}
        twins = work.quant_sources(shape, work.work_rows(limits))
        plain = {name: at for name, at in places.items() if name.removesuffix("_q") not in twins or name in twins}
        self.run = record(RUN, **self._sizes(roundings), **plain)
        self.run["int8"] = int8
        for name, n in twins.items():
            at = places[f"{name}_q"]
            for field, n_bytes in work.quant_parts(kinds[name], n).items():
                self.run[f"{name}_q"][field] = at
                at += n_bytes
        counts = {name: self.step_at + 4 * i for i, name in enumerate(STEP[:3])}
        arrays = {name: self.step_at + 4 * self.step_offset[name] for name in STEP[3:]}
        for name, at in {**counts, **arrays}.items():
            self.run[name] = at
        self.layers = [self._layer(i) for i in range(shape.n_layers)]

    def _sizes(self, roundings: bool) -> dict[str, Any]:
        shape, limits, layout = self.shape, self.limits, self.layout
        same = "n_layers hidden vocab n_heads head_dim rope_dim q_lora o_groups o_lora n_experts ffn_width window"
        same += " index_heads index_dim n_streams sinkhorn_iters hc_eps rms_eps expert_scale"
        return {
            **{name: getattr(shape, name) for name in same.split()},
            "n_used": shape.n_experts_used,
            "top_k": shape.index_top_k,
            "ring": layout.ring,
            "cache_half": layout.cache_dtype == "float16",
            "roundings": roundings,
            "max_rows": work.work_rows(limits),
            "max_entries": limits.context // 4,
            "n_splits": work.max_splits(shape, limits.context),
            "attend_rows": work.attend_rows(shape, limits),
            "attn_scale": 1.0 / math.sqrt(shape.head_dim),
            "slabs": self.slabs.base,
            "pages": self.pages.base,
            "slab_bytes": layout.slab_bytes,
            "page_bytes": layout.page_bytes,
        }

    def _layer(self, i: int) -> Any:
        place, n = self.layout.layers[i], self.limits.max_rows or 1
        sizes = work.step_bytes(self.layout, self.shape.index_dim, i)
        arena = self._arena(sum(work.aligned(n * size) for size in sizes))
        latent, comp, index_comp = (arena.take(n * size) for size in sizes)
        rec = record(LAYER, ratio=place.ratio, comp_ring=place.comp_ring, comp_width=place.comp_width)
        rec["clamp"] = self.shape.swiglu_clamp[i]
        for name in ("latent", "comp", "index_comp", "entries", "index_keys"):
            rec[name] = getattr(place, name)
        rec["step_latent"], rec["step_comp"], rec["step_index_comp"] = latent, comp, index_comp
        return rec

    # ------------------------------------------------------------ weights

    def _upload(self, model: Any) -> None:
        extra = 64 * 1024  # frequencies and the IQ2_XXS table; ape tensors grow when they become float32
        tensors = model.weights.values()
        small = sum(work.aligned(2 * t.n_bytes) for t in tensors if t.name.endswith("_ape.weight"))
        arena = self._arena(sum(work.aligned(work.device_bytes(t)) for t in tensors) + small + extra)
        self._total, self._done = sum(t.n_bytes for t in tensors), 0
        uploader = Uploader(self.driver, self._stream, self._kernels, arena, self.run.tobytes())
        try:
            for kind in range(2):
                self.run["freq"][kind] = uploader.array(frequencies(self.shape, compressed=bool(kind)))
            self.run["grid"] = uploader.array(iq2_xxs_grid())
            self.run["tables"] = uploader.array(iq2_xxs_tables())
            weights = dict(model.weights)
            self._upload_globals(uploader, weights)
            for i in range(self.shape.n_layers):
                self._upload_layer(uploader, weights, i)
        finally:
            uploader.close()

    def _went(self, n_bytes: int) -> None:
        self._done += n_bytes
        if self._progress is not None:
            self._progress("weights", self._done, self._total)

    def _upload_globals(self, uploader: Uploader, weights: dict[str, Any]) -> None:
        for name in ("output_hc_scale", "output_hc_base", "output_norm"):
            self.run[name] = uploader.floats(weights[f"{name}.weight"])
        for name, field in (("token_embd", "embedding"), ("output", "output"), ("output_hc_fn", "output_hc")):
            self.run[field] = uploader.matrix(weights[f"{name}.weight"], self._went)

    def _upload_layer(self, uploader: Uploader, weights: dict[str, Any], i: int) -> None:
        rec, prefix = self.layers[i], f"blk.{i}."
        is_hash = self.shape.is_hash_layer(i)
        for at, suffix in enumerate(LAYER_MATS):
            if prefix + suffix in weights:
                rec["mat"][at] = uploader.matrix(weights[prefix + suffix], self._went)
        for at, suffix in enumerate(LAYER_VECS):
            if prefix + suffix in weights and not (is_hash and suffix == "exp_probs_b.bias"):
                rec["vec"][at] = uploader.floats(weights[prefix + suffix])
        if is_hash:
            rec["tid2eid"] = uploader.array(weights[prefix + HASH_TABLE].data.view("<i4"))

    def _table(self) -> int:
        """The Layer records in device memory, for kernels that run over all layers at once."""
        table = b"".join(layer.tobytes() for layer in self.layers)
        arena = self._arena(len(table))
        self.driver.memcpy_htod(arena.base, np.frombuffer(table, np.uint8))
        return arena.base

    def free(self) -> None:
        for arena in self._arenas:
            arena.free()
        self._arenas.clear()
