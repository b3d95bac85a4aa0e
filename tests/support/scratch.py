"""A scratch environment: a real venv with a site-packages of its own, where pip installs and uninstalls plugins.

It sees what the running environment has (ds4, numpy, ...) and adds to it; nothing outside its folder changes.
"""

from __future__ import annotations

import os
import site
import subprocess
import sys
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tests.support.fake_plugins import ROOT, _file_name


@dataclass(frozen=True)
class Package:
    """A distribution of one module, written as a wheel: no build, so that a dozen of them take no time."""

    distribution: str
    code: str
    version: str = "1.0"
    group: str = "ds4.backends"
    requires: tuple[str, ...] = ()
    extra: str | None = None  # name of a second, empty module

    def wheel(self, folder: Path) -> Path:
        stem = f"{_file_name(self.distribution)}-{self.version}"
        info, module = f"{stem}.dist-info", f"{_file_name(self.distribution)}_plugin"
        needs = "".join(f"Requires-Dist: {name}\n" for name in self.requires)
        files = {
            f"{module}.py": self.code,
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {self.distribution}\nVersion: {self.version}\n{needs}",
            f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            f"{info}/entry_points.txt": f"[{self.group}]\n{self.distribution} = {module}\n",
        }
        if self.extra is not None:
            files[f"{self.extra}.py"] = ""
        files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in (*files, f"{info}/RECORD"))
        path = folder / f"{stem}-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for name, text in files.items():
                archive.writestr(name, text)
        return path


class Scratch:
    """A venv in `folder`, without a pip of its own: the running one works on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
        (self.site_packages,) = folder.glob("lib/python3*/site-packages")
        # addsitedir and not a bare path: an editable install of ds4 is found through a .pth file of its own.
        lines = [f"import site; site.addsitedir({path!r})\n" for path in site.getsitepackages()]
        (self.site_packages / "zz_outer.pth").write_text("".join(lines), encoding="utf-8")

    def install(self, *packages: Package | Path) -> None:
        """Packages, and source folders (those are built; setuptools has to be there)."""
        wheels = self.folder / "wheels"
        wheels.mkdir(exist_ok=True)
        paths = [package.wheel(wheels) if isinstance(package, Package) else package for package in packages]
        self._pip("install", "--no-index", "--no-deps", "--no-build-isolation", *map(str, paths))

    def uninstall(self, distribution: str) -> None:
        self._pip("uninstall", "--yes", distribution)

    def _pip(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(self.python), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=self.environment())
        assert done.returncode == 0, done.stdout + done.stderr

    def environment(self, **switches: str) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("DS4_", "PYTHON", "PYTEST"))}
        return {**kept, "PYTHONPATH": str(ROOT), **switches}

    def run(self, *arguments: str, **switches: str) -> subprocess.CompletedProcess[str]:
        """The environment's Python, in its folder."""
        return subprocess.run(
            [str(self.python), *arguments],
            env=self.environment(**switches),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=120,
        )
