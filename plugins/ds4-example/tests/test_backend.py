"""What is particular to this backend. All that every backend owes is in test_conformance.py."""

from __future__ import annotations

import ds4
import ds4.data
import pytest

from ds4_example import backend

LIMITS = ds4.Limits(sessions=1, context=256)


def ask(question: str) -> str:
    with ds4.Engine.open(ds4.data.bundled_model(), "example", LIMITS) as engine:
        tokenizer = engine.tokenizer
        session = engine.create_session()
        session.feed(tokenizer.encode_chat([{"role": "user", "content": question}]))
        answer: list[int] = []
        while (token := session.argmax()) != tokenizer.eos_id and len(answer) < 30:
            answer.append(token)
            session.feed([token])
        return tokenizer.decode(answer)


def test_it_answers() -> None:
    assert ask("What is 12 + 7?") == "12 + 7 = 19."


def test_auto_does_not_take_it() -> None:
    """Delete this test once the backend is faster than ds4's own."""
    assert backend.ExampleBackend.priority < 0


def test_a_model_with_too_many_weights_is_refused_with_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "MOST_WEIGHT_BYTES", 1_000_000)
    with pytest.raises(ds4.MemoryPlanError, match="at most 1 MB of them. This one would need weights as float32"):
        ds4.Engine.open(ds4.data.bundled_model(), "example", LIMITS)
