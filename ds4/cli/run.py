"""ds4 run: answers several prompts together, live in a terminal, plain or as JSON.

Owns the command's options and the order of things; `_together` advances the sessions, `_views` shows them.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ds4 import env
from ds4.backend.contract import Limits
from ds4.cli._together import Reply, Together
from ds4.cli._views import JsonView, LiveView, PlainView, Setting, View
from ds4.data import bundled_model, demo_conversations
from ds4.errors import Ds4Error, TextError
from ds4.text.chat import ChatPrompt, Thinking
from ds4.text.messages import Message
from ds4.text.tokenizer import Tokenizer

HELP = "answer several prompts together"
EXAMPLE = """\
examples:
  ds4 run --demo
  ds4 run -p "What is 35 + 7?" -p "Spell ship."
  ds4 run -m model.gguf --think -p "Why is the sky blue?" --json
"""

BUNDLED = (
    "This is ds4-tiny, the demonstration model that comes with ds4: 9 million parameters, trained for small sums, "
    "spelling, lists and recall from notes; it knows nothing else. To run a real DeepSeek-V4, give its GGUF file: "
    "-m FILE, or DS4_MODEL=FILE."
)
INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT, as shells count."""

Conversation = tuple[str, list[Message]]
"""Title and messages."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    add = parser.add_argument
    add("-p", "--prompt", action="append", default=[], help="a prompt; give several to run them together")
    add("--demo", action="store_true", help="four prompts that the bundled model answers right")
    add("-m", "--model", metavar="FILE", help="GGUF file (default: DS4_MODEL, or else the bundled tiny model)")
    add("--backend", default="auto", help="backend name (default: the best one available)")
    add("--max-tokens", type=_count, default=256, metavar="N", help="longest answer (default 256)")
    add("--context", type=_count, metavar="N", help="tokens a session may hold (default: what is needed)")
    add("--system", metavar="TEXT", help="system text for every prompt")
    add(
        "--think",
        nargs="?",
        const="high",
        default="none",
        choices=("high", "max"),
        help="let the model think first (max: at the greatest length)",
    )
    add("--temperature", type=float, metavar="T", help="0 takes the likeliest token (default 1; bundled model 0)")
    add("--top-k", type=int, default=0, metavar="K", help="sample among the K likeliest tokens (default 0: all)")
    add("--top-p", type=float, default=1.0, metavar="P", help="nucleus sampling (default 1: off)")
    add("--min-p", type=float, default=0.0, metavar="P", help="least share of the likeliest token's (default 0: off)")
    add("--seed", type=int, metavar="N", help="makes sampling repeatable")
    add("--plain", action="store_true", help="plain text, also in a terminal")
    add("--json", action="store_true", help="one JSON document at the end")


def run(args: argparse.Namespace) -> int:
    """0 when every prompt was answered, 1 when one failed, 130 after Ctrl-C."""
    conversations = _conversations(args)
    path, is_bundled = _model_path(args.model)
    if is_bundled:
        print(BUNDLED, file=sys.stderr)
    with _open_model(path) as model:
        tokenizer = Tokenizer.from_metadata(model.metadata, file=str(path))
        replies, context = _replies(tokenizer, conversations, args, model.shape.trained_context)
        n_sessions = max(1, sum(reply.finish is None for reply in replies))
        with _open_engine(model, args.backend, Limits(sessions=n_sessions, context=context)) as engine:
            params = _sampling(args, is_bundled)
            together = Together(engine, tokenizer, replies, params=params, max_tokens=args.max_tokens, seed=args.seed)
            name = str(model.metadata.get("general.name", path.name))
            setting = Setting(str(path), name, is_bundled, engine.backend_name, context)
            was_interrupted = _advance(together, _view(args, together, setting))
    if was_interrupted:
        return INTERRUPTED
    return 1 if any(reply.finish == "error" for reply in replies) else 0


def _advance(together: Together, view: View) -> bool:
    """Run to the end and show it; True when Ctrl-C ended it. Whatever ends it, what was written is shown."""
    started = time.perf_counter()
    was_interrupted = False
    with view:
        try:
            while together.step():
                view.update()
        except KeyboardInterrupt:
            was_interrupted = True
            together.cancel()
        except Ds4Error as exc:
            together.fail(exc)
        view.update()
    view.finish(time.perf_counter() - started)
    return was_interrupted


# ---------------------------------------------------------------- what is asked


def _conversations(args: argparse.Namespace) -> list[Conversation]:
    asked: list[Conversation] = []
    if args.demo:
        asked += [(f"{demo['title']}: {_title(demo['messages'])}", demo["messages"]) for demo in demo_conversations()]
    asked += [(text, [{"role": "user", "content": text}]) for text in args.prompt]
    if not asked:
        raise Ds4Error("nothing to answer: give at least one -p PROMPT, or --demo")
    if args.system is not None:
        asked = [(title, [{"role": "system", "content": args.system}, *messages]) for title, messages in asked]
    return asked


def _title(messages: Sequence[Message]) -> str:
    """The last question; a note before it only by its length."""
    *note, question = str(messages[-1]["content"]).splitlines()
    return f"(note of {len(note)} lines) {question}" if note else question


def _replies(
    tokenizer: Tokenizer, conversations: Sequence[Conversation], args: argparse.Namespace, trained_context: int
) -> tuple[list[Reply], int]:
    """A reply per conversation, those that cannot be run failed already; and the context for the sessions."""
    # Max needs to know the context, the default context needs the prompts' lengths: measure with High then.
    draft: Thinking = "high" if args.think == "max" and args.context is None else args.think
    prompts = [_prompt(tokenizer, messages, draft, args.context) for _, messages in conversations]
    context = args.context or _context(prompts, args.max_tokens, trained_context)
    if draft != args.think:
        prompts = [_prompt(tokenizer, messages, args.think, context) for _, messages in conversations]
    for note in {prompt.note: None for prompt in prompts if isinstance(prompt, ChatPrompt) and prompt.note}:
        print(f"ds4 run: {note}", file=sys.stderr)
    return [_reply(title, prompt, context) for (title, _), prompt in zip(conversations, prompts, strict=True)], context


def _prompt(
    tokenizer: Tokenizer, messages: Sequence[Message], thinking: Thinking, context: int | None
) -> ChatPrompt | TextError:
    try:
        return tokenizer.chat_prompt(messages, thinking, context=context)
    except TextError as exc:
        return exc


def _context(prompts: Sequence[ChatPrompt | TextError], max_tokens: int, trained_context: int) -> int:
    """Room for the longest prompt and its answer, in whole pages; never more than the model was trained for."""
    longest = max((len(prompt.ids) for prompt in prompts if isinstance(prompt, ChatPrompt)), default=0)
    needed = -(-(longest + max_tokens) // 256) * 256
    return min(needed, trained_context) if trained_context else needed


def _reply(title: str, prompt: ChatPrompt | TextError, context: int) -> Reply:
    if isinstance(prompt, TextError):
        reply = Reply(title)
        reply.fail(str(prompt))
        return reply
    reply = Reply(title, prompt.ids, thinks=prompt.thinking != "none")
    if len(prompt.ids) > context:
        reply.fail(f"the prompt has {len(prompt.ids)} tokens, a session holds {context}: shorten it or raise --context")
    return reply


# ---------------------------------------------------------------- with what


def _model_path(given: str | None) -> tuple[Path, bool]:
    """The model file, and whether it is the bundled one."""
    path = env.read("DS4_MODEL") if given is None else given
    return (bundled_model(), True) if path is None else (Path(path), False)


def _open_model(path: Path) -> Any:
    from ds4.model.weights import Model

    return Model.open(path)


def _open_engine(model: Any, backend: str, limits: Limits) -> Any:
    from ds4.engine import Engine

    return Engine.open(model, backend, limits)


def _sampling(args: argparse.Namespace, is_bundled: bool) -> Any:
    import ds4

    temperature = args.temperature
    if temperature is None:
        # The model card's choice; the tiny model was checked on its likeliest tokens.
        temperature = 0.0 if is_bundled else 1.0
    return ds4.SamplingParams(temperature=temperature, top_k=args.top_k, top_p=args.top_p, min_p=args.min_p)


def _view(args: argparse.Namespace, together: Together, setting: Setting) -> View:
    if args.json:
        return JsonView(together, setting, sys.stdout)
    if args.plain or not sys.stdout.isatty():
        return PlainView(together, setting, sys.stdout, sys.stderr)
    return LiveView(together, setting, Console(file=sys.stdout, highlight=False))


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)
