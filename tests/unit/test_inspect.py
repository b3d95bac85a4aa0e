"""ds4 inspect: the figures of the model description's byte table, the memory plan, both output forms."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from ds4.backend.contract import Limits, cache_parts
from ds4.backend.layout import CacheLayout
from ds4.cli import inspect as command
from ds4.errors import LimitsError, ModelFormatError
from ds4.model import roles, synth
from ds4.model.synth_presets import preset_shape
from ds4.model.traffic import distinct_experts, group_bytes, step_bytes
from ds4.model.weights import Model
from tests.support import gguf_bytes as gb

GOLDEN = Path(__file__).parents[1] / "golden"


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    command.configure(parser)
    return command.run(parser.parse_args(words))


def facts(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert run(*words, "--json") == 0
    loaded = json.loads(capsys.readouterr().out)
    assert isinstance(loaded, dict)
    return loaded


# ---------------------------------------------------------------- bytes

DENSE = {  # MB per decoded token, published dtypes: Flash, Pro
    roles.ATTENTION: (4887.5, 19439.1),
    roles.COMPRESSORS: (523.0, 1340.3),
    roles.INDEXER: (451.5, 1002.8),
    roles.STREAMS: (67.8, 168.1),
    roles.ROUTER: (90.9, 337.7),
    roles.SHARED: (1149.8, 4281.5),
    roles.OUTPUT: (562.6, 984.6),
}
ROUTED = {"q2": (1826.1, 6800.1), "q4": (3652.2, 13600.2), "q8": (6898.6, 25689.2)}
TOTAL_GB = {"q2": (9.559, 34.354), "q4": (11.385, 41.154), "q8": (14.632, 53.243)}


@pytest.mark.parametrize("mix", ROUTED)
@pytest.mark.parametrize("column", [0, 1], ids=["flash", "pro"])
def test_bytes_per_token(column: int, mix: str) -> None:
    plan = synth.plan(("flash", "pro")[column], mix=mix)
    dtypes = {t.entry.name: t.entry.dtype for t in plan.tensors}
    read = step_bytes(plan.shape, dtypes, 1)
    for group, megabytes in DENSE.items():
        assert read[group] / 1e6 == pytest.approx(megabytes[column], abs=0.06), group
    assert read[roles.ROUTED] / 1e6 == pytest.approx(ROUTED[mix][column], abs=0.06)
    assert sum(read.values()) / 1e9 == pytest.approx(TOTAL_GB[mix][column], abs=0.0006)


def test_a_sparse_flash_file_reads_9_559_gb_per_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "flash.gguf"
    synth.write(synth.plan("flash"), path, sparse=True)
    got = facts(capsys, str(path), "--sessions", "16")
    one, many = got["reads"]
    assert one["sessions"] == 1 and one["bytes_per_step"] == one["bytes_per_token"]
    assert one["bytes_per_token"] / 1e9 == pytest.approx(9.559, abs=0.0006)
    assert many["distinct_experts_per_layer"] == pytest.approx(256 * (1 - (250 / 256) ** 16), abs=0.01)
    assert many["bytes_per_token"] == pytest.approx(many["bytes_per_step"] / 16, abs=1)
    expert = one["groups"][roles.ROUTED] / 6  # one expert of every layer
    grown = (many["distinct_experts_per_layer"] - 6) * expert + 15 * 4096 * 2 + 15 * 3 * 6 * 4
    assert many["bytes_per_step"] - one["bytes_per_step"] == pytest.approx(grown, rel=1e-3)
    assert [len([x for x in got["layers"] if x["kind"] == kind]) for kind in ("sliding", "csa", "hca")] == [2, 21, 20]
    assert [x["routing"] for x in got["layers"]] == ["hash"] * 3 + ["score"] * 40


def test_distinct_experts() -> None:
    shape = preset_shape("flash")
    assert distinct_experts(shape, 1) == pytest.approx(6)
    assert distinct_experts(shape, 2) == pytest.approx(6 + 250 * 6 / 256)
    assert distinct_experts(shape, 10**6) == pytest.approx(256)


def test_groups_sum_to_the_weights() -> None:
    for path in GOLDEN.glob("*.gguf"):
        with Model.open(path) as model:
            groups = group_bytes(model.shape, {name: t.dtype for name, t in model.weights.items()})
            assert sum(g.n_bytes for g in groups) == model.weight_bytes
            assert sum(g.n_tensors for g in groups) == len(model.weights)
            for group in groups:
                assert group.n_bytes == sum(group.dtypes.values()) and group.group in roles.GROUPS


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize("cache_dtype", ["float32", "float16"])
def test_memory_plan_is_the_contracts(capsys: pytest.CaptureFixture[str], cache_dtype: str) -> None:
    path = GOLDEN / "tiny-flash.gguf"
    words = ("--sessions", "3", "--context", "1000", "--cache-dtype", cache_dtype)
    memory = facts(capsys, str(path), *words)["memory"]
    with Model.open(path) as model:
        layout = CacheLayout.build(model.shape, rewind=32, cache_dtype=cache_dtype)
        parts = dict(cache_parts(layout, Limits(3, 1000, 256, pages=3 * 4)))
    assert memory["parts"] == parts and memory["total"] == sum(parts.values())
    assert memory["per_session"] == layout.slab_bytes + 4 * layout.page_bytes


# ---------------------------------------------------------------- the command


def test_json_of_a_golden_file(capsys: pytest.CaptureFixture[str]) -> None:
    got = facts(capsys, str(GOLDEN / "quant-iq2.gguf"))
    assert got["name"] == "quant-iq2" and got["n_tensors"] == 68 and got["ignored"] == []
    assert got["shape"]["ratios"] == [4, 128] and got["shape"]["hidden"] == 256
    routed = next(g for g in got["groups"] if g["group"] == roles.ROUTED)
    assert set(routed["dtypes"]) == {"IQ2_XXS", "Q2_K"}
    assert got["tokenizer"]["n_tokens"] == 320 and got["tokenizer"]["n_merges"] == 20
    assert got["tokenizer"]["special"]["<｜User｜>"] == 314 and got["tokenizer"]["pre"] == "joyai-llm"
    assert len(facts(capsys, str(GOLDEN / "quant-iq2.gguf"), "--sessions", "1")["reads"]) == 1


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.gguf")), ids=lambda p: p.stem)
def test_table_of_every_golden_file(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(path)) == 0
    out = capsys.readouterr().out
    for words in (path.stem, "attention.head_count", "routed experts", "per token", "session slabs", "<｜User｜> 314"):
        assert words in out
    assert "\x1b" not in out


def test_strings_of_a_file_can_steer_neither_terminal_nor_markup(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = gb.small_model()
    file.pairs["n"] = gb.string("general.name", "[red]x[/red] \x1b[2J\x07\n" + "y" * 5000)
    file.tensors.append(gb.TensorSpec("extra \x1b]0;title\x07", (8,), data=bytes(32)))
    path = tmp_path / "odd.gguf"
    path.write_bytes(file.build())
    assert run(str(path)) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\x07" not in out and "[red]x[/red] " in out and "y" * 300 not in out
    assert "extra" in out


def test_a_file_without_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "small.gguf"
    path.write_bytes(gb.small_model().build())
    assert facts(capsys, str(path))["tokenizer"]["n_tokens"] == 0
    assert run(str(path)) == 0


@pytest.mark.parametrize("words", [("--sessions", "0"), ("--context", "0"), ("--context", str(2**31))])
def test_numbers_out_of_range(words: tuple[str, str]) -> None:
    with pytest.raises(LimitsError) as caught:
        run(str(GOLDEN / "quant-q8.gguf"), *words)
    assert caught.value.data["field"] == words[0][2:]


def test_what_is_no_model() -> None:
    with pytest.raises(ModelFormatError):
        run(str(GOLDEN / "README.md"))
