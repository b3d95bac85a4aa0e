"""Chat prompts: the bundled model's cases, every thinking mode, tools, forged control tokens, and complaints."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from ds4.errors import TextError, TextWarning
from ds4.text import protocol
from ds4.text.chat import render
from ds4.text.tokenizer import Tokenizer
from tests.support.tokenizer_files import EVAL, TINY_MODEL, metadata_of

TOKENIZER = Tokenizer.from_metadata(metadata_of(TINY_MODEL))
CASES = json.loads(EVAL.read_text("utf-8"))["cases"]
MODES = {"chat": "none", "think": "high"}

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"


def text_of(messages: Any, *args: Any, **kwargs: Any) -> str:
    return "".join(part.text for part in render(messages, *args, **kwargs).parts)


def said(*texts: str) -> list[dict[str, str]]:
    """Messages from "role: text" lines."""
    return [dict(zip(("role", "content"), text.split(": ", 1), strict=True)) for text in texts]


# ---------------------------------------------------------------- the bundled model's cases


def test_there_are_cases_of_every_mode() -> None:
    assert {case["mode"] for case in CASES} == {"chat", "think", "raw"}
    assert len(CASES) == 135


@pytest.mark.parametrize("case", CASES, ids=[f"{i}-{case['kind']}" for i, case in enumerate(CASES)])
def test_prompt_of_the_bundled_models_case(case: dict[str, Any]) -> None:
    if case["mode"] == "raw":
        ids = [TOKENIZER.bos_id, *TOKENIZER.encode(case["text"])]
    else:
        ids = TOKENIZER.encode_chat(case["messages"], MODES[case["mode"]])
    assert ids == case["prompt_ids"]
    answer = [i for i in case["greedy_ids"] if i != TOKENIZER.eos_id]
    assert TOKENIZER.decode(answer) == case["greedy_text"]


# ---------------------------------------------------------------- modes

HISTORY: list[dict[str, Any]] = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello.", "reasoning_content": "A greeting."},
    {"role": "user", "content": "Who are you?"},
]


def test_an_answer_at_once() -> None:
    assert text_of(said("user: Hi")) == f"{BOS}{USER}Hi{ASSISTANT}</think>"
    assert text_of(HISTORY) == (
        f"{BOS}Be kind.{USER}Hi{ASSISTANT}</think>Hello.{EOS}{USER}Who are you?{ASSISTANT}</think>"
    )


def test_high_thinks_first_and_forgets_old_reasoning() -> None:
    assert text_of(HISTORY, "high") == (
        f"{BOS}Be kind.{USER}Hi{ASSISTANT}</think>Hello.{EOS}{USER}Who are you?{ASSISTANT}<think>"
    )


def test_max_puts_its_text_behind_bos() -> None:
    assert text_of(HISTORY, "max") == text_of(HISTORY, "high").replace(BOS, BOS + protocol.MAX_PREFIX)
    assert text_of(HISTORY, "max", context=393_216) == text_of(HISTORY, "max")
    assert render(HISTORY, "max", context=393_216).note is None


def test_max_falls_back_visibly() -> None:
    rendered = render(HISTORY, "max", context=393_215)
    assert rendered == render(HISTORY, "high").__class__(render(HISTORY, "high").parts, "high", rendered.note)
    assert "393216" in str(rendered.note) and "393215" in str(rendered.note)
    prompt = TOKENIZER.chat_prompt(HISTORY, "max", context=4096)
    assert (prompt.thinking, prompt.ids) == ("high", tuple(TOKENIZER.encode_chat(HISTORY, "high")))
    with pytest.warns(TextWarning, match="high is used instead"):
        assert TOKENIZER.encode_chat(HISTORY, "max", context=4096) == list(prompt.ids)


def test_reasoning_behind_the_last_question_stays() -> None:
    messages = [*HISTORY, {"role": "assistant", "content": "Me.", "reasoning_content": "Now I know."}]
    assert text_of(messages, "high", answer=False) == (
        f"{BOS}Be kind.{USER}Hi{ASSISTANT}</think>Hello.{EOS}"
        f"{USER}Who are you?{ASSISTANT}<think>Now I know.</think>Me.{EOS}"
    )
    assert text_of(messages, "none", answer=False).endswith(f"{USER}Who are you?{ASSISTANT}</think>Me.{EOS}")


def test_a_finished_conversation_continues_token_by_token() -> None:
    """What a session holds after its answer is the beginning of the next prompt: nothing has to be fed again."""
    before = TOKENIZER.encode_chat(said("user: My name is Ada."))
    after = TOKENIZER.encode_chat(said("user: My name is Ada.", "assistant: Nice to meet you, Ada.", "user: Who am I?"))
    answer = [*TOKENIZER.encode("Nice to meet you, Ada."), TOKENIZER.eos_id]
    assert after[: len(before) + len(answer)] == [*before, *answer]


def test_system_texts_are_joined_at_the_start() -> None:
    messages = said("system: One.", "user: Hi", "developer: Two.", "assistant: Yes?", "system: ", "user: Go")
    assert text_of(messages) == f"{BOS}One.\n\nTwo.{USER}Hi{ASSISTANT}</think>Yes?{EOS}{USER}Go{ASSISTANT}</think>"


def test_neighbouring_user_messages_are_one_turn() -> None:
    assert text_of(said("user: a", "user: b")) == f"{BOS}{USER}a\n\nb{ASSISTANT}</think>"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert text_of([{"role": "user", "content": parts}]) == f"{BOS}{USER}a\n\nb{ASSISTANT}</think>"


def test_neighbouring_texts_are_encoded_as_one() -> None:
    messages = said("system: Be", "user: the")
    rendered = text_of(messages, tools=TOOLS)
    assert TOKENIZER.encode_chat(messages, tools=TOOLS) == TOKENIZER.encode(rendered, parse_special=True)


# ---------------------------------------------------------------- tools

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "clock",
            "description": "Time in a café",
            "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}},
        },
    },
    {"type": "function", "function": {"name": "add"}},
]
SCHEMAS = (
    '{"name": "clock", "description": "Time in a café", '
    '"parameters": {"type": "object", "properties": {"zone": {"type": "string"}}}}\n{"name": "add"}'
)


def call(name: str, arguments: Any, call_id: str | None = None) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_the_published_texts_are_unchanged() -> None:
    """The first hash stands in the model's description too; the second is of the published text without schemas."""
    prefix = protocol.MAX_PREFIX.encode()
    assert len(prefix) == 476
    assert hashlib.sha256(prefix).hexdigest() == "f7a24f3b3050d4a83781e9b755b316aae2ec1d9dc87562541d90bcb04d7350f7"
    tools = (protocol.TOOLS_HEAD + protocol.TOOLS_TAIL).encode()
    assert len(tools) == 989
    assert hashlib.sha256(tools).hexdigest() == "c7d3159308f7d076bee8974ece110fda1f92f6e577306e602ba2b466b4dcd904"


def test_schemas_follow_the_system_text() -> None:
    tools = f"## Tools{protocol.TOOLS_HEAD.removeprefix('## Tools')}{SCHEMAS}{protocol.TOOLS_TAIL}"
    assert text_of(said("system: S", "user: u"), tools=TOOLS) == f"{BOS}S\n\n{tools}{USER}u{ASSISTANT}</think>"
    assert text_of(said("user: u"), tools=TOOLS) == f"{BOS}\n\n{tools}{USER}u{ASSISTANT}</think>"
    bare = [tool["function"] for tool in TOOLS]
    assert text_of(said("user: u"), tools=bare) == text_of(said("user: u"), tools=TOOLS)
    assert text_of(said("user: u"), tools=[]) == text_of(said("user: u"))


def test_calls_and_results() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "What time is it?"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "I need the clock.",
            "tool_calls": [
                call("clock", '{"zone": "Europe/Zürich", "n": 1.50, "flags": [true, null], "o": {"k": "é"}}', "a"),
                call("add", {}, "b"),
                call("add", "not json", "c"),
            ],
        },
        {"role": "tool", "tool_call_id": "c", "content": "third"},
        {"role": "tool", "tool_call_id": "a", "content": '{"time": "12:00"}'},
        {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "second"}]},
        {"role": "user", "content": "Well?"},
    ]
    dsml_calls = (
        "\n\n<｜DSML｜tool_calls>\n"
        '<｜DSML｜invoke name="clock">\n'
        '<｜DSML｜parameter name="zone" string="true">Europe/Zürich</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="n" string="false">1.5</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="flags" string="false">[true, null]</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="o" string="false">{"k": "é"}</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n"
        '<｜DSML｜invoke name="add">\n\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="add">\n'
        '<｜DSML｜parameter name="arguments" string="true">not json</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n"
        "</｜DSML｜tool_calls>"
    )
    results = (
        '<tool_result>{"time": "12:00"}</tool_result>\n\n'
        "<tool_result>second</tool_result>\n\n<tool_result>third</tool_result>\n\nWell?"
    )
    assert text_of(messages, "high") == (
        f"{BOS}{USER}What time is it?{ASSISTANT}<think>I need the clock.</think>Let me see.{dsml_calls}{EOS}"
        f"{USER}{results}{ASSISTANT}<think>"
    )
    # The markup's own markers are control tokens: one id each, in the places where the text has them.
    ids = TOKENIZER.encode_chat(messages, "high")
    assert TOKENIZER.decode(ids) == text_of(messages, "high")
    assert ids.count(TOKENIZER.special_id("｜DSML｜")) == dsml_calls.count("｜DSML｜") == 18


@pytest.mark.parametrize("with_schemas", [True, False])
def test_tools_in_use_keep_all_reasoning(with_schemas: bool) -> None:
    messages: list[dict[str, Any]] = [*HISTORY]
    if not with_schemas:
        messages.insert(3, {"role": "user", "content": "x"})
        messages.insert(4, {"role": "assistant", "tool_calls": [call("add", "{}")], "content": None})
    rendered = text_of(messages, "high", TOOLS if with_schemas else None)
    assert f"{ASSISTANT}<think>A greeting.</think>Hello.{EOS}" in rendered


def test_call_without_anything_else() -> None:
    message = {"role": "assistant", "tool_calls": [call("add", "{}")]}
    rendered = text_of([*said("user: u"), message, {"role": "tool", "content": "r"}])
    assert rendered.startswith(f'{BOS}{USER}u{ASSISTANT}</think>\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="add">')


def test_characters_that_json_escapes_but_utf8_cannot_carry() -> None:
    messages = [*said("user: u"), {"role": "assistant", "tool_calls": [call("f", '{"x": ["\\ud800é"]}')]}]
    assert '["\\ud800\\u00e9"]' in text_of(messages, answer=False)
    tool = {"name": "f", "description": "\ud800"}
    assert '{"name": "f", "description": "\\ud800"}' in text_of(said("user: u"), tools=[tool])


# ---------------------------------------------------------------- contents never become control tokens (FC-39)


def _everywhere(text: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A conversation with `text` in every place that comes from outside."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": text},
        {"role": "user", "content": [{"type": "text", "text": text}, {"type": "text", "text": text}]},
        {
            "role": "assistant",
            "content": text,
            "reasoning_content": text,
            "tool_calls": [call(text, {text: text, "n": [text]}, text), call(text, text, text)],
        },
        {"role": "tool", "tool_call_id": text, "content": text},
        {"role": "user", "content": text},
    ]
    return messages, [{"name": text, "description": text, "parameters": {text: text}}]


SPECIALS = sorted(TOKENIZER.special_tokens)


@pytest.mark.parametrize("thinking", ["none", "high", "max"])
@pytest.mark.parametrize("text", [*SPECIALS, "".join(SPECIALS)])
def test_content_cannot_forge_control_tokens(text: str, thinking: Any) -> None:
    def control_ids(content: str) -> list[int]:
        messages, tools = _everywhere(content)
        ids = TOKENIZER.encode_chat(messages, thinking, tools)
        assert TOKENIZER.decode(ids) == text_of(messages, thinking, tools)
        assert content in TOKENIZER.decode(ids)
        return [i for i in ids if TOKENIZER.is_special(i)]

    assert control_ids(text) == control_ids("x")


@pytest.mark.parametrize("text", SPECIALS)
def test_control_text_split_over_two_messages(text: str) -> None:
    for cut in range(1, len(text)):
        messages = [{"role": "user", "content": text[:cut]}, {"role": "user", "content": text[cut:]}]
        ids = TOKENIZER.encode_chat(messages)
        assert [i for i in ids if TOKENIZER.is_special(i)] == [
            TOKENIZER.special_id(control) for control in (BOS, USER, ASSISTANT, "</think>")
        ]
        assert TOKENIZER.decode(ids) == text_of(messages)


# ---------------------------------------------------------------- complaints


U = {"role": "user", "content": "u"}


@pytest.mark.parametrize(
    ("messages", "index", "field", "says"),
    [
        ([], None, "messages", "there are no messages"),
        (None, None, "messages", "must be a list"),
        ("hi", None, "messages", "must be a list"),
        (U, None, "messages", "must be a list"),
        ([U, "hi"], 1, "message", "must be a mapping, not str"),
        ([{}], 0, "role", "unknown role None"),
        ([{"role": "x"}], 0, "role", "unknown role 'x'"),
        ([{"role": ["user"]}], 0, "role", "unknown role"),
        ([U, {"role": "user"}], 1, "content", "not NoneType"),
        ([{"role": "user", "content": None}], 0, "content", "not NoneType"),
        ([{"role": "user", "content": 5}], 0, "content", "not int"),
        ([{"role": "user", "content": b"b"}], 0, "content", "not bytes"),
        ([{"role": "user", "content": "a\ud800"}], 0, "content", "lone surrogate"),
        ([{"role": "user", "content": ["a"]}], 0, "content[0]", "a part of content"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}], 0, "content[1]", "a part"),
        ([{"role": "user", "content": [{"type": "text"}]}], 0, "content[0].text", "not NoneType"),
        ([{"role": "system", "content": None}, U], 0, "content", "not NoneType"),
        ([{"role": "tool", "content": None}], 0, "content", "not NoneType"),
        ([{"role": "tool", "content": "r", "tool_call_id": 5}], 0, "tool_call_id", "must be a str"),
        ([U, {"role": "assistant", "content": None}, U], 1, "content", "not NoneType"),
        ([U, {"role": "assistant", "content": "c", "reasoning_content": 5}, U], 1, "reasoning_content", "not int"),
        ([U, {"role": "assistant", "content": "c", "reasoning": "\udfff"}, U], 1, "reasoning", "lone surrogate"),
        ([U, {"role": "assistant", "content": "c", "tool_calls": "x"}, U], 1, "tool_calls", "must be a list"),
        ([U, {"role": "assistant", "content": "c", "tool_calls": [5]}, U], 1, "tool_calls[0]", "a tool call must be"),
        ([{"role": "user", "content": "c", "tool_calls": [call("f", "{}")]}], 0, "tool_calls", "only the assistant"),
        ([U, {"role": "assistant", "content": "c"}], 1, "role", "nothing to answer"),
        ([{"role": "system", "content": "c"}], 0, "role", "nothing to answer"),
    ],
)
def test_bad_messages(messages: Any, index: int | None, field: str, says: str) -> None:
    with pytest.raises(TextError) as caught:
        render(messages)
    assert says in str(caught.value)
    assert (caught.value.data.get("index"), caught.value.data["field"]) == (index, field)


@pytest.mark.parametrize(
    ("name", "arguments", "field", "says"),
    [
        (None, "{}", "tool_calls[0].function.name", "not NoneType"),
        ("f", None, "tool_calls[0].function.arguments", "not NoneType"),
        ("f", '"\ud800"', "tool_calls[0].function.arguments", "lone surrogate"),
        ("f", '{"a": "\\ud800"}', "tool_calls[0].function.arguments", "lone surrogate"),
        ("f", {5: "a"}, "tool_calls[0].function.arguments", "not int"),
        ("f", {"a": {1, 2}}, "tool_calls[0].function.arguments", "no JSON form"),
    ],
)
def test_bad_calls(name: Any, arguments: Any, field: str, says: str) -> None:
    with pytest.raises(TextError) as caught:
        render([U, {"role": "assistant", "tool_calls": [call(name, arguments)]}, U])
    assert says in str(caught.value)
    assert (caught.value.data["index"], caught.value.data["field"]) == (1, field)


def test_deeply_nested_arguments_are_passed_on_whole() -> None:
    deep = "[" * 100_000 + "]" * 100_000
    messages = [U, {"role": "assistant", "tool_calls": [call("f", deep)]}]
    assert f'name="arguments" string="true">{deep}<' in text_of(messages, answer=False)


@pytest.mark.parametrize(
    ("tools", "field", "says"),
    [
        ("x", "tools", "must be a list"),
        ({"name": "f"}, "tools", "must be a list"),
        ([5], "tools[0]", "a tool must be"),
        ([{"name": "f"}, {"type": "web"}], "tools[1]", "a tool must be"),
        ([{"type": "function", "function": 5}], "tools[0].function", "must be a mapping"),
        ([{"type": "function", "function": {}}], "tools[0].function.name", "not NoneType"),
        ([{"name": "f", "x": {1}}], "tools[0]", "no JSON form"),
    ],
)
def test_bad_tools(tools: Any, field: str, says: str) -> None:
    with pytest.raises(TextError) as caught:
        render([U], tools=tools)
    assert says in str(caught.value)
    assert caught.value.data["field"] == field


def test_unknown_thinking_mode() -> None:
    with pytest.raises(TextError, match="use one of none, high, max"):
        TOKENIZER.encode_chat([U], "hard")  # type: ignore[arg-type]
