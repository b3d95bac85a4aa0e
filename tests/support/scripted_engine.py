"""A scripted engine behind `ds4 run`: keeps the contract of Engine.step, answers what the test says."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

import ds4
from ds4.cli import run as command
from ds4.errors import BatchError, ContextLimitError, Ds4Error
from ds4.text import Tokenizer
from tests.support.tokenizer_files import EVAL, TINY_MODEL, metadata_of

METADATA = metadata_of(TINY_MODEL)
TOKENIZER = Tokenizer.from_metadata(METADATA)
CASES = json.loads(EVAL.read_text("utf-8"))["cases"]
EOS = TOKENIZER.eos_id


class FakeSession:
    def __init__(self, engine: FakeEngine, seed: int | None) -> None:
        self.engine, self.seed = engine, seed
        self.tokens: list[int] = []
        self.is_closed = False
        self.context = engine.limits.context

    @property
    def pos(self) -> int:
        return len(self.tokens)

    def sample(self, params: Any) -> int:
        self.engine.params = params
        text = TOKENIZER.decode(self.tokens)
        prompt = re.match(r".*<｜Assistant｜></?think>", text, re.S).group()  # type: ignore[union-attr]
        answer = self.engine.answers(prompt)
        if isinstance(answer, Ds4Error):
            raise answer
        n_written = len(self.tokens) - len(TOKENIZER.encode(prompt, parse_special=True))
        ids = TOKENIZER.encode(answer, parse_special=True) if isinstance(answer, str) else answer
        return [*ids, EOS][n_written]

    def close(self) -> None:
        self.is_closed = True


class FakeEngine:
    """Keeps the contract of Engine.step: everything is checked, then everything moves."""

    backend_name = "fake"
    last_path = "shared"

    def __init__(self, answers: Callable[[str], Any], limits: Any, before_step: Callable[[int], None]) -> None:
        self.answers, self.limits, self.before_step = answers, limits, before_step
        self.sessions: list[FakeSession] = []
        self.steps: list[list[tuple[int, int]]] = []  # per step: (session number, tokens fed)
        self.refuse: dict[int, BatchError] = {}  # session number -> why it may not advance
        self.params: Any = None

    def create_session(self, seed: int | None = None) -> FakeSession:
        self.sessions.append(FakeSession(self, seed))
        return self.sessions[-1]

    def step(self, items: list[tuple[FakeSession, Sequence[int]]]) -> None:
        assert items and len({id(session) for session, _ in items}) == len(items)
        assert all(tokens for _, tokens in items)
        assert sum(len(tokens) for _, tokens in items) <= self.limits.max_rows
        self.before_step(len(self.steps))
        for i, (session, tokens) in enumerate(items):
            assert not session.is_closed
            if self.sessions.index(session) in self.refuse:
                raise type(exc := self.refuse[self.sessions.index(session)])(exc.message, item=i)
            if session.pos + len(tokens) > session.context:
                raise ContextLimitError("context", item=i)
        for session, tokens in items:
            session.tokens += tokens
        self.steps.append([(self.sessions.index(session), len(tokens)) for session, tokens in items])


def right_answers(prompt: str) -> Any:
    """The evaluation file's answer for exactly this prompt."""
    ids = TOKENIZER.encode(prompt, parse_special=True)
    return next(case["greedy_ids"] for case in CASES if case["prompt_ids"] == ids)


class Runner:
    """Runs the command as the program would, on a fake engine, and keeps what came out."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys
        self.opened: Any = None
        self.answers: Callable[[str], Any] = lambda prompt: "Yes."
        self.before_step: Callable[[int], None] = lambda n: None
        self.refuse: dict[int, BatchError] = {}
        self.max_rows = 256
        self.engine: FakeEngine | None = None
        monkeypatch.delenv("DS4_MODEL", raising=False)
        monkeypatch.setattr(ds4, "SamplingParams", SimpleNamespace, raising=False)
        monkeypatch.setattr(command, "_open_model", self.open_model)
        monkeypatch.setattr(command, "_open_engine", self.open_engine)

    @contextmanager
    def open_model(self, path: Any) -> Any:
        self.opened = path
        yield SimpleNamespace(metadata=METADATA, shape=SimpleNamespace(trained_context=4096))

    @contextmanager
    def open_engine(self, model: Any, backend: str, limits: Any) -> Any:
        limits = SimpleNamespace(sessions=limits.sessions, context=limits.context, max_rows=self.max_rows)
        self.engine = FakeEngine(self.answers, limits, self.before_step)
        self.engine.refuse = self.refuse
        yield self.engine
        assert all(session.is_closed for session in self.engine.sessions)

    def __call__(self, *argv: str) -> tuple[int, str, str]:
        parser = argparse.ArgumentParser()
        command.configure(parser)
        code = command.run(parser.parse_args(argv))
        return code, *self.capsys.readouterr()


def prompts(*texts: str) -> list[str]:
    return [arg for text in texts for arg in ("-p", text)]
