"""The hooks beside backends, as plugins have them: observers of steps, commands; and which versions are taken."""

from __future__ import annotations

import argparse
import re
import tomllib
import warnings
from pathlib import Path
from typing import Any

import pytest

import ds4
from ds4.backend import versions
from ds4.backend.registry import Registry
from ds4.cli import main
from ds4.errors import PluginError, PluginWarning
from ds4.testing import NullBackend, NullModel
from tests.support.fake_plugins import ROOT, PluginFolder, backend_code

OBSERVER = """
from ds4.plugin import hookimpl
api_version = 1
seen = []

@hookimpl
def ds4_observe_step(record):
    seen.append(record)
"""
COMMAND = """
from ds4.plugin import Ds4Error, hookimpl
api_version = 1

def configure(parser):
    parser.add_argument("--size", type=int, default=1)

def run(args):
    if args.size == 0:
        raise Ds4Error("size must be above 0", size=0)
    print(1000 // (args.size + 1))

@hookimpl
def ds4_register_commands(register):
    register(name="divide", help="100% division", configure=configure, run=run)
"""
OTHERS = "ds4.plugins"
PROJECTS = [*sorted(ROOT.glob("plugins/*/pyproject.toml")), *sorted(ROOT.glob("examples/*/pyproject.toml"))]


def load(plugins: PluginFolder, **options: Any) -> Registry:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return Registry.load(path=[str(plugins.path)], **options)


def load_with_warnings(plugins: PluginFolder) -> tuple[Registry, list[str]]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        registry = Registry.load(path=[str(plugins.path)])
    return registry, [str(w.message) for w in seen]


# ---------------------------------------------------------------- observers of plugins


def test_plugins_observe_engines_that_are_opened_by_name(
    plugins: PluginFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugins.add("steplog", OBSERVER, group=OTHERS)
    plugins.add(
        "worse", OBSERVER.replace("seen.append(record)", "raise OSError('disk full')"), group=OTHERS, version="2"
    )
    plugins.add("ds4", backend_code("fake"), point="fake")
    import steplog_plugin

    registry = load(plugins)
    monkeypatch.setattr(Registry, "load", classmethod(lambda cls: registry))
    monkeypatch.setattr(Registry, "choose", lambda self, name: NullBackend())
    with ds4.Engine.open(NullModel(), "null", ds4.Limits(sessions=1, context=256)) as engine:
        session = engine.create_session()
        with pytest.warns(
            PluginWarning, match="^the step observer of plugin worse of worse 2 is switched off .*disk full"
        ):
            session.feed([1])
        session.feed([2])
    assert [record.step for record in steplog_plugin.seen] == [1, 2]
    # A backend given as an object: no plugin is looked for.
    with ds4.Engine.open(NullModel(), NullBackend(), ds4.Limits(sessions=1, context=256)) as engine:
        engine.create_session().feed([1])
    assert len(steplog_plugin.seen) == 2


def test_any_hook_works_in_either_group(plugins: PluginFolder) -> None:
    plugins.add("both", backend_code("both") + OBSERVER + COMMAND)
    plugins.add("other", backend_code("other"), group=OTHERS)
    registry = load(plugins)
    assert [backend.name for backend in registry.backends()] == ["both", "other"]
    assert [label for _, label in registry.observers()] == ["the step observer of plugin both of both 1.0"]
    assert [(command.name, command.owner) for command in registry.commands()] == [("divide", "plugin both of both 1.0")]


def test_one_module_in_both_groups_is_one_plugin(plugins: PluginFolder) -> None:
    module = plugins.add("both", backend_code("both") + OBSERVER)
    info = plugins.path / "both-1.0.dist-info" / "entry_points.txt"
    info.write_text(f"[ds4.backends]\nboth = {module}\n[ds4.plugins]\nboth = {module}\n", encoding="utf-8")
    registry = load(plugins)
    assert (len(registry.backends()), len(registry.observers()), len(registry.entries())) == (1, 1, 1)


def test_the_plugins_switch_picks_observers_too(plugins: PluginFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    plugins.add("steplog", OBSERVER, group=OTHERS)
    plugins.add("fake", backend_code("fake"))
    monkeypatch.setenv("DS4_PLUGINS", "fake")
    registry = load(plugins)
    assert registry.observers() == ()
    assert [(e.name, e.reason) for e in registry.entries()][1] == ("steplog", "left out by DS4_PLUGINS=fake")


@pytest.mark.parametrize(
    ("code", "group", "said"),
    [
        (
            OBSERVER,
            "ds4.backends",
            "no hook ds4_register_backends; a plugin without backend belongs into the group ds4.plugins",
        ),
        (OBSERVER.replace("api_version = 1", ""), OTHERS, "mine_plugin does not say for which version"),
        (OBSERVER.replace("api_version = 1", "api_version = 2"), OTHERS, "mine_plugin was written for version 2"),
        (OBSERVER.replace("step(record)", "step(record, engine)"), OTHERS, "Argument(s) {'engine'} are declared"),
        (
            OBSERVER.replace("observe_step", "observe_steps"),
            OTHERS,
            "unknown hook ds4_observe_steps; did you mean ds4_observe_step?",
        ),
        (OBSERVER.replace("@hookimpl", ""), OTHERS, "it has ds4_observe_step but no hook of that name"),
        (backend_code() + OBSERVER.replace("@hookimpl", ""), "ds4.backends", "it has ds4_observe_step but no hook"),
        ("api_version = 1\ndef ds4_on_step(record): pass\n", OTHERS, "above a function ds4_observe_step"),
        (
            "api_version = 1\n",
            OTHERS,
            "it has no hook ds4_register_backends, ds4_observe_step or ds4_register_commands",
        ),
        (
            backend_code(hook="api_version = 7\n@hookimpl\ndef ds4_from_the_future(x): pass\n"),
            "ds4.backends",
            "for version 7",
        ),
    ],
)
def test_a_bad_plugin_is_left_out_with_a_sentence(plugins: PluginFolder, code: str, group: str, said: str) -> None:
    plugins.add("mine", code, group=group, version="0.3")
    plugins.add("zz-good", OBSERVER, group=OTHERS)
    registry, (message,) = load_with_warnings(plugins)
    assert message.startswith("plugin mine of mine 0.3 is left out: ") and said in message and "\n" not in message
    assert len(registry.observers()) == 1
    with pytest.raises(PluginError, match=re.escape(said)):
        load(plugins, strict=True)


@pytest.mark.parametrize("project", PROJECTS, ids=lambda path: path.parent.name)
def test_the_packages_of_this_repository_are_taken(
    plugins: PluginFolder, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where none is installed: their entry points, with their sources on the path."""
    about = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
    groups = [(group, points) for group, points in about["entry-points"].items() if group.startswith("ds4.")]
    lines = [f"[{group}]\n{name} = {value}\n" for group, points in groups for name, value in points.items()]
    plugins.add_info(about["name"], "".join(lines), version=about["version"])
    monkeypatch.syspath_prepend(project.parent)
    registry = load(plugins)
    assert [entry.reason for entry in registry.entries() if entry.backend is None] == []
    assert len(registry.plugins()) == len(lines) == 1


# ---------------------------------------------------------------- versions


@pytest.mark.parametrize(
    ("version", "sentence"),
    [
        (2, None),
        (3, None),
        (
            1,
            "Mine was written for version 1 of the plugin API, and this ds4 takes versions 2 to 3: install a ds4-mine "
            "written for 3, or ds4 0.1 or newer",
        ),
        (
            0,
            "Mine was written for version 0 of the plugin API, and this ds4 takes versions 2 to 3: install a ds4-mine "
            "written for 3",
        ),
        (
            4,
            "Mine was written for version 4 of the plugin API, and this ds4 takes versions 2 to 3: install a newer "
            "ds4, or a ds4-mine written for 3",
        ),
        (True, "Mine has the api_version True, which is not a whole number (this ds4 takes versions 2 to 3)"),
    ],
)
def test_a_refusal_says_which_versions_fit(version: Any, sentence: str | None) -> None:
    assert versions.misfit("Mine", "ds4-mine", version, oldest=2, newest=3) == sentence


def test_every_version_that_is_taken_has_its_releases() -> None:
    assert set(versions.RELEASES) >= set(range(versions.MIN_API_VERSION, versions.API_VERSION + 1))
    assert 1 <= versions.MIN_API_VERSION <= versions.API_VERSION


def test_the_window_counts_not_one_version(plugins: PluginFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the API grows to 2, plugins written for 1 are still taken as long as the window holds it."""
    monkeypatch.setattr(versions.misfit, "__kwdefaults__", {"oldest": 1, "newest": 2})
    plugins.add("old", backend_code("old", api_version=1))
    plugins.add("new", backend_code("new", api_version=2))
    assert len(load(plugins).backends()) == 2


# ---------------------------------------------------------------- commands


@pytest.fixture
def divide(plugins: PluginFolder) -> PluginFolder:
    plugins.add("maths", COMMAND, group=OTHERS, version="0.4")
    return plugins


def test_a_command_of_a_plugin_runs(divide: PluginFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["divide", "--size", "9"]) == 0
    assert capsys.readouterr().out == "100\n"


def test_it_is_in_the_help_with_its_owner(divide: PluginFolder, capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["--help"], ["divide", "--help"]):
        with pytest.raises(SystemExit) as caught:
            main(argv)
        assert caught.value.code == 0
        assert "100% division (plugin maths of maths 0.4)" in " ".join(capsys.readouterr().out.split())


def test_its_typed_error_is_one_line(divide: PluginFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["divide", "--size", "0"]) == 2
    assert capsys.readouterr().err == "ds4: error: size must be above 0 (size=0)\n"


def test_a_fault_in_it_names_the_plugin(divide: PluginFolder) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        main(["divide", "--size", "-1"])
    assert caught.value.__notes__ == [
        "This was raised by the command 'divide' of plugin maths of maths 0.4, which is not part of ds4."
    ]


def test_a_fault_in_its_options_touches_nobody_else(plugins: PluginFolder, capsys: pytest.CaptureFixture[str]) -> None:
    plugins.add("maths", COMMAND.replace('"--size"', '"-s", "--help"'), group=OTHERS)
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "100% division" in capsys.readouterr().out
    with pytest.raises(argparse.ArgumentError) as caught:
        main(["divide"])
    assert "plugin maths of maths 1.0" in caught.value.__notes__[0]


def test_our_own_commands_load_no_plugin(plugins: PluginFolder, capsys: pytest.CaptureFixture[str]) -> None:
    plugins.add("noisy", "raise RuntimeError('imported')\n", group=OTHERS)
    with pytest.raises(SystemExit):
        main(["inspect", "--help"])
    with pytest.raises(SystemExit):
        main(["--version"])
    assert "noisy" not in capsys.readouterr().err


def test_a_broken_plugin_does_not_take_the_help_down(divide: PluginFolder, capsys: pytest.CaptureFixture[str]) -> None:
    divide.add("noisy", "raise SystemExit('imported')\n", group=OTHERS)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        with pytest.raises(SystemExit) as caught:
            main(["--help"])
    out, err = capsys.readouterr()
    assert caught.value.code == 0 and "divide" in out and " run " in out
    assert (
        err
        == "ds4: warning: plugin noisy of noisy 1.0 is left out: importing noisy_plugin raised SystemExit: imported\n"
    )


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('name="divide"', 'name="run"', "there is another command 'run' already"),
        ('name="divide"', 'name="fine"', "there is another command 'fine' already"),
        ('name="divide"', 'name="Bad name"', "a command cannot be named 'Bad name'"),
        ('name="divide"', "name=None", "a command cannot be named None"),
        ('help="100% division"', "help=None", "the help of command 'divide' is None, not one line of text"),
        ("run=run", "run=None", "the run of command 'divide' is None, not a function"),
        ("configure=configure", "configure=1", "the configure of command 'divide' is 1, not a function"),
        ('    register(name="divide"', '    raise KeyError("x")\n    register(name="divide"', "raised KeyError: 'x'"),
        ("name=", "nam=", "its hook ds4_register_commands raised TypeError"),
    ],
)
def test_bad_commands_are_left_out_and_the_other_hooks_stay(
    plugins: PluginFolder, old: str, new: str, said: str
) -> None:
    first = '    register("fine", "first", configure, run)\n'
    code = COMMAND.replace("(register):\n", f"(register):\n{first}").replace(old, new)
    plugins.add("mine", code + OBSERVER, group=OTHERS, version="0.3")
    plugins.add("zz-good", COMMAND, group=OTHERS)
    registry = load(plugins)
    with pytest.warns(PluginWarning) as warned:
        commands = registry.commands(taken={"run"})
    (message,) = [str(w.message) for w in warned]
    assert message.startswith("the commands of plugin mine of mine 0.3 are left out: ") and said in message
    assert [(command.name, command.owner) for command in commands] == [("divide", "plugin zz-good of zz-good 1.0")]
    assert len(registry.observers()) == 1
    with pytest.raises(PluginError, match=re.escape(said)):
        load(plugins, strict=True).commands(taken={"run"})


def test_of_two_plugins_with_one_command_the_first_by_name_has_it(plugins: PluginFolder) -> None:
    plugins.add("b-maths", COMMAND, group=OTHERS)
    plugins.add("a-maths", COMMAND, group=OTHERS)
    with pytest.warns(PluginWarning, match="commands of plugin b-maths .* another command 'divide'"):
        (command,) = load(plugins).commands()
    assert command.owner == "plugin a-maths of a-maths 1.0"
