"""`ds4 run` on a scripted engine: what goes into each step, how replies end, what the options do."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from ds4.cli import _together
from ds4.cli._together import Reply, Together
from ds4.data import bundled_model, demo_conversations
from ds4.errors import Ds4Error, NumericError, PagesExhaustedError, StepError
from tests.support.scripted_engine import CASES, EOS, TOKENIZER, FakeEngine, Runner, prompts, right_answers
from tests.support.tokenizer_files import EVAL


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Runner:
    return Runner(monkeypatch, capsys)


# ---------------------------------------------------------------- the demo


def test_the_bundled_model_is_the_one_the_cases_are_of() -> None:
    sha256 = hashlib.sha256(bundled_model().read_bytes()).hexdigest()
    assert sha256 == json.loads(EVAL.read_text("utf-8"))["sha256"]


def test_demo_conversations_are_cases_the_model_answers_right() -> None:
    demos = demo_conversations()
    assert len(demos) == 4
    for demo in demos:
        case = next(case for case in CASES if case["messages"] == demo["messages"])
        assert (case["mode"], case["correct"], case["expected"]) == ("chat", True, demo["expected"])
        assert case["greedy_text"] == demo["expected"]
    lengths = [len(TOKENIZER.encode_chat(demo["messages"])) for demo in demos]
    assert max(lengths) > 500  # a long note
    assert max(len(demo["messages"]) for demo in demos) > 2  # and several turns


def test_demo_prints_the_right_answers(run: Runner) -> None:
    run.answers = right_answers
    code, out, err = run("--demo")
    assert code == 0
    assert out == (
        "[1/4] A sum: What is 35 + 7?\n35 + 7 = 42.\n\n"
        "[2/4] Recall from a long note: (note of 39 lines) Find sweet stone.\n"
        "I know that sweet stone has the pin 8206.\n\n"
        "[3/4] Spelling: How do you spell soup?\ns-o-u-p.\n\n"
        "[4/4] Memory over several turns: Do you know my name?\nYour name is Carl.\n\n"
    )
    assert "ds4-tiny" in err and "-m FILE" in err
    assert "Backend fake, path shared." in err
    assert run.opened == bundled_model()


# ---------------------------------------------------------------- steps


def test_all_prompts_advance_together(run: Runner) -> None:
    run.answers = right_answers
    run("--demo")
    assert run.engine is not None
    first, *later = run.engine.steps
    assert {number for number, _ in first} == {0, 1, 2, 3}
    assert sum(n for _, n in first) == 256
    # The short prompts answer in the same steps that read the rest of the long one.
    assert any(n > 1 for _, n in later[0]) and any(n == 1 for _, n in later[0])
    fed = [sum(n for step in run.engine.steps for number, n in step if number == k) for k in range(4)]
    assert fed == [len(session.tokens) for session in run.engine.sessions]


def test_a_finished_session_leaves_the_batch(run: Runner) -> None:
    run.answers = lambda prompt: "a" if "short" in prompt else "a b c d e f"
    assert run(*prompts("short", "long"))[0] == 0
    assert run.engine is not None
    sizes = [len(step) for step in run.engine.steps]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == 2 and sizes[-1] == 1


@pytest.mark.parametrize("max_rows", [1, 2, 3, 7, 64])
def test_output_does_not_depend_on_the_cut(run: Runner, max_rows: int) -> None:
    run.answers = right_answers
    whole = run("--demo")[1]
    run.max_rows = max_rows
    code, out, _ = run("--demo")
    assert (code, out) == (0, whole)


def test_more_sessions_than_rows_take_turns(run: Runner) -> None:
    run.max_rows = 2
    run.answers = lambda prompt: "a b c d e f g h" * 5
    assert run(*prompts(*"12345"))[0] == 0
    assert run.engine is not None
    sizes = [sum(n for _, n in step) for step in run.engine.steps]
    assert sizes[:-1] == [2] * (len(sizes) - 1)
    # Nobody waits for another's whole answer: everyone has been read before anyone is through.
    n_prompt = len(TOKENIZER.encode_chat([{"role": "user", "content": "1"}]))
    n_answer = len(TOKENIZER.encode("a b c d e f g h" * 5))
    fed = [0] * 5
    for step in run.engine.steps:
        for number, n in step:
            fed[number] += n
        if max(fed) == n_prompt + n_answer:
            break
    assert min(fed) > n_prompt


def test_rows_left_by_a_short_prompt_go_to_the_long_one() -> None:
    engine = FakeEngine(lambda prompt: "", SimpleNamespace(context=512, max_rows=100), lambda n: None)
    replies = [Reply("long", list(range(3, 203))), Reply("short", [3, 4])]
    together = Together(engine, TOKENIZER, replies, params=None, max_tokens=5)
    plan = {reply.title: len(tokens) for reply, tokens in together._plan(replies)}
    assert plan == {"short": 2, "long": 98}


# ---------------------------------------------------------------- endings


def test_the_end_token_ends_and_is_not_text(run: Runner) -> None:
    code, out, _ = run("--json", *prompts("q"))
    session = json.loads(out)["sessions"][0]
    assert (code, session["finish_reason"], session["text"]) == (0, "stop", "Yes.")
    assert session["token_ids"] == [*TOKENIZER.encode("Yes."), EOS]
    assert session["tokens"] == len(session["token_ids"])


def test_max_tokens(run: Runner) -> None:
    run.answers = lambda prompt: "a b c d e f g"
    code, out, _ = run("--max-tokens", "3", *prompts("q"))
    assert (code, out) == (0, "[1/1] q\na b c\n(cut: as many tokens as --max-tokens allows)\n\n")


def test_a_full_context(run: Runner) -> None:
    run.answers = lambda prompt: "a b c d e f g"
    n_prompt = len(TOKENIZER.encode_chat([{"role": "user", "content": "q"}]))
    code, out, _ = run("--context", str(n_prompt + 2), *prompts("q"))
    # Two tokens fit behind the prompt; the third is sampled from them but has no place any more.
    assert (code, out) == (0, "[1/1] q\na b c\n(cut: the session's context is full, see --context)\n\n")


def test_half_a_character_at_the_end(run: Runner) -> None:
    run.answers = lambda prompt: TOKENIZER.encode("é")[:1]
    _, out, _ = run("--max-tokens", "1", *prompts("q"))
    assert out.startswith("[1/1] q\n\ufffd\n")


def test_thinking(run: Runner) -> None:
    run.answers = lambda prompt: "4 and 5.</think>It is 9."
    _, out, _ = run("--think", *prompts("4 + 5?"))
    assert out == "[1/1] 4 + 5?\n(thinking) 4 and 5.\nIt is 9.\n\n"
    session = json.loads(run("--think", "--json", *prompts("4 + 5?"))[1])["sessions"][0]
    assert (session["reasoning"], session["text"]) == ("4 and 5.", "It is 9.")


def test_max_thinking_falls_back_visibly(run: Runner) -> None:
    run.answers = lambda prompt: "</think>x"
    for more in ([], ["--context", "2048"]):
        code, _, err = run("--think", "max", *more, *prompts("a", "b"))
        assert code == 0
        assert err.count("high is used instead") == 1
    assert "this one has 2048" in err


def test_system_text(run: Runner) -> None:
    seen: list[str] = []
    run.answers = lambda prompt: seen.append(prompt) or "x"  # type: ignore[func-returns-value]
    run("--system", "Be kind.", *prompts("q"))
    assert set(seen) == {"<｜begin▁of▁sentence｜>Be kind.<｜User｜>q<｜Assistant｜></think>"}


# ---------------------------------------------------------------- failures


def test_an_over_long_prompt_fails_alone(run: Runner) -> None:
    code, out, _ = run("--context", "20", *prompts("a", "word " * 50, "b"))
    assert code == 1
    assert "[1/3] a\nYes.\n\n" in out and out.endswith("[3/3] b\nYes.\n\n")
    assert re.search(r"\[2/3\] word.*\nfailed: the prompt has \d+ tokens, a session holds 20: shorten it or raise", out)
    assert run.engine is not None and run.engine.limits.sessions == 2


def test_a_prompt_beyond_the_trained_context_fails_alone(run: Runner) -> None:
    code, out, _ = run(*prompts("a", "1 " * 3000))
    assert code == 1
    assert "Yes." in out and "a session holds 4096" in out


def test_text_that_is_no_text_fails_alone(run: Runner) -> None:
    code, out, _ = run(*prompts("a", "b\udcff"))
    assert code == 1
    assert "[1/2] a\nYes.\n" in out and "failed: content has half a character" in out
    document = json.loads(run("--json", *prompts("a", "b\udcff"))[1])
    assert document["totals"]["failed"] == 1
    assert document["sessions"][1]["prompt"] == "b\ufffd"


def test_every_prompt_may_fail(run: Runner) -> None:
    code, out, _ = run("--context", "2", *prompts("a", "b"))
    assert code == 1 and out.count("failed:") == 2
    assert run.engine is not None and run.engine.steps == []


def test_unusable_logits_fail_one_session(run: Runner) -> None:
    run.answers = lambda prompt: NumericError("logits are NaN", pos=5) if "bad" in prompt else "Yes."
    code, out, _ = run(*prompts("good", "bad", "fine"))
    assert code == 1
    assert out == "[1/3] good\nYes.\n\n[2/3] bad\nfailed: logits are NaN (pos=5)\n\n[3/3] fine\nYes.\n\n"


def test_a_refused_session_fails_alone(run: Runner) -> None:
    run.refuse = {1: PagesExhaustedError("no pages")}
    code, out, _ = run(*prompts("a", "b", "c"))
    assert code == 1
    assert out.count("Yes.") == 2 and "[2/3] b\nfailed: no pages" in out


def test_a_refusal_of_nobody_in_particular_ends_all(run: Runner) -> None:
    def refuse(n: int) -> None:
        if n == 2:
            raise StepError("the device said no", call="end", backend="fake")

    run.before_step = refuse
    run.answers = lambda prompt: "a b c d"
    code, out, _ = run(*prompts("x", "y"))
    assert code == 1
    assert out.startswith("[1/2] x\na b\nfailed: the device said no") and out.count("failed:") == 2


def test_nothing_to_answer(run: Runner) -> None:
    with pytest.raises(Ds4Error, match="at least one -p PROMPT, or --demo"):
        run()


# ---------------------------------------------------------------- Ctrl-C


def interrupt_at(step: int) -> Callable[[int], None]:
    def before(n: int) -> None:
        if n == step:
            raise KeyboardInterrupt

    return before


def test_ctrl_c_prints_what_there_is(run: Runner) -> None:
    run.answers = lambda prompt: "a" if "short" in prompt else "a b c d e"
    run.before_step = interrupt_at(3)
    code, out, _ = run(*prompts("short", "long"))
    assert code == 130
    assert out == "[1/2] short\na\n\n[2/2] long\na b c\n(interrupted)\n\n"


def test_ctrl_c_before_anything(run: Runner) -> None:
    run.before_step = interrupt_at(0)
    code, out, _ = run("--json", *prompts("a"))
    document = json.loads(out)
    assert (code, document["path"]) == (130, "none")
    assert (document["sessions"][0]["finish_reason"], document["sessions"][0]["seconds"] >= 0) == ("cancelled", True)


# ---------------------------------------------------------------- options


def test_model_from_option_and_environment(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS4_MODEL", "from-env.gguf")
    err = run(*prompts("a"))[2]
    assert str(run.opened) == "from-env.gguf" and "ds4-tiny" not in err
    run("-m", "given.gguf", *prompts("a"))
    assert str(run.opened) == "given.gguf"


@pytest.mark.parametrize(("argv", "temperature"), [([], 0.0), (["-m", "x.gguf"], 1.0), (["--temperature", "0.7"], 0.7)])
def test_temperature(run: Runner, argv: list[str], temperature: float) -> None:
    run(*argv, "--top-k", "5", *prompts("a"))
    assert run.engine is not None
    assert run.engine.params == SimpleNamespace(temperature=temperature, top_k=5, top_p=1.0, min_p=0.0)


def test_seeds(run: Runner) -> None:
    run("--seed", "7", *prompts("a", "a"))
    assert run.engine is not None
    assert [session.seed for session in run.engine.sessions] == [7, 8]
    run(*prompts("a", "a"))
    assert [session.seed for session in run.engine.sessions] == [None, None]


def test_context_is_what_is_needed_in_whole_pages(run: Runner) -> None:
    run("--max-tokens", "300", *prompts("a"))
    assert run.engine is not None and run.engine.limits.context == 512


@pytest.mark.parametrize("argv", [["--max-tokens", "0"], ["--context", "-1"], ["--context", "x"], ["--think", "low"]])
def test_bad_options(run: Runner, argv: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(*argv, *prompts("a"))
    assert caught.value.code == 2


def test_the_loop_prints_nothing() -> None:
    """The loop moves onto a scheduler later: it must not know any view."""
    assert "rich" not in vars(_together) and "_views" not in vars(_together)
