"""A world of broken plugins, installed by pip in a scratch environment: none stops another or hides its reason.

What bad code alone can show is in tests/unit; here the distributions, the processes and the command line are real.
"""

from __future__ import annotations

import json
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from ds4.backend.hookspecs import ENTRY_POINT_GROUP
from tests.support.fake_plugins import backend_code
from tests.support.scratch import Package, Scratch

NULL = """
from ds4.plugin import Capabilities, hookimpl
from ds4.testing import NullBackend, NullRunner

class Runner(NullRunner):
    pass

class Null(NullBackend):
    name = {name!r}
    api_version = 1

    def open(self, model, limits, options):
        return Runner(model, limits, options, None)

@hookimpl
def ds4_register_backends(register):
    register(Null)
"""
"""A backend that runs, for any model; tests bend it."""

LIAR_FORK = NULL.format(name="liar-fork").replace(
    "    pass", "    def copy_state(self, slabs, pages):\n        raise NotImplementedError('no copy engine')"
)
LIAR_FLOAT16 = NULL.format(name="liar-float16").replace(
    "        return Runner",
    "        if options.cache_dtype == 'float16':\n"
    "            raise ValueError('half is not supported')\n"
    "        return Runner",
)
BAD_HOOK = "@hookimpl\ndef {}({}):\n    register(Fake)\n"

REFUSED = {
    "raises": (Package("ds4-raises", "raise RuntimeError('no light')\n", "0.7"), "raised RuntimeError: no light"),
    "needs": (
        Package("ds4-needs", "import no_such_driver\n", "0.7", requires=("no-such-driver>=2",)),
        "importing ds4_needs_plugin raised ModuleNotFoundError: No module named 'no_such_driver'",
    ),
    "old": (
        Package("ds4-old", backend_code("old", api_version=0), "0.7"),
        "for version 0 of the plugin API, and this ds4 takes version 1: install a ds4-old written for 1",
    ),
    "new": (
        Package("ds4-new", backend_code("new", api_version=2), "0.7"),
        "for version 2 of the plugin API, and this ds4 takes version 1: install a newer ds4, or a ds4-new "
        "written for 1",
    ),
    "twin": (
        Package("ds4-twin-b", backend_code("twin"), "0.7"),
        "backend name 'twin' is already that of distribution ds4-twin-a",
    ),
    "misspelt": (
        Package("ds4-misspelt", backend_code("misspelt", hook=BAD_HOOK.format("ds4_registr_backends", "register"))),
        "it implements an unknown hook ds4_registr_backends; did you mean ds4_register_backends?",
    ),
    "signature": (
        Package("ds4-signature", backend_code("x", hook=BAD_HOOK.format("ds4_register_backends", "register, engine"))),
        "its hooks are not valid: Argument(s) {'engine'} are declared in the hookimpl",
    ),
    "observer": (
        Package("ds4-observer", "import no_such_metrics\n", "0.7", group="ds4.plugins"),
        "No module named 'no_such_metrics'",
    ),
}
"""Plugins that are left out, each with what must be said about it."""

ABSENT = {
    "probe-raises": (
        Package("ds4-probe-raises", backend_code("probe-raises", priority=80, probe="raise OSError('driver is ill')")),
        "its probe raised OSError: driver is ill",
    ),
    "probe-hangs": (
        Package("ds4-probe-hangs", backend_code("probe-hangs", priority=90, probe="import time; time.sleep(3600)")),
        "its probe did not answer within 1 s (DS4_PROBE_TIMEOUT allows it more)",
    ),
}
"""Backends that are loaded but cannot be used."""

RUNTIME = (
    Package(
        "ds4-bad-observer",
        "from ds4.plugin import hookimpl\napi_version = 1\n"
        "@hookimpl\ndef ds4_observe_step(record):\n    raise OSError('disk full')\n",
        group="ds4.plugins",
    ),
    Package(
        "ds4-bad-command",
        "from ds4.plugin import hookimpl\napi_version = 1\n"
        "@hookimpl\ndef ds4_register_commands(register):\n    register('run', 'better', print, print)\n",
        group="ds4.plugins",
    ),
    Package("ds4-liar-fork", LIAR_FORK),
    Package("ds4-liar-float16", LIAR_FLOAT16),
)
"""Plugins that load and then fail at work."""

GOOD = (Package("ds4-twin-a", NULL.format(name="twin")), Package("zz-good", NULL.format(name="good")))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Scratch:
    scratch = Scratch(tmp_path_factory.mktemp("world"))
    broken = [package for package, _ in (*REFUSED.values(), *ABSENT.values())]
    scratch.install(*broken, *RUNTIME, *GOOD)
    return scratch


@pytest.fixture(scope="module")
def backends(world: Scratch) -> tuple[dict[tuple[str, str], dict[str, Any]], list[str]]:
    """What `ds4 backends --json` says: rows by distribution and name, and the lines of stderr."""
    done = world.run("-m", "ds4", "backends", "--json", DS4_PROBE_TIMEOUT="1")
    assert done.returncode == 0, done.stderr
    return {(row["distribution"], row["name"]): row for row in json.loads(done.stdout)}, done.stderr.splitlines()


# ---------------------------------------------------------------- what is said


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_plugin_is_listed_and_warned_about_with_its_reason(backends: Any, name: str) -> None:
    rows, lines = backends
    package, said = REFUSED[name]
    row = rows[package.distribution, package.distribution]
    assert row["available"] is False and said in row["reason"]
    title = f"ds4: warning: plugin {package.distribution} of {package.distribution} {package.version} is left out: "
    assert [line for line in lines if line.startswith(title)] == [title + row["reason"]]


@pytest.mark.parametrize("name", ABSENT)
def test_a_backend_whose_probe_fails_is_listed_with_its_reason(backends: Any, name: str) -> None:
    rows, _ = backends
    package, said = ABSENT[name]
    assert (rows[package.distribution, name]["available"], rows[package.distribution, name]["reason"]) == (False, said)


def test_all_others_are_available_and_nothing_else_is_said(backends: Any) -> None:
    rows, lines = backends
    # Real plugins may be installed beside the tests (CI installs ds4-example): they are not of this world.
    real = {entry.dist.name for entry in entry_points(group=ENTRY_POINT_GROUP) if entry.dist} - {"ds4"}
    available = {key for key, row in rows.items() if row["available"] and key[0] not in real}
    assert available == {
        ("ds4", "cpu"),
        ("ds4", "null"),
        ("ds4-twin-a", "twin"),
        ("zz-good", "good"),
        ("ds4-liar-fork", "liar-fork"),
        ("ds4-liar-float16", "liar-float16"),
    }
    assert len(lines) == len(REFUSED)


def test_the_command_line_starts_and_our_commands_stay_ours(world: Scratch) -> None:
    done = world.run("-m", "ds4", "--help")
    assert done.returncode == 0
    assert " run " in done.stdout and "better" not in done.stdout
    lines = done.stderr.splitlines()
    assert (
        "ds4: warning: the commands of plugin ds4-bad-command of ds4-bad-command 1.0 are left out: "
        "there is another command 'run' already" in lines
    )
    assert len(lines) == len(REFUSED) + 1


def test_running_in_this_world(world: Scratch) -> None:
    """The commonest use, through everything that is broken: auto passes over the ill ones and says so."""
    done = world.run("-m", "ds4", "run", "-p", "What is 1 + 1?", DS4_PROBE_TIMEOUT="1")
    assert done.returncode == 0 and "1 + 1 = 2." in done.stdout
    observer = "ds4: warning: the step observer of plugin ds4-bad-observer of ds4-bad-observer 1.0 is switched off"
    lines = done.stderr.splitlines()
    (note,) = [line for line in lines if line.startswith("ds4: warning: using backend cpu; not available: ")]
    assert "probe-hangs (its probe did not answer within 1 s (DS4_PROBE_TIMEOUT allows it more))" in note
    assert "probe-raises (its probe raised OSError: driver is ill)" in note
    assert len([line for line in lines if line.startswith(observer) and line.endswith("OSError: disk full")]) == 1


# ---------------------------------------------------------------- at work

PRELUDE = """
import json, subprocess, sys, warnings
import ds4, ds4.data
warnings.simplefilter("ignore")
model = ds4.Model.open(ds4.data.bundled_model())
limits = ds4.Limits(sessions=3, context=512)

def said(call):
    try:
        return call() and None
    except ds4.Ds4Error as error:
        return [type(error).__name__, str(error)]
"""


def answers(world: Scratch, code: str, *arguments: str, **switches: str) -> Any:
    """What a program prints as JSON."""
    done = world.run("-c", PRELUDE + code, *arguments, **switches)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_backend_that_cannot_do_what_it_declares_is_a_typed_error_and_the_engine_lives(world: Scratch) -> None:
    code = """
with ds4.Engine.open(model, "liar-fork", limits) as engine:
    a = engine.create_session()
    a.feed([1, 2, 3])
    free = engine.free_pages
    fork = said(a.fork)
    engine.check_integrity()
    b = engine.create_session()
    engine.step([(a, [4]), (b, [5])])
    alive = [a.pos, b.pos, engine.free_pages == free - 1]
half = said(lambda: ds4.Engine.open(model, "liar-float16", limits, cache_dtype="float16"))
with ds4.Engine.open(model, "liar-float16", limits) as engine:
    c = engine.create_session()
    c.feed([1, 2])
print(json.dumps([fork, alive, half, c.is_closed]))
"""
    fork, alive, half, closed = answers(world, code)
    assert fork[0] == "StepError"
    assert fork[1].startswith(
        "backend 'liar-fork' failed in copy_state: NotImplementedError: no copy engine. No session"
    )
    assert alive == [4, 1, True]
    assert half[0] == "BackendError"
    assert half[1].startswith("backend liar-float16 failed in open: ValueError: half is not supported")
    assert closed is True


LAZY = NULL.format(name="lazy").replace(
    "    pass",
    "    def export_state(self, slab, pages):\n"
    "        import ds4_lazy_later  # a part that is loaded when first needed\n"
    "        return super().export_state(slab, pages)",
)


def test_a_plugin_that_is_uninstalled_while_its_engine_is_open(tmp_path: Path) -> None:
    """What is in memory works on; what is not is a typed error; the next process knows nothing of it."""
    scratch = Scratch(tmp_path / "venv")
    scratch.install(Package("ds4-lazy", LAZY, extra="ds4_lazy_later"), Package("zz-good", NULL.format(name="good")))
    code = """
engine = ds4.Engine.open(model, "lazy", limits)
a = engine.create_session()
a.feed([1, 2, 3])
print("open", flush=True)
sys.stdin.readline()  # uninstalled now
a.feed([4])
export = said(a.export_state)
b = a.fork()
engine.step([(a, [5]), (b, [6, 7])])
engine.check_integrity()
again = said(lambda: ds4.Engine.open(model, "lazy", limits))
good = ds4.Engine.open(model, "good", limits)
good.create_session().feed([1])
engine.close()
print(json.dumps([a.pos, b.pos, export, again]))
"""
    with _process(scratch, PRELUDE + code) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "open\n"
        scratch.uninstall("ds4-lazy")
        out, err = process.communicate("\n", timeout=60)
    assert process.returncode == 0, err
    a_pos, b_pos, export, again = json.loads(out)
    assert (a_pos, b_pos) == (5, 6)
    assert export[0] == "StepError" and "failed in export_state: ModuleNotFoundError" in export[1]
    assert again[0] == "BackendError" and "there is no backend 'lazy'" in again[1]
    done = scratch.run("-m", "ds4", "backends", "--json")
    rows = {row["name"]: row["available"] for row in json.loads(done.stdout)}
    assert (done.stderr, "lazy" in rows, rows["good"], rows["cpu"]) == ("", False, True, True)


def test_a_plugin_of_which_only_the_files_are_gone(tmp_path: Path) -> None:
    scratch = Scratch(tmp_path / "venv")
    scratch.install(Package("ds4-lazy", LAZY, extra="ds4_lazy_later"), Package("zz-good", NULL.format(name="good")))
    (scratch.site_packages / "ds4_lazy_plugin.py").unlink()
    for cached in scratch.site_packages.glob("__pycache__/ds4_lazy_plugin.*"):
        cached.unlink()
    done = scratch.run("-m", "ds4", "backends", "--json")
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert "importing ds4_lazy_plugin raised ModuleNotFoundError" in rows["ds4-lazy"]["reason"]
    assert rows["good"]["available"] and rows["cpu"]["available"]


def _process(scratch: Scratch, code: str) -> Any:
    import subprocess

    return subprocess.Popen(
        [str(scratch.python), "-c", code],
        env=scratch.environment(),
        cwd=scratch.folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
