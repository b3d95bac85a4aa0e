"""Write docs/api.md: everything in ds4.__all__ and ds4.plugin.__all__, from signatures and docstrings.

    python tools/docs_api.py [--check]

Signatures are read from the sources (from the stub where a module is compiled), so that the page does not depend on
the Python that made it. Docstrings come from there too, and for compiled modules from the built package.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib
import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "api.md"
INTRO = """\
# API reference

Generated from the docstrings by `make docs`; do not edit. What the words mean is in [concepts](concepts.md).
"""
DOORS = {
    "ds4": "What a program imports: `import ds4`.",
    "ds4.plugin": "What a backend imports: `from ds4.plugin import ...`. See [how to add a backend](backends.md).",
}
ERRORS = "ds4.errors"
PLAIN = {"int", "str", "float", "bool"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


# ---------------------------------------------------------------- where a name is defined


@dataclass(frozen=True)
class Source:
    """A module's declarations: its stub where it is compiled, else the module."""

    module: str
    lines: list[str]
    tree: ast.Module
    is_stub: bool

    @classmethod
    def of(cls, module: str) -> Source:
        stem = ROOT.joinpath(*module.split("."))
        for path in (stem.with_suffix(".pyi"), stem.with_suffix(".py"), stem / "__init__.py"):
            if path.exists():
                text = path.read_text(encoding="utf-8")
                return cls(module, text.splitlines(), ast.parse(text), path.suffix == ".pyi")
        raise SystemExit(f"docs_api: there is no source of module {module}")

    def find(self, name: str) -> tuple[ast.stmt, str | None]:
        """The statement that defines a name, and the string that follows it if it is an assignment."""
        return find_in(self.tree.body, name) or _missing(self.module, name)

    def expand(self, annotation: str) -> str:
        """An annotation with the module's private aliases written out."""
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and defined_by(node)[0].startswith("_"):
                annotation = re.sub(rf"\b{defined_by(node)[0]}\b", ast.unparse(node.value), annotation)
        return annotation

    def comment(self, node: ast.stmt) -> str:
        _, mark, comment = self.lines[node.lineno - 1].partition("  # ")
        return comment.strip() if mark else ""

    def runtime_doc(self, *path: str) -> str | None:
        """Docstring of a compiled object."""
        if not self.is_stub:
            return None
        found = importlib.import_module(self.module)
        for name in path:
            found = inspect.getattr_static(found, name)
        return inspect.getdoc(found)


def _missing(module: str, name: str) -> tuple[ast.stmt, str | None]:
    raise SystemExit(f"docs_api: {name} is exported, but its definition was not found in {module}")


def find_in(body: list[ast.stmt], name: str) -> tuple[ast.stmt, str | None] | None:
    for i, node in enumerate(body):
        if name in defined_by(node):
            return node, string_after(body, i)
    return None


def defined_by(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.ClassDef | Function):
        return [node.name]
    if isinstance(node, ast.AnnAssign):
        return [ast.unparse(node.target)]
    if isinstance(node, ast.Assign):
        return [name for target in node.targets for name in re.findall(r"\w+", ast.unparse(target))]
    return []


def string_after(body: list[ast.stmt], i: int) -> str | None:
    node = body[i + 1] if i + 1 < len(body) else None
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return inspect.cleandoc(node.value.value)
    return None


def exported(door: str) -> list[tuple[str, str]]:
    """(name, module that defines it), in the order of __all__."""
    tree = Source.of(door).tree
    found = {
        alias.asname or alias.name: node.module or ""
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    names = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and "__all__" in defined_by(node)
    )
    return [(name, found.get(name, door)) for name in names if name != "__version__"]


# ---------------------------------------------------------------- one page


def page() -> str:
    parts = [INTRO]
    shown: set[tuple[str, str]] = set()
    for door, purpose in DOORS.items():
        names = exported(door)
        here = {name for name, _ in names}
        parts.append(f"## {door}\n\n{purpose}\n")
        new = [(name, module) for name, module in names if (name, module) not in shown]
        parts.extend(chapter(Source.of(module), name, here) for name, module in new if module != ERRORS)
        again = sorted(here - {name for name, _ in new})
        if again:
            parts.append(f"Also here, and described above: {', '.join(f'`{name}`' for name in again)}.\n")
        errors = [name for name, module in new if module == ERRORS]
        if errors:
            parts.append(error_table(door, errors))
        shown.update(names)
    return "\n".join(parts)


def error_table(door: str, names: list[str]) -> str:
    source = Source.of(ERRORS)
    rows = []
    for name in names:
        node, _ = source.find(name)
        assert isinstance(node, ast.ClassDef)
        bases = ", ".join(f"`{ast.unparse(base)}`" for base in node.bases)
        rows.append((f"`{name}`", bases, ast.get_docstring(node) or ""))
    return f"### Errors of {door}\n\n{table(('error', 'kind of', 'when'), rows)}"


def chapter(source: Source, name: str, exported_names: set[str]) -> str:
    node, after = source.find(name)
    if isinstance(node, ast.ClassDef):
        return class_chapter(source, node, exported_names)
    if isinstance(node, Function):
        doc = ast.get_docstring(node) or source.runtime_doc(node.name)
        return f"### {name}\n\n{code(signature(source, node))}\n{text(doc)}"
    value = value_of(node, name)
    return f"### {name}\n\n" + (f"{code(f'{name} = {value}')}\n" if len(value) <= 60 else "") + text(after)


def value_of(node: ast.stmt, name: str) -> str:
    """Right-hand side of an assignment; of `A, B = 1, 2` the part for the name."""
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
        return ast.unparse(node.value.elts[defined_by(node).index(name)])
    assert isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
    return ast.unparse(node.value)


def class_chapter(source: Source, node: ast.ClassDef, exported_names: set[str]) -> str:
    parts = [f"### {node.name}\n", text(ast.get_docstring(node) or source.runtime_doc(node.name))]
    methods = public_methods(node)
    for init in methods.pop("__init__", []):
        if annotation_names(init) <= exported_names | PLAIN:  # others are for the library's own use
            parts.append(
                code(f"{node.name}{signature(source, init).removeprefix('__init__').removesuffix(' -> None')}")
            )
    parts.append(attributes(source, node, [found[0] for found in methods.values() if is_property(found[0])]))
    for name, found in methods.items():
        if not is_property(found[0]):
            doc = next(filter(None, map(ast.get_docstring, found)), None) or source.runtime_doc(node.name, name)
            signatures = "\n".join(signature(source, method) for method in found)
            parts.append(f"**{node.name}.{name}**\n\n{code(signatures)}\n{text(doc)}")
    return "\n".join(part for part in parts if part)


def public_methods(node: ast.ClassDef) -> dict[str, list[Function]]:
    """By name: one definition, or all overloads."""
    methods: dict[str, list[Function]] = {}
    for method in node.body:
        if not isinstance(method, Function) or (method.name.startswith("_") and method.name != "__init__"):
            continue
        before = methods.setdefault(method.name, [])
        if not before or "overload" in decorators(method):
            before.append(method)
    return methods


def attributes(source: Source, node: ast.ClassDef, properties: list[Function]) -> str:
    rows = []
    for i, field in enumerate(node.body):
        if isinstance(field, ast.AnnAssign) and not ast.unparse(field.target).startswith("_"):
            default = f"`{ast.unparse(field.value)}`" if field.value is not None else ""
            meaning = string_after(node.body, i) or source.comment(field)
            rows.append((f"`{ast.unparse(field.target)}`", f"`{ast.unparse(field.annotation)}`", default, meaning))
    for prop in properties:
        kind = f"`{source.expand(ast.unparse(prop.returns))}`" if prop.returns else ""
        doc = ast.get_docstring(prop) or source.runtime_doc(node.name, prop.name)
        rows.append((f"`{prop.name}`", kind, "", doc or ""))
    if not rows:
        return ""
    columns = ("attribute", "type", "default", "meaning")
    if not any(default for _, _, default, _ in rows):
        return table(("attribute", "type", "meaning"), [(name, kind, doc) for name, kind, _, doc in rows])
    return table(columns, rows)


# ---------------------------------------------------------------- words


def decorators(node: Function) -> set[str]:
    return {ast.unparse(decorator).split(".")[-1] for decorator in node.decorator_list}


def is_property(node: Function) -> bool:
    return bool({"property", "cached_property"} & decorators(node))


def annotation_names(node: Function) -> set[str]:
    args = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    found = [name for arg in args if arg.annotation for name in ast.walk(arg.annotation)]
    return {name.id for name in found if isinstance(name, ast.Name)}


def signature(source: Source, node: Function) -> str:
    """name(arguments) -> result, without self; over several lines when it is long."""
    args = [source.expand(arg) for arg in arguments(node.args)]
    args = args[1:] if args[:1] in (["self"], ["cls"]) else args
    args = args[1:] if args[:1] == ["/"] else args
    result = f" -> {source.expand(ast.unparse(node.returns))}" if node.returns else ""
    line = f"{node.name}({', '.join(args)}){result}"
    if len(line) <= 100:
        return line
    return f"{node.name}(\n" + "".join(f"    {arg},\n" for arg in args) + f"){result}"


def arguments(args: ast.arguments) -> Iterator[str]:
    positional = [*args.posonlyargs, *args.args]
    missing = [None] * (len(positional) - len(args.defaults))
    for i, (arg, default) in enumerate(zip(positional, [*missing, *args.defaults], strict=True)):
        yield argument(arg, default)
        if i + 1 == len(args.posonlyargs):
            yield "/"
    if args.vararg or args.kwonlyargs:
        yield f"*{ast.unparse(args.vararg)}" if args.vararg else "*"
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        yield argument(arg, default)
    if args.kwarg:
        yield f"**{ast.unparse(args.kwarg)}"


def argument(arg: ast.arg, default: ast.expr | None) -> str:
    equals = " = " if arg.annotation else "="
    return ast.unparse(arg) + (f"{equals}{ast.unparse(default)}" if default is not None else "")


def table(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [columns, ("---",) * len(columns), *rows]
    cells = [[" ".join(escaped(cell).split()).replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells) + "\n"


def code(source: str) -> str:
    return f"```python\n{source}\n```\n"


def text(doc: str | None) -> str:
    """A docstring as Markdown: paragraphs; what is laid out in columns or indented keeps its layout."""
    if not doc:
        return ""
    parts = []
    for paragraph in re.split(r"\n\s*\n", doc):
        laid_out = re.search(r"^ |\S {2,}\S", paragraph, re.MULTILINE)
        parts.append(f"```text\n{paragraph}\n```" if laid_out else escaped(paragraph))
    return "\n\n".join(parts) + "\n"


def escaped(paragraph: str) -> str:
    """Markdown would take <think> for a tag; between backticks it is safe."""
    spans = paragraph.split("`")
    return "`".join(span if i % 2 else span.replace("<", "&lt;") for i, span in enumerate(spans))


def write_pages(pages: dict[Path, str], *, is_check: bool) -> int:
    """Write the pages, or only say how those in the tree differ. Returns the exit code."""
    stale = 0
    for path, new in pages.items():
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        name = path.relative_to(ROOT).as_posix()
        if not is_check:
            path.write_text(new, encoding="utf-8")
        elif new != old:
            diff = difflib.unified_diff(old.splitlines(), new.splitlines(), name, "sources", lineterm="", n=1)
            print("\n".join(diff))
            print(f"{name} is not what the sources say: run `make docs`", file=sys.stderr)
            stale = 1
    return stale


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is not up to date")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    return write_pages({PAGE: page()}, is_check=args.check)


if __name__ == "__main__":
    raise SystemExit(main())
