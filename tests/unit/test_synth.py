"""Synthetic models: they load, have the published sizes, the asked-for values, and are written all or nothing."""

from __future__ import annotations

import argparse
import errno
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE

from ds4.cli import synth as command
from ds4.errors import LimitsError, OutputError
from ds4.model import quants, synth
from ds4.model.roles import tensor_roles
from ds4.model.synth_header import vocabulary
from ds4.model.synth_presets import MIXES, PRESETS, preset_shape, role_fill
from ds4.model.weights import Model


def made(folder: Path, preset: str = "tiny", **choices: Any) -> Path:
    path = folder / f"{preset}.gguf"
    synth.write(synth.plan(preset, **choices), path, writers=2)
    return path


# ---------------------------------------------------------------- what is written


@pytest.mark.parametrize("mix", MIXES)
def test_the_file_is_the_model_that_was_planned(tmp_path: Path, mix: str) -> None:
    plan = synth.plan("tiny", mix=mix)
    with Model.open(made(tmp_path, mix=mix)) as model:
        for name in ("n_layers", "hidden", "vocab", "ratios", "n_hash_layers", "swiglu_clamp", "trained_context"):
            assert getattr(model.shape, name) == getattr(plan.shape, name)
        assert model.shape.rms_eps == pytest.approx(1e-6) and model.ignored == ()
        assert model.metadata["general.name"] == f"synthetic tiny (6 layers, {mix}, random weights)"
        gate, down = MIXES[mix]
        assert model.weights["blk.3.ffn_up_exps.weight"].dtype == gate
        assert model.weights["blk.3.ffn_down_exps.weight"].dtype == down
        assert model.files[0].stat().st_size == plan.n_bytes


@pytest.mark.parametrize("mix", MIXES)
def test_values_have_the_scale_that_keeps_activations_finite(tmp_path: Path, mix: str) -> None:
    with Model.open(made(tmp_path, mix=mix)) as model:
        for role in tensor_roles(model.shape):
            if role.dtypes == ("I32",) or role.name not in model.weights:
                continue
            tensor = model.weights[role.name]
            values = quants.dequantize(tensor)
            fill = role_fill(role, model.shape)
            assert np.isfinite(values).all()
            if fill.kind == "constant":
                assert (values == fill.scale).all()
            elif values.size >= 4096:
                assert values.std() == pytest.approx(fill.scale, rel=0.15), role.name
                assert abs(values.mean() - (fill.kind == "near one")) < 0.1 * fill.scale, role.name


def test_rows_and_experts_differ(tmp_path: Path) -> None:
    with Model.open(made(tmp_path)) as model:
        stack = model.weights["blk.2.ffn_gate_exps.weight"]
        assert len({bytes(stack.part(e, e + 1).data) for e in range(stack.shape[0])}) == stack.shape[0]
        rows = model.weights["output.weight"].data.reshape(stack.shape[1] * 2, -1)
        assert len(np.unique(rows, axis=0)) == len(rows)
        up = model.weights["blk.2.ffn_up_exps.weight"]
        assert not np.array_equal(stack.data, up.data)
        table = model.weights["blk.0.ffn_gate_tid2eid.weight"]
        ids = np.sort(table.data.view("<i4").reshape(table.shape), axis=1)
        assert (np.diff(ids, axis=1) > 0).all() and ids.min() == 0 and ids.max() == model.shape.n_experts - 1


def test_bytes_depend_on_the_seed_and_on_nothing_else(tmp_path: Path) -> None:
    files = {}
    for name, seed, writers in (("a", 0, 1), ("b", 0, 3), ("c", 1, 1)):
        synth.write(synth.plan("tiny", n_layers=1, seed=seed), tmp_path / name, writers=writers)
        files[name] = (tmp_path / name).read_bytes()
    assert files["a"] == files["b"] != files["c"]


def test_bytes_do_not_depend_on_how_the_work_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = synth.plan("tiny", n_layers=1)
    synth.write(plan, tmp_path / "whole")
    monkeypatch.setattr(synth, "_PIECE", 10_007)
    monkeypatch.setattr(synth, "CHUNK", 1000)
    synth.write(plan, tmp_path / "pieces", writers=2)
    assert (tmp_path / "whole").read_bytes() == (tmp_path / "pieces").read_bytes()


def test_fewer_layers(tmp_path: Path) -> None:
    for n_layers in (1, 2, 4):
        shape = preset_shape("flash", n_layers)
        assert shape.ratios == preset_shape("flash").ratios[:n_layers] and shape.n_hash_layers == min(3, n_layers)
    with Model.open(made(tmp_path, n_layers=3)) as model:
        assert model.shape.ratios == (0, 0, 4)


def test_alias_shares_bytes_between_layers_of_a_kind(tmp_path: Path) -> None:
    full, shared = synth.plan("tiny"), synth.plan("tiny", alias=True)
    assert shared.n_bytes < 0.7 * full.n_bytes
    with Model.open(made(tmp_path, alias=True)) as model:
        assert model.weight_bytes > model.files[0].stat().st_size
        a, b = (model.weights[f"blk.{i}.ffn_down_exps.weight"] for i in (2, 3))
        assert np.shares_memory(a.data, b.data)


def test_sparse_files_open_fast_and_take_no_space(tmp_path: Path) -> None:
    """Flash at full size: 129,280 tokens, 127,724 merges, 1,328 tensors."""
    path = tmp_path / "flash.gguf"
    synth.write(synth.plan("flash"), path, sparse=True)
    assert path.stat().st_blocks * 512 < 16 << 20 and path.stat().st_size > 86 * 10**9
    started = time.perf_counter()
    with Model.open(path) as model:
        opened = time.perf_counter() - started
        assert len(model.weights) == 1328 and model.shape.n_layers == 43
        assert len(model.metadata["tokenizer.ggml.tokens"]) == 129280
        assert len(model.metadata["tokenizer.ggml.merges"]) == 127724
        started = time.perf_counter()
        assert model.fingerprint
        sampled = time.perf_counter() - started
    assert opened < 1.0 and sampled < 2.0


def test_preset_sizes() -> None:
    gib = 2**30
    assert synth.plan("flash").n_bytes / gib == pytest.approx(80.76, abs=0.02)
    assert synth.plan("flash", mix="q4").n_bytes / gib == pytest.approx(153.32, abs=0.02)
    assert synth.plan("pro").n_bytes / gib == pytest.approx(432.7, abs=0.1)
    assert synth.plan("pro", mix="q4").n_bytes / gib == pytest.approx(838.0, abs=0.1)
    assert 1.8e9 < synth.plan("mini").n_bytes < 2.2e9
    assert synth.plan("tiny").n_bytes < 20e6
    assert len(preset_shape("pro").ratios) == 61 and preset_shape("pro").ratios.count(4) == 30
    assert preset_shape("flash").ratios.count(4) == 21 and preset_shape("flash").ratios.count(128) == 20


# ---------------------------------------------------------------- the vocabulary


@pytest.mark.parametrize("size", [265, 266, 512, 1536, 32768])
def test_vocabularies_work(size: int) -> None:
    texts, types, merges = vocabulary(size)
    assert len(texts) == len(types) == len(set(texts)) == size and len(set(merges)) == len(merges)
    assert [texts[i] for i in (0, 1, 2)] == ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"]
    for special in ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜", "<｜latest_reminder｜>"):
        assert types[texts.index(special)] == 3
    ids = {text: i for i, text in enumerate(texts)}
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    bpe = Tokenizer(BPE(vocab=ids, merges=pairs))
    if len(merges) >= 676:
        assert bpe.encode("th").ids == [ids["th"]]
    assert bpe.encode("Q").ids == [ids["Q"]]


def test_a_vocabulary_has_a_smallest_size() -> None:
    with pytest.raises(ValueError, match="no room"):
        vocabulary(264)


# ---------------------------------------------------------------- refusals and failures


def test_choices_that_do_not_exist() -> None:
    for choices in ({"preset": "huge"}, {"preset": "tiny", "mix": "q3"}, {"preset": "tiny", "n_layers": 0}):
        with pytest.raises(LimitsError):
            synth.plan(**choices)
    with pytest.raises(LimitsError, match="1 to 43 layers"):
        synth.plan("flash", n_layers=44)


def test_a_full_disk_is_seen_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10**6))
    with pytest.raises(OutputError, match="disk has") as caught:
        made(tmp_path)
    assert caught.value.data["free"] == 10**6 < caught.value.data["needed"]
    assert list(tmp_path.iterdir()) == []
    synth.write(synth.plan("tiny"), tmp_path / "sparse.gguf", sparse=True)  # needs its header only


def test_existing_files_and_absent_folders(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"precious")
    with pytest.raises(OutputError, match="exists"):
        made(tmp_path)
    assert path.read_bytes() == b"precious"
    with pytest.raises(OutputError, match="does not exist"):
        made(tmp_path / "absent")
    with pytest.raises(OutputError, match="exists"):
        synth.write(synth.plan("tiny"), tmp_path, force=True)
    synth.write(synth.plan("tiny", n_layers=1), path, force=True)
    Model.open(path).close()


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"old")
    calls = []

    def full(fd: int, data: Any, offset: int) -> int:
        calls.append(offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OutputError, match="No space left"):
        synth.write(synth.plan("tiny"), path, force=True)
    assert calls and path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_an_interrupted_write_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(what: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        synth.write(synth.plan("tiny"), tmp_path / "tiny.gguf", progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_progress_counts_every_byte_once(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    plan = synth.plan("tiny", alias=True)
    synth.write(plan, tmp_path / "f", progress=lambda what, done, total: seen.append((done, total)))
    done = [d for d, _ in seen]
    assert done == sorted(done) and seen[-1][0] == seen[-1][1] == sum(t.n_bytes for t in plan.tensors if not t.shared)


# ---------------------------------------------------------------- the command


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    command.configure(parser)
    return command.run(parser.parse_args(words))


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.gguf"
    assert run("tiny", str(path), "--layers", "2", "--mix", "q4", "--seed", "3", "--procs", "2") == 0
    out, err = capsys.readouterr()
    assert str(path) in out and "100 %" in err and "mix q4" in out
    with Model.open(path) as model:
        assert model.shape.n_layers == 2
    with pytest.raises(OutputError):
        run("tiny", str(path))
    assert run("tiny", str(path), "--force", "--sparse", "--alias") == 0
    with pytest.raises(LimitsError):
        run("tiny", str(path), "--procs", "0")


def test_command_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert run("tiny", str(tmp_path / "t.gguf"), "--layers", "1") == 0


def test_presets_are_described() -> None:
    parser = argparse.ArgumentParser()
    command.configure(parser)
    text = parser.format_help()
    for name, preset in PRESETS.items():
        assert name in text and preset.meaning.split(",")[0].split(" ")[0] in text
