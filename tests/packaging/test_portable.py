"""Field case 50 f: what is compiled runs on every CPU of the architecture, outside functions chosen at run time."""

from __future__ import annotations

import ast
import importlib.util
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = ("ds4._core", "ds4.cpu._kernels")

CHOSEN_AT_RUN_TIME = re.compile(r"avx|x86_64_v[34]")
"""In the names of functions that are called only after a look at the CPU."""

BEYOND_X86_64 = re.compile(
    r"%[yz]mm|%k[0-7]\b"  # 256 and 512 bit registers, masks
    r"|^\s*v(?!err|erw)[a-z0-9]+\s"  # VEX and EVEX encodings: AVX, FMA, F16C
    r"|^\s*(popcnt|lzcnt|andn|bextr|bls[ir]|blsmsk|pdep|pext|mulx|shlx|shrx|sarx|rorx|crc32|movbe)[lqwb]?\s"
    r"|^\s*(pshufb|phadd|pmulld|pmuldq|pmaddubsw|palignr|round[sp][sd]|dpp[sd]|blendv|pinsr[bdq]|pextr[bdq]|pmov[sz]x|ptest)"
)
"""Instructions that the first x86-64 does not have. Not tzcnt: it runs there as bsf, which is equal but for zero."""


def beyond_baseline(disassembly: Iterable[str]) -> Iterator[str]:
    """FUNCTION: INSTRUCTION for each line of `objdump -d --no-show-raw-insn` that needs more than the baseline."""
    function = ""
    for line in disassembly:
        if line.rstrip().endswith(">:"):
            function = line[line.index("<") + 1 : line.rindex(">")]
        elif not CHOSEN_AT_RUN_TIME.search(function):
            instruction = line.partition("\t")[2]
            if BEYOND_X86_64.search(instruction):
                yield f"{function}: {instruction.strip()}"


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the list of instructions is of x86-64")
@pytest.mark.skipif(shutil.which("objdump") is None, reason="objdump (binutils) is not installed")
@pytest.mark.parametrize("module", MODULES)
def test_compiled_code_needs_no_newer_cpu(module: str) -> None:
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    command = ["objdump", "-d", "--no-show-raw-insn", spec.origin]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = list(beyond_baseline(process.stdout))
    assert process.returncode == 0
    assert found[:20] == []


def test_the_check_can_fail() -> None:
    listing = [
        "0000000000001000 <matmul>:\n",
        "    1000:\tmovaps %xmm0,%xmm1\n",
        "    1003:\tvaddps %ymm0,%ymm1,%ymm2\n",
        "    1007:\tpopcnt %rax,%rbx\n",
        "    100b:\ttzcnt  %rax,%rbx\n",
        "    100f:\tpmulld %xmm0,%xmm1\n",
        "    1013:\tvfmadd231ss %xmm0,%xmm1,%xmm2\n",
        "0000000000002000 <matmul_avx2>:\n",
        "    2000:\tvaddps %ymm0,%ymm1,%ymm2\n",
        "0000000000003000 <matmul.arch_x86_64_v3.0>:\n",
        "    3000:\tvaddps %ymm0,%ymm1,%ymm2\n",
    ]
    assert [line.split()[1] for line in beyond_baseline(listing)] == ["vaddps", "popcnt", "pmulld", "vfmadd231ss"]


def test_build_flags_do_not_depend_on_this_machine() -> None:
    tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    strings = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    flags = [text for text in strings if text.startswith("-")]
    assert "-ffp-contract=off" in flags  # a * b + c rounds the same in every version of a kernel
    unsafe = re.compile(r"-(m(arch|cpu|tune|avx|fma|sse|f16c)|ffast-math|Ofast|funsafe|fassociative|freciprocal)")
    assert [flag for flag in flags if unsafe.match(flag)] == []
