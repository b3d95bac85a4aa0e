"""The `ds4` command: choosing a command, help, exit codes, one-line errors. What commands do is tested elsewhere."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from ds4.cli import COMMANDS, main
from ds4.errors import BackendWarning, BatchError, PluginWarning
from tests.support.fake_plugins import PluginFolder, backend_code

Commands = dict[str, str]
MakeCommand = Callable[..., Commands]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> MakeCommand:
    """command(run) -> a table of commands for `main` with `work`, which calls run(args), and one that must not load."""

    def make(run: Callable[[argparse.Namespace], int]) -> Commands:
        module: Any = ModuleType("fake_work")
        module.HELP, module.run = "do some work", run
        module.configure = lambda parser: parser.add_argument("--size", type=int, default=1)
        monkeypatch.setitem(sys.modules, "fake_work", module)
        return {"work": "fake_work", "other": "no_such_module"}

    return make


def raiser(error: BaseException) -> Callable[[argparse.Namespace], int]:
    def run(args: argparse.Namespace) -> int:
        raise error

    return run


def test_the_command_gets_its_options_and_gives_the_exit_code(command: MakeCommand) -> None:
    assert main(["work", "--size", "7"], command(lambda args: int(args.size))) == 7


def test_our_error_is_one_line_and_exit_code_2(command: MakeCommand, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["work"], command(raiser(BatchError("two\nlines", item=3)))) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", "ds4: error: two lines (item=3)\n")


def test_missing_file_is_one_line(command: MakeCommand, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["work"], command(lambda args: os.open("no/such/file", os.O_RDONLY))) == 2
    assert capsys.readouterr().err == "ds4: error: no/such/file: No such file or directory\n"


def test_ctrl_c_is_exit_code_130(command: MakeCommand, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["work"], command(raiser(KeyboardInterrupt()))) == 130
    assert capsys.readouterr().err == "ds4: interrupted\n"


@pytest.mark.parametrize("error", [RuntimeError("a fault of ours"), OSError("no file in it")])
def test_a_fault_of_ds4_keeps_its_traceback(command: MakeCommand, error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)):
        main(["work"], command(raiser(error)))


@pytest.mark.parametrize("argv", [[], ["nonsense"], ["work", "--nonsense"]])
def test_bad_usage_is_exit_code_2(command: MakeCommand, argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    commands = {"work": command(lambda args: 0)["work"]}
    with pytest.raises(SystemExit) as caught:
        main(argv, commands)
    assert caught.value.code == 2
    assert "usage: ds4" in capsys.readouterr().err


@pytest.mark.parametrize("category", [PluginWarning, BackendWarning])
def test_our_warnings_are_one_line(
    command: MakeCommand, category: type[Warning], capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: argparse.Namespace) -> int:
        warnings.simplefilter("always")
        warnings.warn(category("cuda is left out"), stacklevel=1)
        warnings.warn(RuntimeWarning("of numpy"), stacklevel=1)
        return 0

    before = warnings.showwarning
    assert main(["work"], command(run)) == 0
    err = capsys.readouterr().err
    assert err.startswith("ds4: warning: cuda is left out\n") and "RuntimeWarning: of numpy" in err
    assert warnings.showwarning is before


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert re.fullmatch(r"ds4 (\d+\.\d+\S*|\(not installed\))\n", capsys.readouterr().out)


def test_help_lists_every_command_and_ends_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for name in COMMANDS:
        assert re.search(rf"^ +{name} +\w", text, re.MULTILINE)
    assert text.rstrip().splitlines()[-2:] == ["example:", "  ds4 run --demo"]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_ends_with_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    _, _, example = text.partition("\nexample")
    assert re.search(rf"^ +(\w+=\S+ )*ds4 {name}\b", example, re.MULTILINE), text


# ---------------------------------------------------------------- as a process


def ds4(plugins: PluginFolder, *argv: str, **switches: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ds4", *argv]
    return subprocess.run(command, env=plugins.environment(**switches), capture_output=True, text=True, timeout=60)


def test_python_m_ds4_backends_as_json(plugins: PluginFolder) -> None:
    plugins.add("toy", backend_code("toy", priority=3), version="1.2")
    plugins.add("gone", backend_code("gone", probe="return Probe(False, 'no [driver] found')"))
    done = ds4(plugins, "backends", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert rows["toy"] == {
        "name": "toy",
        "distribution": "toy",
        "version": "1.2",
        "available": True,
        "reason": None,
        "devices": ["fake 0"],
        "priority": 3,
    }
    assert (rows["gone"]["available"], rows["gone"]["reason"]) == (False, "no [driver] found")


def test_backends_as_a_table_keeps_a_reason_on_one_line(plugins: PluginFolder) -> None:
    reason = "no [driver] found, " + "and this sentence is longer than a terminal is wide, " * 3
    plugins.add("gone", backend_code("gone", probe=f"return Probe(False, {reason!r})"))
    done = ds4(plugins, "backends")
    (line,) = [line for line in done.stdout.splitlines() if line.split()[:1] == ["gone"]]
    assert f"no: {reason.strip()}" in line


def test_wrong_switch_is_one_line(plugins: PluginFolder) -> None:
    done = ds4(plugins, "backends", DS4_STRICT_PLUGINS="perhaps")
    assert done.returncode == 2
    assert done.stderr.startswith("ds4: error: DS4_STRICT_PLUGINS cannot be 'perhaps'")
    assert len(done.stderr.splitlines()) == 1


def test_a_closed_pipe_is_quiet(plugins: PluginFolder) -> None:
    for i in range(40):  # more than a pipe's buffer
        plugins.add(f"p{i}", backend_code(f"p{i}", probe=f"return Probe(False, {'x' * 4000!r})"))
    process = subprocess.Popen(
        [sys.executable, "-m", "ds4", "backends", "--json"],
        env=plugins.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None
    with process:
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=60) == 141


def test_a_pipe_closed_before_the_first_line_is_quiet_too(plugins: PluginFolder) -> None:
    """Little output is written only when the buffer is flushed: that failure has to be met as well."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "ds4", "backends", "--json"]
    with os.fdopen(write_end, "wb") as closed:
        done = subprocess.run(
            command, env=plugins.environment(), stdout=closed, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert (done.returncode, done.stderr) == (141, "")
