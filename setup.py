"""Extension modules and build switches; everything else is in pyproject.toml."""

import os
import shutil
import subprocess
import sys
import tempfile
from glob import glob

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

DEBUG = os.environ.get("DS4_CYTHON_DEBUG") == "1"

DIRECTIVES = {
    "language_level": 3,
    "freethreading_compatible": False,
    "boundscheck": DEBUG,
    "wraparound": DEBUG,
    "initializedcheck": DEBUG,
    "cdivision": not DEBUG,
    "auto_pickle": False,
    "autotestdict": False,
}

# No -march: wheels run on any CPU of the architecture; kernels choose faster versions of themselves at run time.
# No contraction: a*b+c must round the same way in every version of a kernel, for one row and for many.
CFLAGS = ["-std=gnu11", "-fno-strict-aliasing", "-ffp-contract=off"] + (
    ["-O1", "-g"] if DEBUG else ["-O3", "-fno-math-errno"]
)
OPENMP_PROBE = "#include <omp.h>\nint main(void) { return omp_get_max_threads() < 1; }\n"


def has_openmp(compiler: list[str]) -> bool:
    with tempfile.TemporaryDirectory() as tmp:
        source = os.path.join(tmp, "probe.c")
        with open(source, "w", encoding="ascii") as file:
            file.write(OPENMP_PROBE)
        command = [*compiler, "-fopenmp", source, "-o", os.path.join(tmp, "probe")]
        try:
            return subprocess.run(command, capture_output=True, check=False).returncode == 0
        except OSError:
            return False


def require_compiler(command: str) -> None:
    # Without this the same fact comes as a page of traceback from inside setuptools.
    if shutil.which(command) is None:
        sys.exit(
            f"ds4: building needs a C compiler, and {command!r} was not found on PATH. Install one (Debian, Ubuntu: "
            "apt install gcc; Fedora: dnf install gcc; macOS: xcode-select --install), or name yours: CC=clang"
        )


class BuildExt(build_ext):
    def build_extensions(self) -> None:
        compiler = [part for part in self.compiler.compiler if not part.startswith("-")]
        require_compiler(compiler[0])
        openmp = has_openmp(compiler)
        print(f"ds4: OpenMP {'on' if openmp else 'off'}, debug {'on' if DEBUG else 'off'}", file=sys.stderr)
        for extension in self.extensions:
            extension.extra_compile_args += CFLAGS
            if openmp and extension.name == "ds4.cpu._kernels":
                extension.extra_compile_args.append("-fopenmp")
                extension.extra_link_args.append("-fopenmp")
        super().build_extensions()


EXTENSIONS = [
    Extension("ds4._core", ["ds4/_core.pyx"], depends=glob("ds4/core/*.pxi")),
    Extension(
        "ds4.cpu._kernels",
        ["ds4/cpu/_kernels.pyx", *sorted(glob("ds4/cpu/kernels/*.c"))],
        include_dirs=["ds4/cpu/kernels"],
        depends=glob("ds4/cpu/kernels/*.h"),
    ),
]

setup(
    ext_modules=cythonize(
        [extension for extension in EXTENSIONS],
        compiler_directives=DIRECTIVES,
        build_dir="build/cython",
    ),
    cmdclass={"build_ext": BuildExt},
)
