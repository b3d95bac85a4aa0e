"""Matrix products and experts of a step as launches: which kernel, how cut, with which arguments. Runs nothing.

A launch is (kernel, grid, block, shared bytes, packed arguments).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ds4.plugin import CSA, SLIDING, ModelShape
from ds4_cuda import tensor
from ds4_cuda.kernels import pack_arguments
from ds4_cuda.records import DTYPES, INT8_DTYPES, JOBS, LAYER_MATS, MAX_JOBS, NARROW_DTYPES, record
from ds4_cuda.work import FEW_ROWS, KINDS, TILE, ceil, max_tiles

PRODUCT_ROWS, GATE_UP_ROWS, DOWN_ROWS = 4, 2, 4  # weight rows per warp of the float kernels


@dataclass(frozen=True)
class Launch:
    name: str
    grid: tuple[int, ...]
    block: int
    shared: int
    arguments: bytes


def segments(n_in: int) -> tuple[int, int, int]:
    """(segments of K, inputs per segment, output groups per block): functions of the matrix alone."""
    segment = 1024 * ceil(n_in, 32 * 1024)
    n = ceil(n_in, segment)
    return n, segment, max(1, 8 // n)


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
    channel: int = -1  # of y's first output in the rows of y's twin, if that can be made with the product

    @property
    def rows(self) -> int:
        return self.n_out or int(self.mat["n_out"])


class Products:
    """Products of one opened model. `run` is the Run record, `layers` the Layer records."""

    def __init__(self, shape: ModelShape, run: Any, layers: list[Any], gpu: tensor.Gpu) -> None:
        self.shape, self.run, self.layers = shape, run, layers
        self.gpu = gpu
        self.run_bytes = run.tobytes()
        self.layer_bytes = [layer.tobytes() for layer in layers]

    def small(self, name: str, grid: tuple[int, ...], block: int, *values: Any, shared: int = 0) -> Launch:
        return Launch(name, grid, block, shared, pack_arguments(name, self.run_bytes, *values))

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
            job["mat"], job["x"], job["xq"], job["y"], job["channel"] = p.mat, p.x, p.quant, p.y, p.channel
            job["x_stride"], job["y_stride"], job["first_row"] = p.x_stride, p.y_stride, p.first_row
            job["n_out"], job["first_block"] = p.rows, block
            block += ceil(p.rows, rows)
        return block

    def on_tensor_cores(self, p: Product) -> bool:
        """Whether the product has an int8 or F16 tensor-core kernel."""
        dtype, n_in = DTYPES[int(p.mat["dtype"])], int(p.mat["n_in"])
        if not self.run["int8"] or n_in % 32 or p.x_stride % 32 or p.first_row % tensor.M_TILE:
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
        found, jobs, blocks = self._tensor_jobs(n_rows, count, products, dtype, row)
        name = f"product8_{found.tiles}_{dtype}"
        arguments = pack_arguments(name, self.run_bytes, jobs)
        return Launch(name, (ceil(n_rows, 8 * found.tiles), blocks), 256, found.shared, arguments)

    def _tensor_jobs(
        self, n_rows: int, count: int, products: list[Product], dtype: str, row: int = 0
    ) -> tuple[tensor.Cut, bytes, int]:
        """How the products are cut, their Jobs, and the number of blocks."""
        n, segment = tensor.cut(int(products[0].mat["n_in"]))
        tiles = tensor.tiles_at_once(n_rows)
        n_outputs = sum(ceil(p.rows, tensor.M_TILE) for p in products)
        halves = [p for p in products if DTYPES[int(p.mat["dtype"])] == "F16"]
        products = [p for p in products if DTYPES[int(p.mat["dtype"])] != "F16"] + halves
        if tiles < 8:
            found = tensor.dense(self.gpu, dtype, tiles, n_outputs, ceil(n_rows, 8 * tiles), n)
        else:
            found = tensor.Cut(tiles, 8, 1, tensor.wide_shared(dtype, halves=bool(halves)))
        jobs = record(JOBS, count=count, n_jobs=len(products), n_segments=n, segment=segment, row=row)
        jobs["n_groups"], jobs["loops"] = found.groups, found.n_warps
        blocks = self._fill(jobs, products, tensor.M_TILE * found.groups)
        jobs["n_blocks"] = blocks
        jobs["n_first"] = blocks - sum(ceil(p.rows, tensor.M_TILE * found.groups) for p in halves)
        if self._makes_twin(found, products):
            jobs["twin_q"], jobs["twin_d"] = self.run["low_q"]["q"], self.run["low_q"]["d"]
            jobs["channels"] = products[0].y_stride
        if tiles < 8:  # blocks take turns: more of them than run at a time only cost starts
            blocks = min(blocks, 4 * self.gpu.multiprocessors)
        return found, jobs.tobytes(), blocks

    def choice_bytes(self, warps: int) -> int:
        """Shared memory of warps that choose a row's experts each."""
        return 8 * self.shape.n_experts * warps

    def _makes_twin(self, found: tensor.Cut, products: list[Product]) -> bool:
        """Whether a block has 32 neighbouring outputs, and finds their scale."""
        return (
            all(p.channel >= 0 and p.channel % 32 == 0 and p.rows % 32 == 0 for p in products)
            and found.tiles < 8
            and (found.groups, found.threads) == (2, 256)
            and found.n_warps > 1
        )

    def makes_low_twin(self, layer: int, n_rows: int) -> bool:
        """Whether the launch of group_products writes the whole twin of `low`."""
        products = self.group_products(layer)
        if len(products) > MAX_JOBS or not all(self.on_tensor_cores(p) for p in products):
            return False
        dtypes = {DTYPES[int(p.mat["dtype"])].replace("F16", "Q8_0") for p in products}
        return len(dtypes) == 1 and self._makes_twin(self._tensor_jobs(n_rows, 0, products, dtypes.pop())[0], products)

    def routes_beside_products(self, layer: int, n_rows: int) -> bool:
        """Whether a block of the shared expert's products can route the rows."""
        dtypes = {DTYPES[int(p.mat["dtype"])] for p in self.shared_products(layer)}
        return n_rows <= FEW_ROWS and bool(dtypes) and dtypes <= {"Q8_0", "F16"}

    def route_beside_products(self, layer: int, n_rows: int, tile_rows: int) -> Launch:
        """Gate and up of the shared expert; meanwhile a block routes the rows and groups them by expert."""
        n_pairs = n_rows * self.shape.n_experts_used
        found, jobs, blocks = self._tensor_jobs(n_rows, int(self.run["n_rows"]), self.shared_products(layer), "Q8_0")
        shared = max(found.shared, 12 * n_pairs + self.choice_bytes(tensor.WARPS))
        return self.small(
            f"route8_{found.tiles}",
            (1, blocks + 1),
            256,
            self.layer_bytes[layer],
            jobs,
            tile_rows,
            n_pairs,
            shared=shared,
        )

    def multiply(self, n_rows: int, products: list[Product], count: int | None = None) -> Iterator[Launch]:
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
        """The twin of a work buffer from channel `offset` of its rows on, or after so many channels of whole tiles of
        rows; zero where there is none."""
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
        q, _, kq, _, _, h = (int(at) for at in run["low_q"].tolist())
        makes_twin = bool(q) and not kq and not h
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
                g * shape.o_lora if makes_twin else -1,
            )
            for g in range(shape.o_groups)
        ]

    def output_product(self, layer: int) -> list[Product]:
        shape, run = self.shape, self.run
        low = shape.o_groups * shape.o_lora
        mat = self.mat(layer, "attn_output_b.weight")
        return [Product(mat, int(run["low"]), self._twin("low"), int(run["y"]), low, shape.hidden)]

    def shared_products(self, layer: int) -> list[Product]:
        """Gate and up of the shared expert as plain products, if tensor cores run them; quantize_act does the rest."""
        shape, run = self.shape, self.run
        if not any(self._twin("act")) or shape.ffn_width % 32:
            return []
        xn, width = int(run["xn"]), shape.ffn_width
        mats = {name: self.mat(layer, f"ffn_{name}_shexp.weight") for name in ("gate", "up")}
        products = [
            Product(mat, xn, self._twin("xn"), int(run[name]), shape.hidden, width) for name, mat in mats.items()
        ]
        return products if all(self.on_tensor_cores(p) for p in products) else []

    def shared_down(self, layer: int) -> list[Product]:
        """Down of the shared expert as a plain product, if its input is made for one. Its rows lie behind all pairs."""
        shape, run, mat = self.shape, self.run, self.mat(layer, "ffn_down_shexp.weight")
        if not self.shared_products(layer):
            return []
        first = int(run["max_rows"]) * shape.n_experts_used
        twin = self._twin("act", first // TILE * shape.ffn_width)
        act, out = (
            int(run[name]) + 4 * first * n for name, n in (("act", shape.ffn_width), ("expert_out", shape.hidden))
        )
        product = Product(mat, act, twin, out, shape.ffn_width, shape.hidden)
        return [product] if self.on_tensor_cores(product) else []

    def router_product(self, layer: int) -> list[Product]:
        shape, run = self.shape, self.run
        mat = self.mat(layer, "ffn_gate_inp.weight")
        return [Product(mat, int(run["xn"]), self._twin("xn"), int(run["router"]), shape.hidden, shape.n_experts)]

    def head_product(self) -> Product:
        shape, run = self.shape, self.run
        return Product(run["output"], int(run["xn"]), self._twin("xn"), int(run["logits"]), shape.hidden, shape.vocab)

    # ------------------------------------------------------------ experts

    def tile_rows(self, layer: int, n_rows: int) -> int:
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
        return (
            bool(self.run["int8"]) and is_int8 and not int(mat["n_in"]) % 32 and not int(mat["n_out"]) % tensor.M_TILE
        )

    def experts(self, kind: str, layer: int, n_rows: int, tile_rows: int) -> Iterator[Launch]:
        for shared in (0, 1):
            if shared and (self.shared_products(layer) if kind == "gate_up" else self.shared_down(layer)):
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
        return self.small(f"{kind}_{dtype}", (tiles, ceil(blocks, loops)), 32 * warps(n, groups), *values)

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
        return self.small(name, grid, found.threads, *values, shared=found.shared)
