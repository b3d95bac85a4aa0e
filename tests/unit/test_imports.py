"""The house rules that imports can show, read from the sources with `ast`: nothing is imported here.

Imports point down only, nothing imports a backend, only the registry finds one, plugins see only ds4.plugin.
Imports that exist for annotations alone (TYPE_CHECKING) are exempt.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

LAYERS = (
    {"errors", "env", "data"},
    {"model", "text"},
    {"backend", "plugin"},
    {"sampling", "snapshot"},
    {"_core"},
    {"engine", "scheduler", "worker", "store", "parallel"},
    {""},
    {"testing"},
    {"server", "cli", "bench"},
    {"__main__"},
)
"""Parts of the package, lowest first; "" is ds4/__init__.py, the door."""

TOGETHER = ({"errors", "env", "data"}, {"backend", "plugin"}, {"engine", "scheduler", "worker", "store", "parallel"})
"""Parts of one layer that may import each other."""

BACKENDS = {"cpu"}
"""Built-in backends: they may use what is below the core, and nothing may use them."""

LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts} | dict.fromkeys(BACKENDS, 4)
PYX_IMPORT = re.compile(r"^\s*(?:from\s+(ds4[\w.]*)\s+c?import\s+\(?([\w, ]+)|c?import\s+(ds4[\w.]*))", re.MULTILINE)


def part_of(module: str) -> str:
    """ds4.backend.layout -> backend; ds4 -> "" (the door)."""
    return ([*module.split("."), ""])[1]


def imported(tree: ast.AST) -> Iterator[str]:
    """ds4 modules that a syntax tree imports at run time, as ds4.x.y; `from ds4 import x` is ds4.x."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for branch in node.orelse:
                yield from imported(branch)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "ds4")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ds4":
            yield from spelled(str(node.module), [alias.name for alias in node.names])
        else:
            yield from imported(node)


def spelled(module: str, names: list[str]) -> Iterator[str]:
    if module != "ds4":
        yield module
    else:
        yield from (f"ds4.{name}" if name in LEVEL else "ds4" for name in names)


def relative(tree: ast.AST) -> list[int]:
    return [node.lineno for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level]


def wrong(module: str, targets: list[str]) -> list[str]:
    """The imports of a module that break a rule, each as a sentence."""
    source = part_of(module)
    found = []
    for target in targets:
        part = part_of(target)
        if part == source:
            continue
        if part in BACKENDS:
            found.append(f"{module} imports the backend {target}; the registry finds it")
        elif part not in LEVEL or source not in LEVEL:
            found.append(f"{module} imports {target}: add its part of the package to LAYERS")
        elif source in BACKENDS and LEVEL[part] >= LEVEL["_core"]:
            found.append(f"the backend {module} imports {target}, which is not below the core")
        elif LEVEL[part] > LEVEL[source]:
            found.append(f"{module} imports {target}, which is above it")
        elif LEVEL[part] == LEVEL[source] and not any({part, source} <= group for group in TOGETHER):
            found.append(f"{module} imports {target}, which is beside it")
    return found


def module_name(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return "ds4._core" if path.suffix == ".pxi" else name.removesuffix(".__init__")


def targets_in(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return list(imported(ast.parse(text)))
    found = []
    for module, names, plain in PYX_IMPORT.findall(text):
        found.extend([plain] if plain else spelled(module, [name.strip().split(" ")[0] for name in names.split(",")]))
    return found


SOURCES = sorted(path for suffix in ("py", "pyx", "pxi") for path in (ROOT / "ds4").rglob(f"*.{suffix}"))
PLUGIN_SOURCES = sorted(path for folder in ("plugins", "examples") for path in (ROOT / folder).rglob("*.py"))


def test_the_sources_are_found() -> None:
    assert {"ds4.errors", "ds4.backend.registry", "ds4.cli"} <= {module_name(path) for path in SOURCES}


def test_imports_point_down_only() -> None:
    assert [line for path in SOURCES for line in wrong(module_name(path), targets_in(path))] == []


def test_imports_are_absolute() -> None:
    paths = [path for path in SOURCES if path.suffix == ".py"]
    assert [path for path in paths if relative(ast.parse(path.read_text(encoding="utf-8")))] == []


def test_only_the_registry_looks_for_plugins() -> None:
    looking = re.compile(r"ENTRY_POINT_GROUP|entry_points\(|backend\.loading")
    finders = {module_name(path) for path in SOURCES if looking.search(path.read_text(encoding="utf-8"))}
    # loading and registry are the two halves of it; hookspecs defines the group, plugin hands it to authors.
    assert finders == {f"ds4.{name}" for name in ("backend.loading", "backend.registry", "backend.hookspecs", "plugin")}


def test_plugins_import_only_the_plugin_contract() -> None:
    found = []
    for path in PLUGIN_SOURCES:
        is_test = "tests" in path.relative_to(ROOT).parts
        allowed = {"ds4.plugin"}
        for target in targets_in(path):
            if target not in allowed and not (is_test and (target == "ds4" or target.startswith("ds4.testing"))):
                found.append(f"{path.relative_to(ROOT)} imports {target}")
    assert found == []


def test_the_c_interface_of_numpy_is_not_used() -> None:
    """Buffers cross as memoryviews, so one build runs under numpy 1.26 and every 2.x (field case 50 c)."""
    cython = [path for path in SOURCES if path.suffix != ".py"] + sorted((ROOT / "ds4").rglob("*.pxd"))
    assert [path for path in cython if re.search(r"cimport\s+numpy|from\s+numpy\s+cimport", path.read_text())] == []
    headers = re.compile(r"numpy/(arrayobject|ndarray)|get_include\(")
    native = [ROOT / "setup.py", *(ROOT / "ds4").rglob("*.c"), *(ROOT / "ds4").rglob("*.h")]
    # Cython's own output is not a source.
    written = [path for path in native if path.with_suffix(".pyx").exists() is False]
    assert [path for path in written if headers.search(path.read_text(encoding="utf-8"))] == []


# ---------------------------------------------------------------- the rules can fail


@pytest.mark.parametrize(
    ("module", "code", "said"),
    [
        ("ds4.model.gguf", "from ds4.engine import Engine", "ds4.model.gguf imports ds4.engine, which is above it"),
        ("ds4.model.gguf", "def f():\n    import ds4.cli.run", "above it"),
        ("ds4.model.gguf", "from ds4 import engine", "above it"),
        ("ds4.model.gguf", "import ds4", "above it"),
        ("ds4.model.gguf", "from ds4.text.chat import x", "beside it"),
        ("ds4.engine", "import ds4.cpu", "imports the backend ds4.cpu"),
        ("ds4.testing.null", "from ds4.cpu.backend import CpuBackend", "imports the backend"),
        ("ds4.cpu.backend", "from ds4._core import KVCache", "not below the core"),
        ("ds4.cli", "import ds4.brandnew", "add its part of the package to LAYERS"),
        ("ds4.errors", "try:\n    import ds4.model\nexcept ImportError:\n    pass", "above it"),
    ],
)
def test_a_wrong_import_is_seen(module: str, code: str, said: str) -> None:
    (sentence,) = wrong(module, list(imported(ast.parse(code))))
    assert said in sentence


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("ds4.engine", "from ds4._core import KVCache\nfrom ds4 import env, errors\nimport ds4.scheduler"),
        ("ds4.backend.contract", "if TYPE_CHECKING:\n    from ds4.engine import Engine"),
        ("ds4.cpu.backend", "import ds4.cpu._kernels\nfrom ds4.plugin import Backend\nfrom ds4.model.shape import CSA"),
        ("ds4.cli.run", "import ds4\nimport ds4.data\nimport ds4like"),
        ("ds4", "from ds4.engine import Engine\nfrom ds4 import errors"),
    ],
)
def test_a_right_import_is_left_alone(module: str, code: str) -> None:
    assert wrong(module, list(imported(ast.parse(code)))) == []


def test_imports_of_cython_sources_are_seen(tmp_path: Path) -> None:
    path = tmp_path / "x.pyx"
    path.write_text("from ds4 import errors, engine\ncimport ds4.cpu.x\n    from ds4.errors import (BatchError, X)\n")
    assert targets_in(path) == ["ds4.errors", "ds4.engine", "ds4.cpu.x", "ds4.errors"]
