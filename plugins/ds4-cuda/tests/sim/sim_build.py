"""Compiles the kernel sources for the CPU: one shared library per .cu file, kept by a hash of everything that goes in.

The sources are compiled as they are, but for two things that macros cannot do: `extern __shared__ T name[]` becomes a
pointer to the room that a launch gives, and records are read where they lie instead of copied for every thread.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
HEADERS = ("sim.h", "fibers.h", "sim_ptx.h", "cuda_fp16.h")
OPTIONS = ["-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-fno-strict-aliasing", "-fno-ipa-reference"]
OPTIONS += ["-fno-delete-null-pointer-checks", "-fPIC", "-shared", "-DDS4_SIM", "-w", "-fvisibility=hidden"]
if platform.machine() in ("x86_64", "AMD64"):
    OPTIONS += ["-march=x86-64-v3"]
CHECKS = ["-fsanitize=alignment,bounds,shift,integer-divide-by-zero,unreachable", "-fsanitize-undefined-trap-on-error"]
"""Traps for what a GPU refuses or leaves open and a CPU does not mind."""

DYNAMIC = re.compile(r"extern\s+__shared__\s+(?:__align__\(\d+\)\s+)?([\w ]+?)\s*\b(\w+)\[\];")
RECORD = re.compile(r"\bconst (Run|Layer|Jobs|Mat) (\w+)(?=[,)])")
JOBS = 2


def find_compiler() -> str | None:
    return next((path for name in (os.environ.get("CXX"), "g++", "c++") if name and (path := shutil.which(name))), None)


def rewritten(path: Path) -> str:
    text = DYNAMIC.sub(r"\1 *const \2 = (\1 *)sim::dynamic_shared;", path.read_text(encoding="utf-8"))
    text = RECORD.sub(r"const \1 &\2", text)
    return f'#line 1 "{path}"\n{text}'


def unit_of(name: str, kernels: Iterable[str]) -> str:
    """A translation unit: nothing but the entries can be seen from outside, so that statics lie in one section."""
    entries = "\n".join(f"SIM_KERNEL({kernel})" for kernel in kernels)
    return f'#include "sim_ptx.h"\nnamespace {{\n#include "{name}.cu"\n}}\n{entries}\n'


def cache_folder() -> Path:
    return Path(os.environ.get("DS4_SIM_CACHE") or Path(tempfile.gettempdir()) / f"ds4-sim-{os.getuid()}")


def compile_all(
    sources: Path, files: dict[str, list[str]], defines: list[str], *, checks: bool = False, level: str = "-O2"
) -> dict[str, Path]:
    """Libraries by file name; `files`: kernels by file name."""
    compiler = find_compiler()
    if compiler is None:
        raise RuntimeError("there is no C++ compiler")
    options = [level, *OPTIONS, *(CHECKS if checks else []), *defines]
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    headers = {path.name: rewritten(path) for path in sorted(sources.glob("*.cuh"))}
    common = hashlib.sha256(repr((options, version, headers, [(HERE / h).read_bytes() for h in HEADERS])).encode())

    def one(name: str) -> Path:
        unit, source = unit_of(name, files[name]), rewritten(sources / f"{name}.cu")
        digest = common.copy()
        digest.update(repr((unit, source)).encode())
        kept = cache_folder() / f"{name}-{digest.hexdigest()[:24]}.so"
        if not kept.is_file():
            kept.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
                for file, text in {**headers, f"{name}.cu": source, "unit.cpp": unit}.items():
                    (Path(folder) / file).write_text(text, encoding="utf-8")
                command = [compiler, *options, f"-I{HERE}", "unit.cpp", "-o", "unit.so"]
                done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
                if done.returncode:
                    raise RuntimeError(f"{name}.cu does not compile for the CPU:\n{done.stderr[-6000:]}")
                os.replace(Path(folder) / "unit.so", kept)
        return kept

    with ThreadPoolExecutor(JOBS) as pool:
        return dict(zip(files, pool.map(one, files), strict=True))
