"""The CUDA sources compile for every architecture we name, and the plugin's wheel carries them. Needs no GPU."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = ROOT / "plugins" / "ds4-cuda"
SOURCES = sorted((ROOT / "cuda").glob("*.cu"))


@pytest.fixture(scope="module")
def kernels():
    sys.path.insert(0, str(PLUGIN))
    try:
        from ds4_cuda import kernels

        yield kernels
    finally:
        sys.path.remove(str(PLUGIN))


@pytest.mark.parametrize("arch", ["80", "90", "120"])
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_sources_compile(kernels, source: Path, arch: str) -> None:
    """The two expert files take half a minute each; one architecture of them is enough for a local run."""
    if source.stem in ("experts", "matmul") and arch != "90":
        pytest.skip(
            "the float products are instances of one template: one architecture stands for all, to save minutes"
        )
    try:
        compiler = kernels.find_compiler()
    except Exception as exc:
        pytest.skip(f"no CUDA compiler here: {exc}")
    assert compiler.compile(source, arch)[:4] == b"\x7fELF"


@pytest.mark.parametrize(
    "source", [path for path in SOURCES if path.stem in ("quantize", "select", "store")], ids=lambda path: path.stem
)
def test_sources_compile_with_nvrtc(kernels, source: Path) -> None:
    """Without the toolkit's headers: what NVRTC lacks is in integers.cuh."""
    nvrtc = pytest.importorskip(
        "cuda.bindings.nvrtc", reason="pip install 'cuda-bindings[all]' to compile with NVRTC; nvcc is tested above"
    )
    assert kernels.Nvrtc(nvrtc).compile(source, "90")[:4] == b"\x7fELF"


def test_the_wheel_contains_the_kernels(tmp_path: Path) -> None:
    copy = tmp_path / "tree"
    shutil.copytree(
        PLUGIN, copy / "plugins" / "ds4-cuda", ignore=shutil.ignore_patterns("*.egg-info", "build", "__pycache__")
    )
    shutil.copytree(ROOT / "cuda", copy / "cuda")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path / "out"),
    ]
    subprocess.run([*command, str(copy / "plugins" / "ds4-cuda")], check=True, capture_output=True, timeout=120)
    (wheel,) = (tmp_path / "out").glob("ds4_cuda-*.whl")
    names = {Path(name).name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("ds4_cuda/kernels/")}
    assert names == {path.name for path in (ROOT / "cuda").glob("*.cu*")}
