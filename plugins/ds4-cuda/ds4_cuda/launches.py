"""The order of a step's kernel launches, with their grids and arguments. Knows the algorithm, runs nothing.

A launch is (kernel, grid, block, shared bytes, packed arguments). Grids are for a bucket of rows, so that one list
serves every step of that bucket: kernels read the true counts from the step's arrays and surplus blocks return.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ds4.plugin import CSA, HCA, SLIDING, ModelShape
from ds4_cuda import tensor
from ds4_cuda.kernels import pack_arguments
from ds4_cuda.records import DTYPES, INT8_DTYPES, JOBS, LAYER_MATS, MAX_JOBS, NARROW_DTYPES, record
from ds4_cuda.work import FEW_ROWS, KEYS, KEYS8, KINDS, PART, TILE, ceil, max_tiles, max_visible

PRODUCT_ROWS, GATE_UP_ROWS, DOWN_ROWS = 4, 2, 4  # weight rows per warp; as in the kernels


@dataclass(frozen=True)
class Launch:
    name: str
    grid: tuple[int, ...]
    block: int
    shared: int
    arguments: bytes


@dataclass(frozen=True)
class Bucket:
    """What a list of launches is made for; each is an upper bound of the step's."""

    n_rows: int
    n_logit_rows: int
    n_tokens: int  # positions end below this


def power_above(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def bucket_of(n_rows: int, n_logit_rows: int, n_tokens: int, max_rows: int, context: int) -> Bucket:
    logits = min(power_above(n_logit_rows), max_rows) if n_logit_rows else 0
    return Bucket(min(power_above(n_rows), max_rows), logits, min(max(power_above(n_tokens), 256), context))


def segments(n_in: int) -> tuple[int, int, int]:
    """(segments of K, inputs per segment, output groups per block): functions of the matrix alone."""
    segment = 1024 * ceil(n_in, 32 * 1024)
    n = ceil(n_in, segment)
    return n, segment, max(1, 8 // n)


SLICES = 4  # of a window's rows; as in store.cu
NARROW = 64  # outputs of a matrix for which a warp works on one output row alone
ENOUGH_BLOCKS = 528  # 132 multiprocessors, four blocks each: fewer blocks than this are not made fewer still
NO_TWIN = (0,) * 6


def turns(n_blocks: int, n_segments: int) -> int:
    """Sets of output rows that a block takes in turn: saves block starts where there are many. Changes no sum."""
    return 1 if n_segments > 8 else min(8, max(1, n_blocks // ENOUGH_BLOCKS))


def warps(n_segments: int, n_groups: int) -> int:
    return min(n_segments, 8) * n_groups


@dataclass(frozen=True)
class Product:
    """y = mat[first_row : first_row + n_out] @ x, for one Job."""

    mat: Any
    x: int
    quant: Any  # the twin of x: a Quant record
    y: int
    x_stride: int
    y_stride: int
    first_row: int = 0
    n_out: int = 0
    x_rows: int = 0

    @property
    def rows(self) -> int:
        return self.n_out or int(self.mat["n_out"])


class Sequence:
    """Launch lists of one opened model. `run` is the Run record, `layers` the Layer records."""

    def __init__(self, shape: ModelShape, run: Any, layers: list[Any], gpu: tensor.Gpu) -> None:
        self.shape, self.run, self.layers = shape, run, layers
        self.gpu = gpu
        self.run_bytes = run.tobytes()
        self.layer_bytes = [layer.tobytes() for layer in layers]

    # ------------------------------------------------------------ products

    def _jobs(self, count: int, products: list[Product]) -> Iterator[tuple[str, int, int, bytes]]:
        """(kernel, blocks of outputs, warps, Jobs) for products of one number of inputs, grouped by dtype."""
        products = [p for p in products if not self.on_tensor_cores(p)]
        for dtype in sorted({int(p.mat["dtype"]) for p in products}):
            same = [p for p in products if int(p.mat["dtype"]) == dtype]
            for first in range(0, len(same), MAX_JOBS):
                yield self._job_set(count, same[first : first + MAX_JOBS], DTYPES[dtype])

    def _job_set(self, count: int, products: list[Product], dtype: str) -> tuple[str, int, int, bytes]:
        n, segment, groups = segments(int(products[0].mat["n_in"]))
        is_narrow = dtype in NARROW_DTYPES and sum(p.rows for p in products) <= NARROW
        groups, most_warps = (max(1, 16 // n), 16) if is_narrow else (groups, 8)
        rows = groups * (1 if is_narrow else PRODUCT_ROWS)
        loops = turns(sum(ceil(p.rows, rows) for p in products), n)
        jobs = record(
            JOBS, count=count, n_jobs=len(products), n_segments=n, segment=segment, n_groups=groups, loops=loops
        )
        block = self._fill(jobs, products, rows * loops)
        name = f"product{'1' if is_narrow else ''}_{dtype}"
        return name, block, min(n, most_warps) * groups, jobs.tobytes()

    @staticmethod
    def _fill(jobs: Any, products: list[Product], rows: int) -> int:
        """Writes the jobs of blocks of `rows` outputs; returns the number of blocks."""
        block = 0
        for i, p in enumerate(products):
            job = jobs["job"][i]
            job["mat"], job["x"], job["xq"], job["y"], job["x_rows"] = p.mat, p.x, p.quant, p.y, p.x_rows
            job["x_stride"], job["y_stride"], job["first_row"] = p.x_stride, p.y_stride, p.first_row
            job["n_out"], job["first_block"] = p.rows, block
            block += ceil(p.rows, rows)
        return block

    def on_tensor_cores(self, p: Product) -> bool:
        """Whether the product has an int8 or F16 tensor-core kernel."""
        dtype, n_in = DTYPES[int(p.mat["dtype"])], int(p.mat["n_in"])
        if not self.run["int8"] or n_in % 32 or p.x_stride % 32 or p.first_row % tensor.M_TILE or p.x_rows:
            return False
        return bool(p.quant[{"q": 0, "k": 2, "h": 5}[KINDS[dtype]]]) if dtype in KINDS else False

    def _tensor_products(self, n_rows: int, count: int, products: list[Product], row: int = 0) -> Iterator[Launch]:
        """Tensor-core products of one number of inputs; those of Q8_0 and F16 go together. count 0: of `row` alone."""
        products = [p for p in products if self.on_tensor_cores(p)]
        names = [DTYPES[int(p.mat["dtype"])].replace("F16", "Q8_0") for p in products]
        for dtype in sorted(set(names)):
            same = [p for p, name in zip(products, names, strict=True) if name == dtype]
            for first in range(0, len(same), MAX_JOBS):
                yield self._tensor_launch(n_rows, count, same[first : first + MAX_JOBS], dtype, row)

    def _tensor_launch(self, n_rows: int, count: int, products: list[Product], dtype: str, row: int) -> Launch:
        n, segment = tensor.cut(int(products[0].mat["n_in"]))
        tiles = tensor.tiles_at_once(n_rows)
        n_outputs = sum(ceil(p.rows, tensor.M_TILE) for p in products)
        if tiles < 8:
            found = tensor.dense(self.gpu, dtype, tiles, n_outputs, ceil(n_rows, 8 * tiles), n)
        else:
            halves = any(DTYPES[int(p.mat["dtype"])] == "F16" for p in products)
            found = tensor.Cut(tiles, 8, 1, tensor.wide_shared(dtype, halves=halves))
        jobs = record(JOBS, count=count, n_jobs=len(products), n_segments=n, segment=segment, row=row)
        jobs["n_groups"], jobs["loops"] = found.groups, found.n_warps
        products = sorted(products, key=lambda p: DTYPES[int(p.mat["dtype"])] == "F16")  # those of F16 last
        blocks = self._fill(jobs, products, tensor.M_TILE * found.groups)
        halves = [p for p in products if DTYPES[int(p.mat["dtype"])] == "F16"]
        jobs["n_blocks"] = blocks
        jobs["n_first"] = blocks - sum(ceil(p.rows, tensor.M_TILE * found.groups) for p in halves)
        if tiles < 8:  # blocks take turns: more of them than run at a time only cost starts
            blocks = min(blocks, 4 * self.gpu.multiprocessors)
        name = f"product8_{tiles}_{dtype}"
        arguments = pack_arguments(name, self.run_bytes, jobs.tobytes())
        return Launch(name, (ceil(n_rows, 8 * tiles), blocks), 256, found.shared, arguments)

    def _multiply(self, n_rows: int, products: list[Product], count: int | None = None) -> Iterator[Launch]:
        where = int(self.run["n_rows"]) if count is None else count
        for name, blocks, n_warps, jobs in self._jobs(where, products):
            arguments = pack_arguments(name, self.run_bytes, jobs)
            yield Launch(name, (ceil(n_rows, TILE), blocks), 32 * n_warps, 0, arguments)
        yield from self._tensor_products(n_rows, where, products)

    def multiply_row(self, product: Product, row: int) -> Iterator[Launch]:
        """The reference path's product of one row that has a tensor-core kernel."""
        return self._tensor_products(1, 0, [product], row)

    def reference_jobs(self, product: Product) -> bytes:
        """A Jobs record of one product, for the reference path."""
        return self._job_set(0, [product], DTYPES[int(product.mat["dtype"])])[3]

    def _twin(self, name: str, offset: int = 0) -> tuple[int, ...]:
        """The twin of a work buffer, from channel `offset` of its rows on; zero where there is none or it cannot be cut."""
        q, d, kq, kd, ks, h = (int(at) for at in self.run[f"{name}_q"].tolist())
        block = offset // 32
        if offset % 32:
            return NO_TWIN
        if offset % 256:
            kq = 0
        places = ((q, 256), (d, 32), (kq, 256), (kd, 4), (ks, 64), (h, 512))  # bytes that a block of 32 channels takes
        return tuple(at + block * n_bytes if at else 0 for at, n_bytes in places)

    def mat(self, layer: int, suffix: str) -> Any:
        return self.layers[layer]["mat"][LAYER_MATS.index(suffix)]

    def input_products(self, layer: int) -> list[Product]:
        """Everything that multiplies the attention's input."""
        shape, run, rec = self.shape, self.run, self.layers[layer]
        xn = int(run["xn"])

        def to(suffix: str, y: int, y_stride: int) -> Product:
            return Product(self.mat(layer, suffix), xn, self._twin("xn"), y, shape.hidden, y_stride)

        products = [
            to("attn_q_a.weight", int(run["qr_raw"]), shape.q_lora),
            to("attn_kv.weight", int(run["kv"]), shape.head_dim),
        ]
        if shape.ratios[layer] != SLIDING:
            width, comp = shape.comp_width(layer), int(rec["step_comp"])
            products.append(to("attn_compressor_kv.weight", comp, 2 * width))
            products.append(to("attn_compressor_gate.weight", comp + 4 * width, 2 * width))
        if shape.ratios[layer] == CSA:
            width, comp = 2 * shape.index_dim, int(rec["step_index_comp"])
            products.append(to("indexer_compressor_kv.weight", comp, 2 * width))
            products.append(to("indexer_compressor_gate.weight", comp + 4 * width, 2 * width))
            products.append(to("indexer.proj.weight", int(run["ia"]), shape.index_heads))
        return products

    def query_products(self, layer: int, with_index: bool) -> list[Product]:
        shape, run = self.shape, self.run
        n_q, n_iq = shape.n_heads * shape.head_dim, shape.index_heads * shape.index_dim
        products = [
            Product(
                self.mat(layer, "attn_q_b.weight"), int(run["qr"]), self._twin("qr"), int(run["q"]), shape.q_lora, n_q
            )
        ]
        if with_index:
            mat = self.mat(layer, "indexer.attn_q_b.weight")
            products.append(Product(mat, int(run["qr"]), self._twin("qr"), int(run["iq"]), shape.q_lora, n_iq))
        return products

    def group_products(self, layer: int) -> list[Product]:
        """Heads in order, n_heads / o_groups to a group; each group has its own rows of the first matrix."""
        shape, run = self.shape, self.run
        n_in, n_all = shape.n_heads // shape.o_groups * shape.head_dim, shape.n_heads * shape.head_dim
        mat, low = self.mat(layer, "attn_output_a.weight"), shape.o_groups * shape.o_lora
        return [
            Product(
                mat,
                int(run["q"]) + 4 * g * n_in,
                self._twin("q", g * n_in),
                int(run["low"]) + 4 * g * shape.o_lora,
                n_all,
                low,
                g * shape.o_lora,
                shape.o_lora,
            )
            for g in range(shape.o_groups)
        ]

    def output_product(self, layer: int) -> list[Product]:
        shape, run = self.shape, self.run
        low = shape.o_groups * shape.o_lora
        mat = self.mat(layer, "attn_output_b.weight")
        return [Product(mat, int(run["low"]), self._twin("low"), int(run["y"]), low, shape.hidden)]

    def shared_products(self, layer: int) -> list[Product]:
        """Gate and up of the shared expert as products like any other, if tensor cores run them; quantize_act does the rest."""
        shape, run = self.shape, self.run
        if not any(self._twin("act")) or shape.ffn_width % 32:
            return []
        products = [
            Product(self.mat(layer, f"ffn_{name}_shexp.weight"), int(run["xn"]), self._twin("xn"), int(run[name]), shape.hidden, shape.ffn_width)
            for name in ("gate", "up")
        ]
        return products if all(self.on_tensor_cores(p) for p in products) else []

    def router_product(self, layer: int) -> list[Product]:
        shape, run = self.shape, self.run
        mat = self.mat(layer, "ffn_gate_inp.weight")
        return [Product(mat, int(run["xn"]), self._twin("xn"), int(run["router"]), shape.hidden, shape.n_experts)]

    def head_product(self) -> Product:
        shape, run = self.shape, self.run
        return Product(run["output"], int(run["xn"]), self._twin("xn"), int(run["logits"]), shape.hidden, shape.vocab)

    # ------------------------------------------------------------ small operations, for the rows [row0, row0 + n)

    def _small(self, name: str, grid: tuple[int, ...], block: int, *values: Any, shared: int = 0) -> Launch:
        return Launch(name, grid, block, shared, pack_arguments(name, self.run_bytes, *values))

    def _project(self, before: str, fn: Any, row0: int, n: int) -> Launch:
        """Streams after `before`, and the sums that the sub-layer of `fn` needs."""
        tile = min(max(n // 4, 1), 32)  # enough blocks for a GPU; many rows share the weights that a block has read
        parts = ceil(self.shape.hidden, PART) + (before == "start")
        shared = 4 * PART * self.shape.n_streams * (int(fn["n_out"]) + 8)
        return self._small(f"project_{before}", (ceil(n, tile), parts), 256, fn.tobytes(), row0, tile, shared=shared)

    def start(self, row0: int, n: int) -> Launch:
        return self._project("start", self.mat(0, "hc_attn_fn.weight"), row0, n)

    def update(self, layer: int, row0: int, n: int) -> Launch:
        """The attention's output goes into the streams."""
        return self._project("attention", self.mat(layer, "hc_ffn_fn.weight"), row0, n)

    def combine(self, layer: int, row0: int, n: int) -> Launch:
        """The experts' outputs are added up and go into the streams."""
        last = layer + 1 == self.shape.n_layers
        fn = self.run["output_hc"] if last else self.mat(layer + 1, "hc_attn_fn.weight")
        return self._project("experts", fn, row0, n)

    def _slices(self, n: int) -> tuple[int, int]:
        """(number, channels) of the slices of a row that blocks mix: many of them for few rows. Changes no sum."""
        hidden = self.shape.hidden
        channels = 256 * ceil(hidden, 256 * max(1, ENOUGH_BLOCKS // (2 * n) - 1))  # two blocks per multiprocessor
        return ceil(hidden, channels), channels

    def mix(self, layer: int, row0: int, n: int, is_ffn: int) -> Launch:
        count, channels = self._slices(n)
        return self._small("mix_streams", (n, count + 1), 256, self.layer_bytes[layer], row0, is_ffn, channels)

    def mix_head(self, j0: int, n: int) -> Launch:
        count, channels = self._slices(n)
        return self._small("mix_head", (n, count), 256, j0, channels)

    def store(self, layer: int, row0: int, n: int) -> Launch:
        """qr, latent rows, and the entries and index keys of rows that end a window."""
        shape, ratio = self.shape, self.shape.ratios[layer]
        roles, room = 2, shape.head_dim
        if ratio != SLIDING:
            roles = 4 if ratio == CSA else 3
            room = (1 + 3 * SLICES) * max(shape.head_dim, shape.index_dim)
        return self._small("store_rows", (n, roles), 512, self.layer_bytes[layer], row0, shared=4 * room)

    @property
    def attends_on_tensor_cores(self) -> bool:
        """As attends8 in common.cuh."""
        return bool(self.run["int8"]) and self.shape.head_dim % 8 == 0

    def finish_queries(self, layer: int, row0: int, n: int, with_index: bool) -> Iterator[Launch]:
        """Attention on tensor cores finishes its own queries."""
        shape = self.shape
        heads = (0 if self.attends_on_tensor_cores else shape.n_heads) + with_index * shape.index_heads
        if heads:
            room = 4 * max(shape.head_dim, shape.index_dim)
            yield self._small("finish_queries", (n, heads), 128, self.layer_bytes[layer], row0, shared=room)

    def select(self, row0: int, n: int) -> Launch:
        return self._small("select_entries", (n,), 1024, row0)

    def route(self, layer: int, row0: int, n: int) -> Launch:
        warps = min(n, 8)
        return self._small("route_rows", (ceil(n, warps),), 32 * warps, self.layer_bytes[layer], row0)

    def route_and_group(self, layer: int, n: int, tile: int) -> Iterator[Launch]:
        """Choice of experts for all rows, and tiles of at most `tile` pairs of one expert."""
        shape = self.shape
        if n <= FEW_ROWS:
            room = 8 * n * shape.n_experts_used
            yield self._small("route_group", (1,), 32 * n, self.layer_bytes[layer], tile, shared=room)
        else:
            yield self.route(layer, 0, n)
            yield self._small("group_pairs", (1,), 1024, tile, shared=4 * shape.n_experts)

    def quantize_low(self, row0: int, n: int) -> Iterator[Launch]:
        n_in = self.shape.o_groups * self.shape.o_lora
        if any(self._twin("low")) and n_in % 32 == 0:
            yield self._small("quantize_low", (n, ceil(n_in, 1024)), 128, row0)

    def quantize_act(self, layer: int, row0: int, n: int) -> Iterator[Launch]:
        shape = self.shape
        if any(self._twin("act")) and shape.ffn_width % 32 == 0:
            grid = (n, shape.n_experts_used + 1, ceil(shape.ffn_width, 1024))
            is_raw = bool(self.shared_products(layer))
            yield self._small("quantize_act", grid, 128, self.layer_bytes[layer], row0, is_raw)

    def publish(self, n_rows: int, layers: int) -> Launch:
        return self._small("publish_rows", (n_rows, self.shape.n_layers), 256, layers)

    # ------------------------------------------------------------ the shared path

    def needs_index(self, layer: int, n_tokens: int) -> bool:
        return self.shape.ratios[layer] == CSA and n_tokens // CSA > self.shape.index_top_k

    def shared(self, bucket: Bucket) -> Iterator[Launch]:
        yield self.start(0, bucket.n_rows)
        for layer in range(self.shape.n_layers):
            yield from self._attention(layer, bucket)
            yield from self._experts(layer, bucket)
        n = bucket.n_logit_rows
        if n:
            yield self.mix_head(0, n)
            yield from self._multiply(n, [self.head_product()], int(self.run["n_logit_rows"]))

    def _attention(self, layer: int, bucket: Bucket) -> Iterator[Launch]:
        n, with_index = bucket.n_rows, self.needs_index(layer, bucket.n_tokens)
        yield self.mix(layer, 0, n, 0)
        yield from self._multiply(n, self.input_products(layer))
        yield self.store(layer, 0, n)
        yield from self._multiply(n, self.query_products(layer, with_index))
        yield from self.finish_queries(layer, 0, n, with_index)
        if with_index:
            yield self.score(layer, 0, n, bucket.n_tokens)
            yield self.select(0, n)
        yield from self._attend(layer, bucket)
        yield from self._multiply(n, self.group_products(layer))
        yield from self.quantize_low(0, n)
        yield from self._multiply(n, self.output_product(layer))
        yield self.update(layer, 0, n)

    @property
    def scores_on_tensor_cores(self) -> bool:
        return bool(self.run["int8"]) and self.shape.index_dim <= 128 and self.shape.index_heads <= 128

    def score(self, layer: int, row0: int, n: int, n_tokens: int) -> Launch:
        """Index scores; a reference row has this kernel only where tensor cores compute them."""
        shape, rec, groups = self.shape, self.layer_bytes[layer], ceil(self.shape.index_heads, 16)
        if self.scores_on_tensor_cores:  # enough blocks for the GPU: those of many entries share a row's queries
            blocks = min(ceil(n_tokens // CSA, 8), ceil(4 * self.gpu.multiprocessors, n))
            return self._small("score8", (n, blocks), 32 * groups, rec, row0)
        shared = 4 * (shape.index_heads * shape.index_dim + 64 * groups)
        grid = (n, ceil(n_tokens // CSA, 64))
        return self._small("score_entries", grid, 64 * groups, rec, row0, shared=shared)

    def _visible(self, layer: int, n_tokens: int) -> int:
        """Most rows that one row of this layer attends to."""
        shape, ratio = self.shape, self.shape.ratios[layer]
        visible = min(n_tokens, shape.window)
        if ratio == CSA:
            visible += min(n_tokens // CSA, shape.index_top_k)
        elif ratio == HCA:
            visible += n_tokens // HCA
        assert visible <= max_visible(shape, n_tokens)
        return visible

    def _attend(self, layer: int, bucket: Bucket) -> Iterator[Launch]:
        if self.attends_on_tensor_cores:
            yield from self.tensor_attend(layer, 0, bucket.n_rows, bucket.n_tokens)
            return
        shape, at_a_time, rec = self.shape, int(self.run["attend_rows"]), self.layer_bytes[layer]
        splits, name = ceil(self._visible(layer, bucket.n_tokens), KEYS), f"attend_{ceil(shape.head_dim, 128)}"
        for row0 in range(0, bucket.n_rows, at_a_time):
            n = min(at_a_time, bucket.n_rows - row0)
            yield self._small(name, (n, ceil(shape.n_heads, 4), splits), 256, rec, row0)
            yield self._small("join_blocks", (n, shape.n_heads), 128, rec, row0, shared=4 * shape.head_dim)

    def tensor_attend(self, layer: int, first_row: int, n_rows: int, n_tokens: int) -> Iterator[Launch]:
        """Queries before their norm -> attention output. How the work is cut changes no sum."""
        shape, at_a_time, rec = self.shape, int(self.run["attend_rows"]), self.layer_bytes[layer]
        keys, parts = tensor.attend_bytes(shape.head_dim)
        groups = ceil(shape.n_heads, 32)
        if n_rows * groups >= 2 * self.gpu.multiprocessors and 2 * keys + 2 * parts <= self.gpu.room:
            shared = 2 * keys + 2 * parts
            yield self._small("attend8_all", (n_rows, groups), 256, rec, first_row, shared=shared)
            return
        splits = ceil(self._visible(layer, n_tokens), KEYS8)
        for done in range(0, n_rows, at_a_time):
            n, row0 = min(at_a_time, n_rows - done), first_row + done
            half = n * groups * splits < self.gpu.multiprocessors or keys + 2 * parts > self.gpu.room
            name, heads = ("attend8_16", 16) if half else ("attend8_32", 32)
            grid, shared = (n, ceil(shape.n_heads, heads), splits), keys + parts * heads // 16
            yield self._small(name, grid, 256, rec, row0, shared=shared)
            yield self._small("join8", (n, shape.n_heads), 128, rec, row0, shared=4 * shape.head_dim)

    def _experts(self, layer: int, bucket: Bucket) -> Iterator[Launch]:
        n, shape = bucket.n_rows, self.shape
        yield self.mix(layer, 0, n, 1)
        yield from self._multiply(n, self.router_product(layer) + self.shared_products(layer))
        tile_rows = self._tile_rows(layer, n)
        yield from self.route_and_group(layer, n, tile_rows)
        yield from self._expert("gate_up", layer, n, tile_rows)
        yield from self.quantize_act(layer, 0, n)
        yield from self._expert("down", layer, n, tile_rows)
        yield self.combine(layer, 0, n)

    def _tile_rows(self, layer: int, n_rows: int) -> int:
        """Pairs per tile of the routed experts: many only where every kernel of the layer takes them."""
        both = all(self.expert_on_tensor_cores(kind, layer, 0) for kind in ("gate_up", "down"))
        if n_rows <= tensor.FEW_EXPERT_ROWS:
            return 4
        return tensor.EXPERT_WIDE if both and n_rows > tensor.DIRECT_EXPERT_ROWS else TILE

    def expert_mat(self, kind: str, layer: int, shared: int) -> Any:
        return self.mat(layer, f"ffn_{'gate' if kind == 'gate_up' else 'down'}_{'shexp' if shared else 'exps'}.weight")

    def expert_on_tensor_cores(self, kind: str, layer: int, shared: int) -> bool:
        mat = self.expert_mat(kind, layer, shared)
        is_int8 = DTYPES[int(mat["dtype"])] in INT8_DTYPES
        return bool(self.run["int8"]) and is_int8 and not int(mat["n_in"]) % 32 and not int(mat["n_out"]) % tensor.M_TILE

    def _expert(self, kind: str, layer: int, n_rows: int, tile_rows: int) -> Iterator[Launch]:
        for shared in (0, 1):
            if shared and kind == "gate_up" and self.shared_products(layer):
                continue
            if self.expert_on_tensor_cores(kind, layer, shared):
                yield self.tensor_expert(kind, layer, shared, n_rows, tile_rows)
            else:
                yield self._float_expert(kind, layer, shared, n_rows, tile_rows)

    def _float_expert(self, kind: str, layer: int, shared: int, n_rows: int, tile_rows: int) -> Launch:
        mat = self.expert_mat(kind, layer, shared)
        tiles = ceil(n_rows, TILE) if shared else max_tiles(self.shape, n_rows, tile_rows)
        n, segment, groups = segments(int(mat["n_in"]))
        dtype, rows = DTYPES[int(mat["dtype"])], GATE_UP_ROWS if kind == "gate_up" else DOWN_ROWS
        blocks = ceil(int(mat["n_out"]), groups * rows)
        loops = turns(blocks * min(tiles, 8), n)
        values = (self.layer_bytes[layer], shared, n, segment, groups, loops)
        return self._small(f"{kind}_{dtype}", (tiles, ceil(blocks, loops)), 32 * warps(n, groups), *values)

    def tensor_expert(self, kind: str, layer: int, shared: int, n_rows: int, tile_rows: int, row: int = -1) -> Launch:
        """Gate and up, or down, of the routed or the shared expert; row >= 0: of that row alone."""
        mat, is_pair = self.expert_mat(kind, layer, shared), kind == "gate_up"
        dtype, (n, segment) = DTYPES[int(mat["dtype"])], tensor.cut(int(mat["n_in"]))
        if shared:
            at_once = tensor.tiles_at_once(n_rows)
            tile_rows = tensor.EXPERT_WIDE if at_once == 8 else 8 * at_once
            tiles = ceil(n_rows, tile_rows)
        else:
            at_once, tiles = 8 if tile_rows > 8 else tile_rows // 8, max_tiles(self.shape, n_rows, tile_rows)
        outputs, name = ceil(int(mat["n_out"]), tensor.M_TILE), f"{kind}8_{at_once}_{dtype}"
        if at_once == 8:
            shared_bytes = tensor.wide_shared(dtype, tensor.EXPERT_WIDE)
            found = tensor.Cut(8, 6, 1, shared_bytes, 384) if is_pair else tensor.Cut(8, 8, 1, shared_bytes, 256)
            grid: tuple[int, ...] = (tiles, ceil(outputs, found.groups))
        else:
            n_tiles, enough = min(tiles, self.shape.n_experts), 6000 if is_pair else 1500
            found = tensor.experts(self.gpu, dtype, at_once, 2 if is_pair else 1, mat, n_tiles, enough)
            blocks = 2 * self.gpu.multiprocessors
            grid = (min(tiles * ceil(outputs, found.groups), blocks),)
        values = (self.layer_bytes[layer], shared, tile_rows, row, n, segment, found.groups, found.n_warps)
        return self._small(name, grid, found.threads, *values, shared=found.shared)
