"""Kernel sources and their Python side agree; without pycuda the plugin loads and says why it cannot run."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from ds4_cuda import kernels, records

TYPES = {
    "const Run run": "R",
    "const Layer layer": "L",
    "const Jobs jobs": "J",
    "const Mat fn": "M",
    "long long": "q",
    "int": "i",
}


def code_of(parameter: str) -> str:
    if "*" in parameter:
        return "P"
    if parameter in TYPES:
        return TYPES[parameter]
    return TYPES[parameter.rsplit(" ", 1)[0]]


def declared() -> dict[str, tuple[str, str]]:
    """kernel -> (file, parameters), read from the sources; macros are expanded by hand."""
    found = {}
    for path in sorted(kernels.source_folder().glob("*.cu*")):
        text = path.read_text().replace("\\\n", " ")
        for match in re.finditer(
            r'extern "C" __global__ void\s+(?:__launch_bounds__\([^)]*\))?\s*([\w#]+)\(([^)]*)\)', text
        ):
            name, parameters = match.groups()
            codes = "".join(code_of(" ".join(p.split())) for p in parameters.split(","))
            found[name] = (path.stem, codes)
    return found


def test_signatures_are_those_of_the_sources() -> None:
    found = declared()
    patterns = {
        "product_##NAME": "product_",
        "product8_##NT##_##NAME": "product8_",
        "product8_8_##NAME": "product8_8_",
        "route8_##NT": "route8_",
        "product1_##NAME": "product1_",
        "attend_##JD": "attend_",
    }
    for name, (file, codes) in found.items():
        if name.startswith("KERNEL##"):
            users = {k: v for k, v in kernels.SIGNATURES.items() if v[0] == file}
            assert users and {v[1] for v in users.values()} == {codes}
        elif "##" in name:
            users = {
                k: v for k, v in kernels.SIGNATURES.items() if k.startswith(patterns[name]) and k != "attend_simple"
            }
            users = {k: v for k, v in users.items() if k != "product_simple"}
            assert users and {v for v in users.values()} == {(file, codes)}
        else:
            assert kernels.SIGNATURES[name] == (file, codes), name
    assert {name for name in kernels.SIGNATURES if not re.search(r"_(\d|[A-Z]+\w*)$", name)} <= set(found)


def test_records_have_no_padding() -> None:
    for dtype in (records.RUN, records.LAYER, records.MAT, records.JOBS, records.JOB):
        assert dtype.itemsize % 8 == 0
        for name in dtype.names or ():
            field, offset = dtype.fields[name][:2]  # type: ignore[index]
            size = field.base.itemsize if field.base.names is None else 8
            assert offset % min(size, 8) == 0, name


def test_enums_are_in_the_order_of_the_sources() -> None:
    text = (kernels.source_folder() / "records.cuh").read_text()
    names = re.search(r"enum Dtype \{([^}]*)\}", text)
    assert names and tuple(name.strip() for name in names.group(1).split(",")) == records.DTYPES
    mats = re.search(r"enum LayerMat \{([^}]*)\}", text)
    assert mats and len(mats.group(1).split(",")) == len(records.LAYER_MATS) + 1
    vecs = re.search(r"enum LayerVec \{([^}]*)\}", text)
    assert vecs and len(vecs.group(1).split(",")) == len(records.LAYER_VECS) + 1


@pytest.mark.parametrize("broken", ["", "raise OSError('libcuda.so.1: cannot open shared object file')"])
def test_without_pycuda_import_is_fine_and_probe_says_why(tmp_path: object, broken: str) -> None:
    """pycuda missing, and pycuda that raises while it is imported."""
    from pathlib import Path

    folder = Path(str(tmp_path))
    if broken:
        (folder / "pycuda").mkdir()
        (folder / "pycuda" / "__init__.py").write_text(broken)
    block = "" if broken else "import sys; sys.modules['pycuda'] = None; "
    code = f"{block}import ds4_cuda; from ds4_cuda.backend import CudaBackend; print(CudaBackend().probe().reason)"
    path = [str(folder), str(Path(kernels.__file__).parents[1]), *sys.path]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}; {code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("pycuda cannot be imported (") and len(done.stdout.splitlines()) == 1
