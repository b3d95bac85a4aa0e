"""Split models: any part opens the whole, and parts that are missing or do not agree are named."""

from __future__ import annotations

import shutil
from pathlib import Path

import gguf as reference
import numpy as np
import pytest

from ds4.errors import ModelFormatError
from ds4.model.weights import Model
from tests.support import gguf_bytes as gb

GOLDEN = Path(__file__).parents[1] / "golden"


def split(source: Path, folder: Path, tensors_per_part: int) -> list[Path]:
    """Split a golden file with gguf-py's own writer."""
    reader = reference.GGUFReader(source)
    writer = reference.GGUFWriter(folder / "m.gguf", "deepseek4", split_max_tensors=tensors_per_part)
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        kind = field.types[0]
        sub = field.types[-1] if kind == reference.GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), kind, sub)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob("*.gguf"))


def test_any_part_opens_the_whole(tmp_path: Path) -> None:
    parts = split(GOLDEN / "quant-q8.gguf", tmp_path, 17)
    assert [p.name for p in parts] == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    with Model.open(GOLDEN / "quant-q8.gguf") as whole:
        for part in parts:
            with Model.open(part) as model:
                assert model.files == tuple(parts) and model.path == part
                assert model.shape == whole.shape and model.fingerprint == whole.fingerprint
                assert model.metadata["tokenizer.ggml.tokens"] == whole.metadata["tokenizer.ggml.tokens"]
                for name, tensor in whole.weights.items():
                    assert np.array_equal(model.weights[name].data, tensor.data)


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_fc38_a_missing_part_is_named(tmp_path: Path, gone: int) -> None:
    parts = split(GOLDEN / "quant-q8.gguf", tmp_path, 17)
    parts[gone].unlink()
    for i, part in enumerate(parts):
        if i != gone:
            with pytest.raises(ModelFormatError, match="missing beside it") as caught:
                Model.open(part)
            assert caught.value.data["missing"] == (parts[gone].name,) and parts[gone].name in caught.value.message


def test_fc38_the_first_part_alone(tmp_path: Path) -> None:
    parts = split(GOLDEN / "quant-q8.gguf", tmp_path, 30)
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(parts[0], alone)
    with pytest.raises(ModelFormatError, match="m-00002-of-00002"):
        Model.open(alone / parts[0].name)
    shutil.copy(parts[0], alone / "renamed.gguf")
    with pytest.raises(ModelFormatError, match="part 1 of 2 of a split model") as caught:
        Model.open(alone / "renamed.gguf")
    assert caught.value.data["expected"] == "NAME-00001-of-00002.gguf"


def test_every_part_is_checked(tmp_path: Path) -> None:
    parts = split(GOLDEN / "quant-q8.gguf", tmp_path, 17)
    good = parts[1].read_bytes()
    parts[1].write_bytes(good[: len(good) // 2])
    with pytest.raises(ModelFormatError, match="cut short") as caught:
        Model.open(parts[0])
    assert caught.value.data["file"] == str(parts[1])
    for other, message in ((parts[2].read_bytes(), "do not belong together"), (b"not a model", "not a GGUF")):
        parts[1].write_bytes(other)
        with pytest.raises(ModelFormatError, match=message) as caught:
            Model.open(parts[0])
        assert caught.value.data["file"] == str(parts[1])


def part(no: int, count: int, total: int, name: str = "x", **more: bytes) -> bytes:
    pairs = {
        "1": gb.scalar("split.no", gb.U16, no),
        "2": gb.scalar("split.count", gb.U16, count),
        "3": gb.scalar("split.tensors.count", gb.I32, total),
    }
    return gb.GgufBytes({**pairs, **more}, [gb.TensorSpec(name, (8,), data=bytes(32))]).build()


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (part(0, 2, 2, "x"), part(1, 2, 2, "x"), "in two parts"),
        (part(0, 2, 3, "x"), part(1, 2, 3, "y"), "split.tensors.count"),
        (part(0, 2, 2, "x"), part(1, 3, 2, "y"), "split.count"),
        (part(0, 2, 2, "x"), part(0, 2, 2, "y"), "split.no"),
        (part(1, 2, 2, "x"), part(1, 2, 2, "y"), "by name"),
        (part(0, 2, 2, "x", k=gb.scalar("k", gb.U8, 1)), part(1, 2, 2, "y", k=gb.scalar("k", gb.U8, 2)), "contradicts"),
        (part(0, 2, 2, "x", k=gb.scalar("k", gb.U8, 1)), part(1, 2, 2, "y", k=gb.scalar("k", gb.F32, 1)), "contradict"),
        (part(7, 2, 2, "x"), part(1, 2, 2, "y"), "split.no cannot be 7"),
        (part(0, 65535, 2, "x"), part(1, 2, 2, "y"), "split.count cannot be 65535"),
        (part(0, 2, 2, "x"), part(1, 2, 2, "y").replace(b"split.no", b"split.on"), "split.no is None"),
    ],
)
def test_parts_that_do_not_agree(tmp_path: Path, first: bytes, second: bytes, message: str) -> None:
    paths = [tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2)]
    for path, data in zip(paths, (first, second), strict=True):
        path.write_bytes(data)
    with pytest.raises(ModelFormatError, match=message):
        Model.open(paths[0])


def test_messages_about_split_keys_stay_short(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for value in (gb.array("split.count", gb.STR, ["x" * 100] * 1000), gb.string("split.count", "x" * 10_000)):
        path.write_bytes(gb.GgufBytes({"split.count": value}, gb.one_tensor().tensors).build())
        with pytest.raises(ModelFormatError, match=r"split\.count cannot be") as caught:
            Model.open(path)
        assert len(str(caught.value)) < 500


def test_a_part_by_name_only(tmp_path: Path) -> None:
    path = tmp_path / "m-00001-of-00002.gguf"
    shutil.copy(GOLDEN / "quant-q8.gguf", path)
    with pytest.raises(ModelFormatError, match=r"no split\.count"):
        Model.open(path)
