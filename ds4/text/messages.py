"""Chat messages as callers write them, checked and turned into turns. Knows nothing of prompts or tokens.

The shape is the usual one: a list of mappings with `role` and `content`; `reasoning_content` and `tool_calls` on the
assistant's, `tool_call_id` on a tool's. Every complaint is a TextError with `index` (of the message) and `field`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ds4.errors import TextError
from ds4.text.checks import check_text

Message: TypeAlias = Mapping[str, Any]
"""One chat message; see the module's docstring."""

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class Block:
    """A piece of a user turn: what the user wrote, or the result of a tool call."""

    text: str
    is_result: bool = False
    call_id: str | None = None


@dataclass(frozen=True)
class UserTurn:
    """Everything between two assistant turns: user messages and tool results, in order."""

    blocks: list[Block] = field(default_factory=list)


@dataclass(frozen=True)
class Argument:
    """One argument of a call: a string as it is, anything else as JSON."""

    name: str
    value: str
    is_string: bool


@dataclass(frozen=True)
class Call:
    name: str
    arguments: tuple[Argument, ...]
    call_id: str | None


@dataclass(frozen=True)
class AssistantTurn:
    text: str
    reasoning: str
    calls: tuple[Call, ...]


@dataclass(frozen=True)
class Conversation:
    system: tuple[str, ...]  # all system texts, wherever they stood
    turns: tuple[UserTurn | AssistantTurn, ...]


def read_messages(messages: Sequence[Message]) -> Conversation:
    """Check and group the messages. Roles "system" and "developer" are both system text."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise TextError(f"messages must be a list of mappings, not {type(messages).__name__}", field="messages")
    if not messages:
        raise TextError("there are no messages: give at least one user message", field="messages")
    system: list[str] = []
    turns: list[UserTurn | AssistantTurn] = []
    for index, message in enumerate(messages):
        role = _role(message, index)
        if role in ("system", "developer"):
            system.append(_content(message, index))
        elif role == "assistant":
            turns.append(_assistant(message, index))
        else:
            last = turns[-1] if turns else None
            if not isinstance(last, UserTurn):
                last = UserTurn()
                turns.append(last)
            last.blocks.append(_block(message, index, is_result=role == "tool"))
    return Conversation(tuple(system), tuple(_in_call_order(turns)))


def to_json(value: Any) -> str:
    """JSON with the separators of the published template, and characters as they are where UTF-8 can carry them."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return json.dumps(value)
    return text


def _role(message: Message, index: int) -> str:
    if not isinstance(message, Mapping):
        raise TextError(f"a message must be a mapping, not {type(message).__name__}", index=index, field="message")
    role = message.get("role")
    if role not in ROLES:
        raise TextError(f"unknown role {role!r}; use one of {', '.join(ROLES)}", index=index, field="role")
    if role != "assistant" and message.get("tool_calls"):
        raise TextError("only the assistant calls tools", index=index, field="tool_calls")
    return str(role)


def _content(message: Message, index: int) -> str:
    """A text, or the texts of a list of text parts with a blank line between them."""
    content = message.get("content")
    if isinstance(content, (str, bytes)) or not isinstance(content, Sequence):
        return check_text(content, "content", index=index, field="content")
    texts = []
    for i, part in enumerate(content):
        where = f"content[{i}]"
        if not isinstance(part, Mapping) or part.get("type") != "text":
            raise TextError('a part of content must be {"type": "text", "text": ...}', index=index, field=where)
        texts.append(check_text(part.get("text"), f"{where}.text", index=index, field=f"{where}.text"))
    return "\n\n".join(texts)


def _block(message: Message, index: int, is_result: bool) -> Block:
    if not is_result:
        return Block(_content(message, index))
    call_id = message.get("tool_call_id")
    if call_id is not None and not isinstance(call_id, str):
        raise TextError("tool_call_id must be a str", index=index, field="tool_call_id")
    return Block(_content(message, index), is_result=True, call_id=call_id)


def _assistant(message: Message, index: int) -> AssistantTurn:
    name = "reasoning_content" if message.get("reasoning_content") is not None else "reasoning"
    reasoning = message.get(name)
    calls = message.get("tool_calls") or ()
    if isinstance(calls, (str, bytes, Mapping)) or not isinstance(calls, Sequence):
        raise TextError("tool_calls must be a list", index=index, field="tool_calls")
    # The content of a turn that only thinks or calls may be null.
    is_silent = message.get("content") is None and (calls or reasoning is not None)
    return AssistantTurn(
        text="" if is_silent else _content(message, index),
        reasoning="" if reasoning is None else check_text(reasoning, name, index=index, field=name),
        calls=tuple(_call(call, index, f"tool_calls[{i}]") for i, call in enumerate(calls)),
    )


def _call(call: Any, index: int, where: str) -> Call:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise TextError('a tool call must be {"function": {"name": ..., "arguments": ...}}', index=index, field=where)
    name = check_text(function.get("name"), f"{where}.function.name", index=index, field=f"{where}.function.name")
    arguments = _arguments(function.get("arguments"), index, f"{where}.function.arguments")
    call_id = call.get("id")
    return Call(name, arguments, call_id if isinstance(call_id, str) else None)


def _arguments(value: Any, index: int, where: str) -> tuple[Argument, ...]:
    """Arguments given as a mapping or as its JSON; JSON that is no object is passed on whole, as the model wrote it."""
    if not isinstance(value, Mapping):
        text = check_text(value, where, index=index, field=where)
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            return (Argument("arguments", text, is_string=True),)
    return tuple(_argument(name, item, index, where) for name, item in value.items())


def _argument(name: Any, item: Any, index: int, where: str) -> Argument:
    check_text(name, f"a name in {where}", index=index, field=where)
    if isinstance(item, str):
        return Argument(name, check_text(item, f"{where}.{name}", index=index, field=where), is_string=True)
    try:
        return Argument(name, to_json(item), is_string=False)
    except (TypeError, ValueError, RecursionError) as exc:
        raise TextError(f"{where}.{name} has no JSON form: {exc}", index=index, field=where) from exc


def _in_call_order(turns: list[UserTurn | AssistantTurn]) -> list[UserTurn | AssistantTurn]:
    """Put the results within a turn into the order of the calls they answer; other blocks keep their places."""
    order: dict[str, int] = {}
    for turn in turns:
        if isinstance(turn, AssistantTurn):
            if turn.calls:
                order = {call.call_id: i for i, call in enumerate(turn.calls) if call.call_id is not None}
            continue
        places = [i for i, block in enumerate(turn.blocks) if block.is_result]
        results = sorted((turn.blocks[i] for i in places), key=lambda block: order.get(block.call_id or "", 0))
        for i, block in zip(places, results, strict=True):
            turn.blocks[i] = block
    return turns
