"""How `ds4 run` shows replies of a scripted engine: JSON, the live view, plain text on all sorts of outputs."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from ds4.cli import _views
from ds4.cli import run as command
from ds4.cli._together import Reply, Together
from ds4.data import bundled_model
from tests.support.scripted_engine import TOKENIZER, FakeEngine, Runner, prompts


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Runner:
    return Runner(monkeypatch, capsys)


# ---------------------------------------------------------------- JSON


def test_json_document(run: Runner) -> None:
    document = json.loads(run("--json", *prompts("a", "b"))[1])
    assert document["model"] == {"path": str(bundled_model()), "name": "ds4-tiny.gguf", "bundled": True}
    assert (document["backend"], document["path"], document["context"]) == ("fake", "shared", 512)
    totals = document["totals"]
    n_prompt = sum(session["prompt_tokens"] for session in document["sessions"])
    n_tokens = sum(session["tokens"] for session in document["sessions"])
    assert (totals["sessions"], totals["failed"]) == (2, 0)
    assert (totals["prompt_tokens"], totals["tokens"]) == (n_prompt, n_tokens)
    assert set(document["sessions"][0]) == {
        *("prompt", "reasoning", "text", "token_ids", "finish_reason", "error", "prompt_tokens", "tokens"),
        *("seconds", "seconds_to_first_token", "tokens_per_second"),
    }


def test_speeds_come_from_the_clock() -> None:
    ticks = iter(range(100))
    engine = FakeEngine(lambda prompt: "a b c d", SimpleNamespace(context=512, max_rows=100), lambda n: None)
    reply = Reply("q", TOKENIZER.encode_chat([{"role": "user", "content": "q"}]))
    together = Together(engine, TOKENIZER, [reply], params=None, max_tokens=9, clock=lambda: float(next(ticks)))
    while together.step():
        pass
    # The clock is read before each step and after each token: two seconds a token, one more at the end.
    assert (reply.started, reply.first_token, len(reply.tokens)) == (0.0, 1.0, 5)
    assert reply.ended == 10.0
    assert reply.speed(99) == pytest.approx(4 / 9)
    assert reply.seconds(99) == 10.0


def test_the_summary_lists_speeds_or_their_range(run: Runner) -> None:
    run.answers = lambda prompt: "a b c"
    assert re.search(r"^1 session, .* \([\d.]+ each\)", run(*prompts("a"))[2], re.M)
    assert re.search(r"^2 sessions, .* \([\d.]+, [\d.]+ each\)", run(*prompts("a", "b"))[2], re.M)
    assert re.search(r"^9 sessions, .* \([\d.]+ to [\d.]+ each\)", run(*prompts(*"123456789"))[2], re.M)


# ---------------------------------------------------------------- the terminal


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run_live(replies: Sequence[Reply], answers: Callable[[str], Any], height: int = 24) -> tuple[list[str], str]:
    """Frames as shown after each step, and all that was written in the end, without styles."""
    engine = FakeEngine(answers, SimpleNamespace(context=4096, max_rows=100), lambda n: None)
    together = Together(engine, TOKENIZER, replies, params=None, max_tokens=2000)
    out, frame = Terminal(), io.StringIO()

    def console_on(file: io.StringIO) -> Console:
        return Console(file=file, width=60, height=height, force_terminal=True, color_system=None, legacy_windows=False)

    console, frame_console = console_on(out), console_on(frame)
    view = _views.LiveView(together, _views.Setting("m.gguf", "m", False, "fake", 512), console)
    frames = []
    with view:
        while together.step():
            view.update()
            frame.truncate(frame.seek(0))
            frame_console.print(view._frame())
            frames.append(frame.getvalue())
    before = out.tell()
    view.finish(1.0)
    return frames, out.getvalue()[before:]


def chat_reply(text: str) -> Reply:
    return Reply(text, TOKENIZER.encode_chat([{"role": "user", "content": text}]))


def test_live_panes_and_the_whole_text_at_the_end() -> None:
    long = " ".join(f"w{i}" for i in range(150))
    replies = [chat_reply("first"), chat_reply("second [b]")]
    frames, final = run_live(replies, lambda prompt: long if "first" in prompt else "No [i].")
    assert all(len(frame.splitlines()) <= 24 for frame in frames)
    assert "1. first" in frames[0] and "2. second [b]" in frames[0]
    assert "tokens/s together; m on fake, path shared" in frames[-1]
    assert "w149" in frames[-1] and "w9 " not in frames[-1]  # the pane shows the newest lines
    for word in long.split():
        assert word in final
    assert "No [i]." in final
    assert "2 sessions" in final


def test_live_lines_when_there_is_no_room_for_panes() -> None:
    replies = [chat_reply(f"q{i}") for i in range(12)]
    frames, final = run_live(replies, lambda prompt: "short answer", height=15)
    assert all(len(frame.splitlines()) == 13 for frame in frames)
    assert all("short" in line for line in frames[1].splitlines()[:12]) or "short" in frames[-1]
    assert final.count("short answer") == 12


def test_a_model_cannot_steer_the_terminal() -> None:
    nasty = "a\x1b]0;title\x07b\x1b[2J\rc\x9b31m\u202ed"
    frames, final = run_live([chat_reply("q\x1b[31m")], lambda prompt: nasty)
    for text in (*frames, final):
        assert "\x1b]0" not in text and "\x07" not in text and "\x9b" not in text and "\x1b[2J" not in text
    assert "a␛]0;title␇b␛[2J␍c" in final.replace("\n", "")


def test_plain_text_in_a_terminal_is_made_visible_and_elsewhere_kept() -> None:
    def written(out: io.StringIO) -> str:
        engine = FakeEngine(lambda p: "a\x1b[31mb", SimpleNamespace(context=512, max_rows=100), lambda n: None)
        together = Together(engine, TOKENIZER, [chat_reply("q")], params=None, max_tokens=50)
        view = _views.PlainView(together, _views.Setting("m", "m", False, "fake", 512), out, io.StringIO())
        while together.step():
            view.update()
        return out.getvalue()

    assert written(Terminal()) == "[1/1] q\na␛[31mb\n\n"
    assert written(io.StringIO()) == "[1/1] q\na\x1b[31mb\n\n"


def test_plain_text_on_a_narrow_encoding() -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    engine = FakeEngine(lambda p: "naïve 好", SimpleNamespace(context=512, max_rows=100), lambda n: None)
    together = Together(engine, TOKENIZER, [chat_reply("ü")], params=None, max_tokens=50)
    view = _views.PlainView(together, _views.Setting("m", "m", False, "fake", 512), out, io.StringIO())
    while together.step():
        view.update()
    assert raw.getvalue() == b"[1/1] ?\nna?ve ?\n\n"


def test_which_view_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(lambda p: "", SimpleNamespace(context=512, max_rows=100), lambda n: None)
    together = Together(engine, TOKENIZER, [], params=None, max_tokens=1)
    setting = _views.Setting("m", "m", False, "fake", 512)

    def taken(is_terminal: bool, **flags: bool) -> type:
        monkeypatch.setattr("sys.stdout", Terminal() if is_terminal else io.StringIO())
        return type(command._view(SimpleNamespace(**{"json": False, "plain": False} | flags), together, setting))

    assert taken(True) is _views.LiveView
    assert taken(True, plain=True) is taken(False) is _views.PlainView
    assert taken(True, json=True) is taken(False, json=True) is _views.JsonView
