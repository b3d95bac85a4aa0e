"""The backend: is there a GPU, what would opening take, and opening. Drivers load in `probe` and `open` only."""

from __future__ import annotations

from typing import Any

from ds4.plugin import (
    CSA,
    HCA,
    SLIDING,
    Backend,
    BackendUnavailableError,
    CacheLayout,
    Limits,
    MemoryPlan,
    MemoryPlanError,
    Options,
    Probe,
    Runner,
    UnsupportedModelError,
)
from ds4_cuda.device import MIN_CAPABILITY, Device, find_devices, load_driver
from ds4_cuda.work import make_plan

MAX_STREAMS = 5  # the matrix C of the streams is worked on by one warp, an entry per lane
MAX_HEAD = 512
MAX_EXPERTS = 512  # a warp routes a row, 16 experts to a lane
MAX_USED = 32
MAX_SHARED = 48 * 1024


def check_shape(model: Any) -> None:
    """Raises UnsupportedModelError for a shape that the kernels cannot run."""
    shape = model.shape
    csa = CSA in shape.ratios
    index = 4 * (shape.index_heads * shape.index_dim + 64 * -(-shape.index_heads // 16))
    problems = {
        "compress_ratios": set(shape.ratios) - {SLIDING, CSA, HCA} and "must be 0, 4 or 128",
        "hyper_connection.count": not 1 <= shape.n_streams <= MAX_STREAMS and f"must be 1 to {MAX_STREAMS}",
        "embedding_length": shape.hidden % 2 and "must be even",
        "attention.key_length": (shape.head_dim % 4 or shape.head_dim > MAX_HEAD)
        and f"must be a multiple of 4, at most {MAX_HEAD}",
        "rope.dimension_count": (shape.rope_dim % 2 or shape.rope_dim > shape.head_dim)
        and "must be even and within a head",
        "output_group_count": shape.n_heads % shape.o_groups and "must divide head_count",
        "expert_count": shape.n_experts > MAX_EXPERTS and f"must be at most {MAX_EXPERTS}",
        "expert_used_count": shape.n_experts_used > MAX_USED and f"must be at most {MAX_USED}",
        "attention.indexer": csa
        and (
            shape.index_dim % 4
            or not shape.rope_dim <= shape.index_dim <= MAX_HEAD
            or shape.index_heads > 256
            or index > MAX_SHARED
        )
        and "has sizes that the kernels do not take",
    }
    for where, problem in problems.items():
        if problem:
            raise UnsupportedModelError(
                f"the cuda backend cannot run this model: {where} {problem}", file=str(model.path), where=where
            )


class CudaBackend(Backend):
    """NVIDIA GPUs of compute capability 8.0 and newer; a model on one GPU."""

    name = "cuda"
    api_version = 1  # the version of the plugin API that this was written for
    priority = 100

    def __init__(self, driver: Any = None) -> None:
        """`driver`: what stands in for pycuda.driver in tests."""
        self._driver = driver

    def probe(self) -> Probe:
        try:
            driver = self._driver or load_driver()
            devices = find_devices(driver)
        except BackendUnavailableError as exc:
            return Probe(False, exc.message)
        name, capability, _ = devices[0]
        if capability < MIN_CAPABILITY:
            reason = f"{name} has compute capability {capability[0]}.{capability[1]}; the kernels need 8.0 or newer"
            return Probe(False, reason)
        shown = tuple(f"{name}, {n_bytes / 2**30:.0f} GiB, compute {c[0]}.{c[1]}" for name, c, n_bytes in devices)
        return Probe(True, devices=shown)

    def _layout(self, model: Any, limits: Limits, options: Options) -> CacheLayout:
        return CacheLayout.build(model.shape, rewind=limits.rewind, cache_dtype=options.cache_dtype)

    def memory_plan(self, model: Any, limits: Limits, options: Options) -> MemoryPlan:
        check_shape(model)
        try:
            available = find_devices(self._driver or load_driver())[0][2]
        except BackendUnavailableError:
            available = None
        return make_plan(
            model, model.shape, limits, self._layout(model, limits, options), available, int8=not options.exact
        )

    def open(self, model: Any, limits: Limits, options: Options) -> Runner:
        from ds4_cuda.runner import CudaRunner

        check_shape(model)
        layout = self._layout(model, limits, options)
        device = Device(0, self._driver)
        try:
            free, _ = device.run("reading free memory", device.driver.mem_get_info)
            plan = make_plan(model, model.shape, limits, layout, free, int8=not options.exact)
            if plan.total > free:
                raise MemoryPlanError(
                    f"the GPU has not enough free memory: {plan}. Use fewer sessions, pages or max_rows, a smaller "
                    "context, or stop other programs on it",
                    needed=plan.total,
                    available=free,
                )
            return CudaRunner(device, model, limits, options, layout)
        except BaseException:
            device.close()
            raise
