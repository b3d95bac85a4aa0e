"""Chat prompts: messages to the exact sequence of control tokens and texts that DeepSeek-V4 expects.

Owns the order of things in a prompt and which reasoning is kept; knows no token ids. What the caller wrote is only
ever a text part, and text parts are encoded with special tokens off, so content cannot forge the structure.

    BOS [Max prefix] [system texts, tools]
    <｜User｜>text, results              one turn: user messages and tool results up to the next answer
    <｜Assistant｜></think>text EOS                      an answer without reasoning
    <｜Assistant｜><think>reasoning</think>text calls EOS
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from ds4.errors import TextError
from ds4.text import protocol
from ds4.text.checks import check_text
from ds4.text.messages import Argument, AssistantTurn, Call, Conversation, Message, UserTurn, read_messages, to_json

Thinking: TypeAlias = Literal["none", "high", "max"]
"""Thinking mode: answer at once; think first; think first, at the greatest length."""

Tool: TypeAlias = Mapping[str, Any]
"""A tool's schema: {"type": "function", "function": {"name": ..., ...}}, or the inner mapping alone."""


@dataclass(frozen=True)
class Part:
    """A piece of a prompt: one control token by its literal text, or ordinary text."""

    text: str
    is_control: bool = False


@dataclass(frozen=True)
class Rendered:
    parts: tuple[Part, ...]
    thinking: Thinking  # the mode that is really used
    note: str | None  # why it is another one than was asked for


@dataclass(frozen=True)
class ChatPrompt:
    """A rendered prompt as token ids, ready to feed."""

    ids: tuple[int, ...]
    thinking: Thinking
    note: str | None


def render(
    messages: Sequence[Message],
    thinking: Thinking = "none",
    tools: Sequence[Tool] | None = None,
    context: int | None = None,
    *,
    answer: bool = True,
) -> Rendered:
    """Lay out a conversation. `context` is the session's size in tokens, if known: Max needs at least 393,216.

    System texts, wherever they stand, are joined with a blank line at the start, followed by the tools. Reasoning of
    earlier answers is kept only while tools are in use (schemas given, or calls or results in the history).
    With `answer` the prompt ends by opening the model's answer, which needs a user message or a tool result as the
    last turn; `answer=False` renders a finished conversation as it stands. Raises TextError.
    """
    used, note = _mode(thinking, context)
    conversation = read_messages(messages)
    schemas = [_schema(tool, i) for i, tool in enumerate(_tool_list(tools))]
    if answer and not (conversation.turns and isinstance(conversation.turns[-1], UserTurn)):
        raise TextError(
            "there is nothing to answer: the last message must be the user's or a tool's (answer=False renders a "
            "finished conversation)",
            index=len(messages) - 1,
            field="role",
        )
    parts = [_control(protocol.BOS)]
    if used == "max":
        parts.append(Part(protocol.MAX_PREFIX))
    parts += _system(conversation, schemas)
    parts += _turns(conversation, used, has_tools=bool(schemas))
    if answer:
        parts += [_control(protocol.ASSISTANT), _control(protocol.END_THINK if used == "none" else protocol.THINK)]
    return Rendered(tuple(parts), used, note)


def _mode(thinking: Thinking, context: int | None) -> tuple[Thinking, str | None]:
    if thinking not in get_args(Thinking):
        modes = ", ".join(get_args(Thinking))
        raise TextError(f"unknown thinking mode {thinking!r}; use one of {modes}", field="thinking", value=thinking)
    if thinking == "max" and context is not None and context < protocol.MAX_CONTEXT:
        return "high", (
            f"thinking mode max needs a context of at least {protocol.MAX_CONTEXT} tokens, "
            f"this one has {context}: high is used instead"
        )
    return thinking, None


def _control(text: str) -> Part:
    return Part(text, is_control=True)


_MARKUP = re.compile(f"({'|'.join(map(re.escape, (protocol.DSML, protocol.THINK, protocol.END_THINK)))})")


def _markup(template: str) -> Iterator[Part]:
    """Parts of one of our own templates, its control tokens recognised. Never for text from outside."""
    for i, piece in enumerate(_MARKUP.split(template)):
        if piece:
            yield Part(piece, is_control=i % 2 == 1)


# ---------------------------------------------------------------- system text and tools


def _system(conversation: Conversation, schemas: Sequence[str]) -> Iterator[Part]:
    yield Part("\n\n".join(text for text in conversation.system if text))
    if schemas:
        # The blank line also stands where there is no system text: the published template has it so.
        yield Part("\n\n")
        yield from _markup(protocol.TOOLS_HEAD)
        yield Part("\n".join(schemas))
        yield from _markup(protocol.TOOLS_TAIL)


def _tool_list(tools: Sequence[Tool] | None) -> Sequence[Tool]:
    if tools is None:
        return ()
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Sequence):
        raise TextError(f"tools must be a list of mappings, not {type(tools).__name__}", field="tools")
    return tools


def _schema(tool: Tool, i: int) -> str:
    where = f"tools[{i}]"
    if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
        raise TextError('a tool must be {"type": "function", "function": {...}}', field=where)
    function = tool.get("function", tool)
    if not isinstance(function, Mapping):
        raise TextError("a tool's function must be a mapping", field=f"{where}.function")
    check_text(function.get("name"), f"{where}.function.name", field=f"{where}.function.name")
    try:
        return to_json(dict(function))
    except (TypeError, ValueError, RecursionError) as exc:
        raise TextError(f"the schema of {function['name']!r} has no JSON form: {exc}", field=where) from exc


# ---------------------------------------------------------------- turns


def _turns(conversation: Conversation, thinking: Thinking, has_tools: bool) -> Iterator[Part]:
    turns = conversation.turns
    last_user = max((i for i, turn in enumerate(turns) if isinstance(turn, UserTurn)), default=-1)
    keeps_all = has_tools or any(_uses_tools(turn) for turn in turns)
    for i, turn in enumerate(turns):
        if isinstance(turn, UserTurn):
            yield from _user(turn)
        else:
            yield from _assistant(turn, thinks=thinking != "none" and (keeps_all or i > last_user))


def _uses_tools(turn: UserTurn | AssistantTurn) -> bool:
    return bool(turn.calls) if isinstance(turn, AssistantTurn) else any(block.is_result for block in turn.blocks)


def _user(turn: UserTurn) -> Iterator[Part]:
    yield _control(protocol.USER)
    yield Part(
        "\n\n".join(
            f"<tool_result>{block.text}</tool_result>" if block.is_result else block.text for block in turn.blocks
        )
    )


def _assistant(turn: AssistantTurn, thinks: bool) -> Iterator[Part]:
    yield _control(protocol.ASSISTANT)
    if thinks:
        yield from (_control(protocol.THINK), Part(turn.reasoning))
    yield from (_control(protocol.END_THINK), Part(turn.text))
    if turn.calls:
        yield from _calls(turn.calls)
    yield _control(protocol.EOS)


def _calls(calls: Sequence[Call]) -> Iterator[Part]:
    yield from _markup(f"\n\n<{protocol.DSML}tool_calls>\n")
    for call in calls:
        yield from _markup(f'<{protocol.DSML}invoke name="')
        yield from (Part(call.name), Part('">\n'))
        for i, argument in enumerate(call.arguments):
            yield Part("\n" if i else "")
            yield from _argument(argument)
        yield from _markup(f"\n</{protocol.DSML}invoke>\n")
    yield from _markup(f"</{protocol.DSML}tool_calls>")


def _argument(argument: Argument) -> Iterator[Part]:
    yield from _markup(f'<{protocol.DSML}parameter name="')
    yield from (Part(argument.name), Part(f'" string="{str(argument.is_string).lower()}">'), Part(argument.value))
    yield from _markup(f"</{protocol.DSML}parameter>")
