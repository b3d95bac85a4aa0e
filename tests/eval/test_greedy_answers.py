"""The bundled trained model gives the stored greedy ids in every evaluation case, alone and in batches.

Answers alone prove little about exactness (its HCA layers change no answer), so logits are compared too: those of a
batch with those of a run alone, bit by bit, and some with an independent float64 computation.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import ds4
from ds4.data import bundled_model
from tests.support.lives import digest
from tests.support.reference import Reference, decode_all

EVAL = json.loads((Path(__file__).parent / "ds4-tiny.eval.json").read_text(encoding="utf-8"))
CASES = EVAL["cases"]
GROUP = 9


@pytest.fixture(scope="module")
def engine(ds4_backend):
    limits = ds4.Limits(sessions=GROUP, context=4096, max_rows=512)
    with ds4.Engine.open(bundled_model(), ds4_backend, limits) as engine:
        yield engine


@pytest.fixture(scope="module")
def digests():
    """Digest of the last logits of each case run alone."""
    return {}


def alone(engine, case):
    with engine.create_session() as session:
        session.feed(case["prompt_ids"])
        answer = []
        while True:
            answer.append(session.argmax())
            if len(answer) == len(case["greedy_ids"]):
                return answer, digest(session.logits)
            session.feed(answer[-1:])


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda n: f"{n}-{CASES[n]['kind']}")
def test_alone(engine, digests, number):
    answer, digests[number] = alone(engine, CASES[number])
    assert answer == CASES[number]["greedy_ids"]


@pytest.mark.parametrize("group", range(-(-len(CASES) // GROUP)))
def test_in_batches(engine, digests, group):
    """Prompts of all lengths together: chunks of several prompts and decode rows in one step."""
    order = np.random.default_rng(0).permutation(len(CASES)).tolist()[group * GROUP :][:GROUP]
    sessions = {number: engine.create_session() for number in order}
    answers = {number: [] for number in order}
    last = {}
    while sessions:
        room, batch = engine.limits.max_rows, []
        share = max(1, room // len(sessions))
        for number, session in sessions.items():
            prompt = CASES[number]["prompt_ids"]
            batch.append((session, prompt[session.pos :][:share] or answers[number][-1:]))
        engine.step(batch)
        for number, session in list(sessions.items()):
            if session.pos >= len(CASES[number]["prompt_ids"]):
                answers[number].append(session.argmax())
                if len(answers[number]) == len(CASES[number]["greedy_ids"]):
                    last[number] = digest(session.logits)
                    session.close()
                    del sessions[number]
    for number in order:
        assert answers[number] == CASES[number]["greedy_ids"], CASES[number]["kind"]
        if number not in digests:
            digests[number] = alone(engine, CASES[number])[1]
        assert last[number] == digests[number]


@pytest.mark.requires("float16")
def test_right_answers_with_a_float16_cache(ds4_backend):
    """On other numeric paths ids may differ where two are close, but answers stay right."""
    limits = ds4.Limits(sessions=1, context=4096, max_rows=512)
    with ds4.Engine.open(bundled_model(), ds4_backend, limits, cache_dtype="float16") as engine:
        right = total = 0
        for case in CASES:
            if case["correct"] and case["expected"] and len(case["prompt_ids"]) < 800:
                total += 1
                answer, _ = alone(engine, case)
                ids = [token for token in answer if token != engine.tokenizer.eos_id]
                text = engine.tokenizer.decode(ids).split("</think>")[-1]
                right += text.strip().rstrip(".").lower() == case["expected"].strip().rstrip(".").lower()
    assert total > 60
    assert right == total


def test_logits_equal_an_independent_computation(engine):
    """Recall prompts long enough that every HCA and CSA layer has entries, against numpy in float64."""
    case = next(c for c in CASES if c["kind"] == "recall-300")
    tokens = case["prompt_ids"] + case["greedy_ids"][:-1]
    assert len(tokens) > 256
    with engine.create_session() as session:
        rows = session.feed(tokens, logits="all")
    reference = Reference(engine.shape, decode_all(engine.model.weights))
    error = np.abs(rows - reference.run(tokens))
    # Near ties of the indexer or router may swap an entry of small weight; nearly all positions have none.
    assert np.quantile(error.max(1), 0.9) <= 3e-4
    assert error.max() <= 0.05
    assert np.sqrt((error**2).mean()) <= 3e-4
