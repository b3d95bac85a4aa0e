"""How `ds4 run` shows replies: side by side in a terminal, as plain text, or as one JSON document.

Views read `Reply` objects and write; they never touch engine or sessions. What goes to a terminal is stripped of
control characters: a model's output, or a prompt from a file, must not be able to steer it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from ds4.cli._together import Reply, Together

_VISIBLE = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
_VISIBLE |= {0x7F: 0x2421} | dict.fromkeys([*range(0x80, 0xA0), *range(0xD800, 0xE000)], 0xFFFD)

ENDINGS = {
    "length": "cut: as many tokens as --max-tokens allows",
    "context": "cut: the session's context is full, see --context",
    "cancelled": "interrupted",
}


def visible(text: str) -> str:
    """`text` with control characters replaced by their pictures, and half characters by U+FFFD."""
    return text.translate(_VISIBLE)


def one_line(text: str, width: int) -> str:
    flat = " ".join(visible(text).split())
    return flat if len(flat) <= width else flat[: width - 3] + "..."


@dataclass(frozen=True)
class Setting:
    """What a run is about, for headers and the JSON document."""

    model: str
    model_name: str
    is_bundled: bool
    backend: str
    context: int


class View(Protocol):
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, where: TracebackType | None
    ) -> None: ...
    def update(self) -> None:
        """Called after every step and once at the end."""

    def finish(self, seconds: float) -> None:
        """Called when every reply has ended, `seconds` after the first step began."""


def totals_of(together: Together, seconds: float) -> dict[str, Any]:
    replies = together.replies
    n_tokens = sum(len(reply.tokens) for reply in replies)
    return {
        "sessions": len(replies),
        "failed": sum(reply.finish == "error" for reply in replies),
        "prompt_tokens": sum(reply.n_fed for reply in replies),
        "tokens": n_tokens,
        "steps": together.n_steps,
        "seconds": round(seconds, 4),
        "tokens_per_second": round(n_tokens / seconds, 2) if seconds > 0 else None,
    }


def summary(together: Together, seconds: float, backend: str) -> str:
    totals = totals_of(together, seconds)
    sessions = "1 session" if totals["sessions"] == 1 else f"{totals['sessions']} sessions"
    return (
        f"{sessions}, {totals['steps']} steps: {totals['prompt_tokens']} tokens read, "
        f"{totals['tokens']} written in {totals['seconds']:.2f} s, {totals['tokens_per_second'] or 0:.1f} tokens/s "
        f"together ({_each(together.replies)} each). Backend {backend}, path {together.path}."
    )


def _each(replies: Sequence[Reply]) -> str:
    now = time.perf_counter()
    speeds = [reply.speed(now) for reply in replies]
    if len(speeds) <= 8:
        return ", ".join("-" if speed is None else f"{speed:.1f}" for speed in speeds)
    known = [speed for speed in speeds if speed is not None]
    return f"{min(known):.1f} to {max(known):.1f}" if known else "-"


class _Base:
    def __init__(self, together: Together, setting: Setting) -> None:
        self.together = together
        self.replies = together.replies
        self.setting = setting

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, where: TracebackType | None
    ) -> None:
        return None

    def update(self) -> None:
        return None


class PlainView(_Base):
    """One reply after the other, in the order of the prompts, each as soon as those before it are complete.

    What goes to `out` depends on the replies alone; speeds go to `err`.
    """

    def __init__(self, together: Together, setting: Setting, out: TextIO, err: TextIO) -> None:
        super().__init__(together, setting)
        self._out, self._err = out, err
        self._index = 0
        self._n_reasoning = self._n_text = 0  # characters of the current reply that are written
        self._is_open = False

    def update(self) -> None:
        while self._index < len(self.replies):
            reply = self.replies[self._index]
            self._catch_up(reply)
            if reply.finish is None:
                break
            self._close(reply)
        self._out.flush()

    def finish(self, seconds: float) -> None:
        print(summary(self.together, seconds, self.setting.backend), file=self._err)

    def _catch_up(self, reply: Reply) -> None:
        if not self._is_open:
            self._write(f"[{self._index + 1}/{len(self.replies)}] {one_line(reply.title, 100)}\n")
            self._is_open = True
        if len(reply.reasoning) > self._n_reasoning:
            self._write(("" if self._n_reasoning else "(thinking) ") + reply.reasoning[self._n_reasoning :])
            self._n_reasoning = len(reply.reasoning)
        if len(reply.text) > self._n_text:
            self._write(("\n" if self._n_reasoning and not self._n_text else "") + reply.text[self._n_text :])
            self._n_text = len(reply.text)

    def _close(self, reply: Reply) -> None:
        if self._n_reasoning or self._n_text:
            self._write("\n")
        if reply.error is not None:
            self._write(f"failed: {visible(reply.error)}\n")
        elif reply.finish in ENDINGS:
            self._write(f"({ENDINGS[reply.finish]})\n")
        self._write("\n")
        self._index += 1
        self._n_reasoning = self._n_text = 0
        self._is_open = False

    def _write(self, text: str) -> None:
        encoding = self._out.encoding or "utf-8"
        shown = visible(text) if self._out.isatty() else text
        self._out.write(shown.encode(encoding, "replace").decode(encoding))


class JsonView(_Base):
    """One JSON document when everything has ended."""

    def __init__(self, together: Together, setting: Setting, out: TextIO) -> None:
        super().__init__(together, setting)
        self._out = out

    def finish(self, seconds: float) -> None:
        setting = self.setting
        document = {
            "model": {"path": setting.model, "name": setting.model_name, "bundled": setting.is_bundled},
            "backend": setting.backend,
            "path": self.together.path,
            "context": setting.context,
            "sessions": [self._session(reply) for reply in self.replies],
            "totals": totals_of(self.together, seconds),
        }
        # ASCII with escapes: valid on every terminal and pipe, whatever its encoding.
        self._out.write(json.dumps(document, indent=2) + "\n")
        self._out.flush()

    def _session(self, reply: Reply) -> dict[str, Any]:
        now = time.perf_counter()
        speed = reply.speed(now)
        first = None if reply.first_token is None or reply.started is None else reply.first_token - reply.started
        return {
            "prompt": reply.title.translate(dict.fromkeys(range(0xD800, 0xE000), 0xFFFD)),
            "reasoning": reply.reasoning,
            "text": reply.text,
            "token_ids": reply.tokens,
            "finish_reason": reply.finish,
            "error": reply.error,
            "prompt_tokens": len(reply.prompt),
            "tokens": len(reply.tokens),
            "seconds": round(reply.seconds(now), 4),
            "seconds_to_first_token": None if first is None else round(first, 4),
            "tokens_per_second": None if speed is None else round(speed, 2),
        }


class LiveView(_Base):
    """A pane per session while there is room, a line per session otherwise; the whole replies at the end."""

    def __init__(self, together: Together, setting: Setting, console: Console) -> None:
        super().__init__(together, setting)
        self._console = console
        self._started = time.perf_counter()
        self._live = Live(
            get_renderable=self._frame, console=console, refresh_per_second=8, transient=True, screen=False
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, where: TracebackType | None
    ) -> None:
        self._live.stop()

    def finish(self, seconds: float) -> None:
        self._live.stop()
        for i in range(len(self.replies)):
            self._console.print(self._pane(i, n_lines=None))
        self._console.print(Text(summary(self.together, seconds, self.setting.backend), style="dim"))

    def _frame(self) -> RenderableType:
        n = len(self.replies)
        n_lines = (self._console.height - 2) // max(1, n) - 2
        rows = [self._pane(i, n_lines) if n_lines >= 1 else self._line(i) for i in range(n)]
        seconds = time.perf_counter() - self._started
        n_tokens = sum(len(reply.tokens) for reply in self.replies)
        speed = n_tokens / seconds if seconds > 0 else 0.0
        footer = (
            f"{n_tokens} tokens, {speed:.1f} tokens/s together; "
            f"{self.setting.model_name} on {self.setting.backend}, path {self.together.path}; Ctrl-C ends"
        )
        return Group(*rows, Text(footer, style="dim", no_wrap=True, overflow="ellipsis"))

    def _pane(self, i: int, n_lines: int | None) -> Panel:
        reply = self.replies[i]
        body = Text(overflow="fold")
        if reply.reasoning:
            body.append(visible(reply.reasoning) + "\n", style="dim italic")
        body.append(visible(reply.text))
        if reply.error is not None:
            body.append(visible(reply.error), style="red")
        width = self._console.width
        if n_lines is not None:
            lines = body.wrap(self._console, max(1, width - 4))
            # Exactly n_lines, the newest: panes that grow would make the picture jump.
            body = Text("\n").join([*lines[-n_lines:], *[Text()] * (n_lines - len(lines))])
        return Panel(
            body,
            title=Text(f"{i + 1}. {one_line(reply.title, max(8, width - 12))}", style="bold"),
            title_align="left",
            subtitle=Text(self._state(reply)),
            subtitle_align="right",
            border_style="red" if reply.error else "green" if reply.finish == "stop" else "cyan",
        )

    def _line(self, i: int) -> Text:
        reply = self.replies[i]
        state = f"{i + 1}. {self._state(reply)}: "
        room = max(8, self._console.width - len(state) - 1)
        tail = " ".join(visible(reply.error or reply.text or reply.reasoning).split())[-room:]
        return Text(state + tail, no_wrap=True, overflow="crop")

    def _state(self, reply: Reply) -> str:
        if reply.error is not None:
            return "failed"
        if reply.is_reading and reply.finish is None:
            return f"reading {reply.n_fed}/{len(reply.prompt)}"
        speed = reply.speed(time.perf_counter())
        parts = [f"{len(reply.prompt)} read, {len(reply.tokens)} written"]
        parts += [f"{speed:.1f} tokens/s"] if speed is not None else []
        parts += [ENDINGS[reply.finish].split(":")[0]] if reply.finish in ENDINGS else []
        return ", ".join(parts)
