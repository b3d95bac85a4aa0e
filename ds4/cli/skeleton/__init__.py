"""The package that `ds4 plugin new` writes: templates beside this file, and what is put into them. Prints nothing.

plugins/ds4-example is what `write("example", ...)` gives, byte for byte. To change it, change a template and write it
again: `make example`.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType

from ds4.errors import BackendError, OutputError

ABOUT = """\
Write a package ds4-NAME with a backend in plain NumPy: complete, slow, and made to be changed part by part. It has its
own tests, among them the conformance suite, and needs no change in ds4."""

NAME_FORM = re.compile(r"[a-z](?:_?[a-z0-9])*")
MOST_LETTERS = 40
RESERVED = ("auto",)

MODULES = (
    "__init__",
    "arithmetic",
    "attention",
    "backend",
    "cache",
    "compressor",
    "hyper",
    "indexer",
    "model",
    "moe",
    "rope",
    "runner",
    "weights",
)

FILES: Mapping[str, str] = MappingProxyType(
    {
        "pyproject.toml": "pyproject.toml.tmpl",
        "README.md": "README.md.tmpl",
        ".gitignore": "gitignore.tmpl",
        ".github/workflows/test.yml": "test.yml.tmpl",
        **{f"@module@/{module}.py": f"{module}.py.tmpl" for module in MODULES},
        "@module@/py.typed": "py.typed.tmpl",
        "tests/test_backend.py": "test_backend.py.tmpl",
        "tests/test_conformance.py": "test_conformance.py.tmpl",
    }
)
"""Files of the package, and the template of each."""


@dataclass(frozen=True)
class Names:
    """What a new backend and its parts are called."""

    backend: str  # tpu_v9

    @classmethod
    def of(cls, name: str) -> Names:
        """Raises BackendError for a name that a backend, a module and a distribution cannot all have."""
        fits = NAME_FORM.fullmatch(name) and len(name) <= MOST_LETTERS and name not in RESERVED
        if not fits or keyword.iskeyword(name):
            raise BackendError(
                f"a new backend cannot be called {name!r}: use at most {MOST_LETTERS} lower-case letters, digits and "
                "single underscores, beginning with a letter, and no word of Python",
                backend=name,
            )
        return cls(name)

    @property
    def distribution(self) -> str:  # ds4-tpu-v9
        return f"ds4-{self.backend.replace('_', '-')}"

    @property
    def module(self) -> str:  # ds4_tpu_v9
        return f"ds4_{self.backend}"

    @property
    def class_stem(self) -> str:  # TpuV9
        return "".join(word.capitalize() for word in self.backend.split("_"))

    def put_into(self, text: str) -> str:
        """The text of a template, or the path of a file, with these names in it."""
        marks = {"name": self.backend, "dist": self.distribution, "module": self.module, "Class": self.class_stem}
        return re.sub(r"@(name|dist|module|Class)@", lambda mark: marks[mark[1]], text)


def render(name: str) -> dict[str, str]:
    """The files of a new package: text by path within its folder."""
    names, folder = Names.of(name), files(__name__)
    return {names.put_into(path): names.put_into((folder / t).read_text("utf-8")) for path, t in FILES.items()}


def write(name: str, parent: Path) -> Path:
    """Write the package of a new backend as a new folder in `parent`; returns the folder.

    Raises BackendError for the name, OutputError when the folder is there already or `parent` is not.
    """
    texts = render(name)
    if not parent.is_dir():
        raise OutputError(f"there is no folder {parent} to put a package into", file=str(parent))
    folder = parent / Names.of(name).distribution
    try:
        folder.mkdir()
    except FileExistsError:
        raise OutputError(f"{folder} is there already; move it away, or use --dir", file=str(folder)) from None
    for path, text in texts.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8", newline="\n")
    return folder
