"""Kernels: compiled for the present GPU with nvcc, or NVRTC where there is none, and kept on disk.

A compiled file is named by a hash of all sources, the architecture, the options and the compiler's version: an edited
kernel or another compiler makes a new one. Knows the signature of every kernel and no order of launches.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ds4.plugin import BackendError
from ds4_cuda.device import cuda_version
from ds4_cuda.records import DTYPES, INT8_DTYPES, NARROW_DTYPES, RECORD_SIZES
from ds4_cuda.tensor import Gpu, is_large
from ds4_cuda.work import TILED

OPTIONS = ("-O3", "-fmad=false", "--std=c++17")
"""No contraction: fused operations are written where they are meant, so every kernel rounds alike."""

SIGNATURES: Mapping[str, tuple[str, str]] = {
    **{f"project_{before}": ("project", "RMii") for before in ("start", "attention", "experts")},
    "mix_streams": ("hyper", "RLiii"),
    "mix_head": ("hyper", "Rii"),
    "store_rows": ("store", "RLi"),
    "finish_queries": ("attention", "RLi"),
    **{f"attend_{parts}": ("attention", "RLi") for parts in (1, 2, 3, 4)},
    "join_blocks": ("attention", "RLi"),
    **{f"attend8_{heads}": ("attend8", "RLi") for heads in ("16", "32", "all")},
    "join8": ("attend8", "RLi"),
    "score_entries": ("indexer", "RLi"),
    "score8": ("indexer", "RLi"),
    "select_entries": ("select", "Ri"),
    **{f"product_{dtype}": ("matmul", "RJ") for dtype in DTYPES},
    **{f"product8_{tiles}_{dtype}": ("product8", "RJ") for tiles in (1, 2, 4, 8) for dtype in INT8_DTYPES},
    **{f"route8_{tiles}": ("product8", "RLJii") for tiles in (1, 2, 4)},
    **{f"product1_{dtype}": ("matmul", "RJ") for dtype in NARROW_DTYPES},
    "quantize_low": ("quantize", "Ri"),
    "quantize_act": ("quantize", "RLii"),
    "route_rows": ("moe", "RLi"),
    "route_group": ("moe", "RLi"),
    "group_pairs": ("moe", "Ri"),
    **{f"gate_up_{dtype}": ("experts", "RLiiiii") for dtype in DTYPES},
    **{f"down_{dtype}": ("experts", "RLiiiii") for dtype in DTYPES},
    **{
        f"{kind}8_{tiles}_{dtype}": ("experts8", "RLiiiiiii")
        for kind in ("gate_up", "down")
        for tiles in (0, 1, 2, 4, 8)
        for dtype in INT8_DTYPES
    },
    "publish_rows": ("publish", "RP"),
    **{name: ("repack", "PPPqqq") for name in (tiled.kernel for tiled in TILED.values())},
    "product_simple": ("fallback", "RJiii"),
    "gate_up_simple": ("fallback", "RLiii"),
    "down_simple": ("fallback", "RLiii"),
    "score_simple": ("fallback", "RLi"),
    "attend_simple": ("fallback", "RLi"),
}
"""Kernel -> (source file, parameters): R, L, M, J are records; P a pointer, i int32, q int64."""

RECORDS = {"R": "Run", "L": "Layer", "M": "Mat", "J": "Jobs"}


def argument_format(parameters: str) -> str:
    """The struct format of a kernel's parameters."""
    return "".join(f"{RECORD_SIZES[RECORDS[p]]}s" if p in RECORDS else p for p in parameters)


def argument_offsets(name: str) -> list[int]:
    """Where each parameter begins in a kernel's packed arguments."""
    parameters = SIGNATURES[name][1]
    ends = (struct.calcsize(argument_format(parameters[: i + 1])) for i in range(len(parameters)))
    return [end - struct.calcsize(argument_format(p)) for end, p in zip(ends, parameters, strict=True)]


def pack_arguments(name: str, *values: Any) -> bytes:
    """A kernel's parameters as it reads them. Raises struct.error when they do not fit its signature."""
    return struct.pack(argument_format(SIGNATURES[name][1]), *values)


def source_folder() -> Path:
    """The kernel sources: inside an installed package, or cuda/ of the repository."""
    here = Path(__file__).resolve().parent
    for folder in (here / "kernels", *(parent / "cuda" for parent in here.parents[1:3])):
        if (folder / "records.cuh").is_file():
            return folder
    raise BackendError("the kernel sources of ds4-cuda are missing; install the package again", backend="cuda")


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "ds4" / "cuda"


def find_nvcc() -> str | None:
    """Path of a CUDA compiler, None when there is none."""
    places = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    paths = [shutil.which("nvcc"), *(str(Path(place) / "bin" / "nvcc") for place in places if place)]
    return next((path for path in paths if path and os.access(path, os.X_OK)), None)


STATIC_SHARED = 1024
"""Bytes of shared memory that no kernel's fixed part exceeds where it also asks for a variable one near the limit."""


def defines(arch: str = "90") -> list[str]:
    """What the sources are told: the sizes of the records and of rings."""
    gpu = Gpu(is_large=is_large(arch))
    return [f"-DDS4_{name.upper()}_BYTES={size}" for name, size in RECORD_SIZES.items()] + [f"-DDS4_RING={gpu.ring}"]


class Nvcc:
    def __init__(self, path: str) -> None:
        self.path = path
        self.version = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout.strip()

    def compile(self, source: Path, arch: str) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out.cubin"
            command = [self.path, "-cubin", f"-arch=sm_{arch}", *OPTIONS, *defines(arch), "-o", str(out), str(source)]
            done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
            if done.returncode:
                raise BackendError(f"nvcc cannot compile {source.name}: {done.stderr.strip()[-2000:]}", backend="cuda")
            return out.read_bytes()


class Nvrtc:
    """The run-time compiler, through cuda.bindings."""

    def __init__(self, api: Any) -> None:
        self.api = api
        self.version = f"nvrtc {api.nvrtcVersion()[1:]}"

    def compile(self, source: Path, arch: str) -> bytes:
        api = self.api
        program = self._ok(api.nvrtcCreateProgram(source.read_bytes(), source.name.encode(), 0, None, None))
        options = [f"--gpu-architecture=sm_{arch}", *OPTIONS[1:], *defines(arch)]
        options += [f"-I{folder}" for folder in (source.parent, *include_folders())]
        (status,) = api.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
        if int(status):
            log = bytearray(self._ok(api.nvrtcGetProgramLogSize(program)))
            api.nvrtcGetProgramLog(program, log)
            raise BackendError(f"NVRTC cannot compile {source.name}: {bytes(log).decode()[-2000:]}", backend="cuda")
        cubin = bytearray(self._ok(api.nvrtcGetCUBINSize(program)))
        api.nvrtcGetCUBIN(program, cubin)
        api.nvrtcDestroyProgram(program)
        return bytes(cubin)

    def _ok(self, answer: tuple[Any, ...]) -> Any:
        if int(answer[0]):
            raise BackendError(f"NVRTC failed: {answer[0]}", backend="cuda")
        return answer[1]


def include_folders() -> list[Path]:
    """Where cuda_fp16.h may be: toolkits and the header wheels."""
    import sysconfig

    site = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    places = [site / "cu13" / "include", site / "cuda_runtime" / "include", site / "cuda_cccl" / "include"]
    places += [Path(p) / "include" for p in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")) if p]
    return [place for place in [*places, Path("/usr/local/cuda/include")] if place.is_dir()]


def find_compiler() -> Nvcc | Nvrtc:
    """Raises BackendError when there is neither nvcc nor NVRTC."""
    nvcc = find_nvcc()
    if nvcc is not None:
        return Nvcc(nvcc)
    try:
        from cuda.bindings import nvrtc

        return Nvrtc(nvrtc)
    except Exception as exc:
        raise BackendError(
            "there is neither nvcc on PATH nor NVRTC to compile the kernels: install the CUDA toolkit, or "
            "pip install 'cuda-bindings[all]'",
            backend="cuda",
        ) from exc


def compile_all(arch: str, folder: Path | None = None) -> dict[str, bytes]:
    """Compiled code by source file name, for example arch "90". Read from the cache where it is there."""
    sources = source_folder()
    compiler = find_compiler()
    digest = hashlib.sha256(repr((arch, OPTIONS, defines(arch), compiler.version)).encode())
    for file in sorted(sources.glob("*.cu*")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    cache = (folder or cache_folder()) / digest.hexdigest()[:32]

    def one(name: str) -> bytes:
        kept = cache / f"{name}.cubin"
        if kept.is_file():
            return kept.read_bytes()
        made = compiler.compile(sources / f"{name}.cu", arch)
        _keep(kept, made)
        return made

    names = sorted({file for file, _ in SIGNATURES.values()})
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return dict(zip(names, pool.map(one, names), strict=True))


def _keep(path: Path, code: bytes) -> None:
    """Whole or not at all. A cache that cannot be written costs time, nothing else."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(code)
        os.replace(file.name, path)
    except OSError:
        return


class Kernels:
    """The loaded functions, by name. Made and used on the device's owner thread.

    `api` is cuda.bindings.driver where launches go through cuLaunchKernelEx: pycuda does not give a function's handle
    away, so the same code is then loaded into the same context a second time, for `handles`.
    """

    def __init__(self, driver: Any, arch: str, api: Any = None) -> None:
        code = compile_all(arch)
        try:
            self.modules = {name: driver.module_from_buffer(data) for name, data in code.items()}
        except driver.MemoryError:
            raise
        except driver.Error as exc:
            raise cannot_load(int(driver.get_driver_version()), exc) from exc
        self.functions: dict[str, Any] = {}
        self.handles: dict[str, Any] = {}
        self._api = api
        self._loaded: dict[str, Any] = {}
        room = shared_room(driver)
        for name, (file, parameters) in SIGNATURES.items():
            function = self.modules[file].get_function(name)
            # Arguments travel as one packed block: launches are packed once and replayed many times.
            function.prepare([f"{struct.calcsize(argument_format(parameters))}s"])
            attributes = driver.function_attribute
            static = function.get_attribute(attributes.SHARED_SIZE_BYTES)
            function.set_attribute(attributes.MAX_DYNAMIC_SHARED_SIZE_BYTES, room - static)
            self.functions[name] = function
            if api is not None:
                self.handles[name] = self._handle(name, code[file], room - static)

    def _handle(self, name: str, code: bytes, dynamic: int) -> Any:
        api, file = self._api, SIGNATURES[name][0]
        if file not in self._loaded:
            self._loaded[file] = take(api.cuModuleLoadData(code))
        function = take(api.cuModuleGetFunction(self._loaded[file], name.encode()))
        attribute = api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        take(api.cuFuncSetAttribute(function, attribute, dynamic))
        return function

    def __getitem__(self, name: str) -> Any:
        return self.functions[name]

    def close(self) -> None:
        """Unload what cuda.bindings loaded; pycuda's modules go with their objects."""
        for module in self._loaded.values():
            take(self._api.cuModuleUnload(module))
        self._loaded.clear()
        self.handles.clear()


def cannot_load(driver_version: int, exc: Exception) -> BackendError:
    """A driver refuses code of a newer toolkit than its own, with words that do not say so."""
    try:
        compiler = " ".join(find_compiler().version.split("\n")[-2:]).strip()
    except BackendError:
        compiler = "a compiler that is gone"
    return BackendError(
        f"the NVIDIA driver, made for CUDA {cuda_version(driver_version)}, does not load kernels compiled by "
        f"{compiler} ({exc}): update the driver, or put nvcc of the driver's version on PATH",
        backend="cuda",
        driver=cuda_version(driver_version),
        compiler=compiler,
    )


def shared_room(driver: Any) -> int:
    """Bytes of shared memory that a block may ask for. More than 48 KB must be allowed function by function."""
    return int(driver.Context.get_device().get_attribute(driver.device_attribute.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN))


def take(answer: tuple[Any, ...]) -> Any:
    """What a call of cuda.bindings.driver gave. Raises BackendError when the driver refused it."""
    if int(answer[0]):
        raise BackendError(f"the CUDA driver refused an operation: {answer[0]}", backend="cuda")
    return answer[1] if len(answer) > 1 else None
