"""Puts the kernel sources into the package: they live in cuda/ at the repository root, beside metal/.

A wheel (and an sdist) carries them as ds4_cuda/kernels/. An editable install reads cuda/ itself, so that an edited
kernel is compiled at the next open.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parents[1] / "cuda"
INSIDE = HERE / "ds4_cuda" / "kernels"


def copy_sources(to: Path) -> None:
    source = SOURCES if SOURCES.is_dir() else INSIDE
    files = sorted([*source.glob("*.cu"), *source.glob("*.cuh")])
    if not files:
        raise SystemExit(f"ds4-cuda: there are no kernel sources in {SOURCES} or {INSIDE}")
    to.mkdir(parents=True, exist_ok=True)
    for file in files:
        if file.parent != to:
            shutil.copy2(file, to / file.name)


class BuildPy(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            copy_sources(Path(self.build_lib) / "ds4_cuda" / "kernels")


class Sdist(sdist):
    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        copy_sources(Path(base_dir) / "ds4_cuda" / "kernels")


setup(cmdclass={"build_py": BuildPy, "sdist": Sdist})
