"""The whole loader: models, their tensors, split files, identity, and files that change under us."""

from __future__ import annotations

import os
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path

import gguf as reference
import numpy as np
import pytest

from ds4.errors import ModelFormatError, TensorError, UnsupportedModelError
from ds4.model import quants
from ds4.model.roles import tensor_roles
from ds4.model.weights import Model, Tensor
from tests.support import gguf_bytes as gb
from tests.support.limits import quick_and_small

GOLDEN = Path(__file__).parents[1] / "golden"
FILES = sorted(path.name for path in GOLDEN.glob("*.gguf"))


def refuse(data: bytes | bytearray, kind: type[ModelFormatError] = TensorError) -> ModelFormatError:
    with quick_and_small(), pytest.raises(kind) as caught:
        Model.from_buffer(data, "some.gguf")
    assert caught.value.data["file"] == "some.gguf"
    return caught.value


# ---------------------------------------------------------------- good models


@pytest.mark.parametrize("name", FILES)
def test_golden_models(name: str) -> None:
    theirs = {t.name: t for t in reference.GGUFReader(GOLDEN / name).tensors}
    with Model.open(GOLDEN / name) as model:
        assert model.files == (GOLDEN / name,) and model.path == GOLDEN / name
        assert set(model.weights) == set(theirs) and model.ignored == ()
        assert model.weight_bytes == sum(t.n_bytes for t in theirs.values())
        for key, tensor in model.weights.items():
            assert tensor.name == key and not tensor.data.flags.writeable and tensor.data.ndim == 1
            assert np.array_equal(tensor.data, theirs[key].data.reshape(-1).view(np.uint8))
            assert tensor.n_bytes == tensor.row_bytes * int(np.prod(tensor.shape[:-1]))
        model.verify_unchanged()


def test_the_file_is_mapped_not_copied() -> None:
    with quick_and_small(n_bytes=1 << 20), Model.open(GOLDEN / "quant-q4k.gguf") as model:
        assert model.weight_bytes > 2_000_000
        bases: set[str] = set()
        for tensor in model.weights.values():
            base: object = tensor.data
            while isinstance(base, np.ndarray):
                base = base.base
            bases.add(type(base).__name__)
        assert bases == {"memoryview"}


def test_parts_of_a_tensor_are_contiguous_slices() -> None:
    with Model.open(GOLDEN / "quant-iq2.gguf") as model:
        stack = model.weights["blk.0.ffn_gate_exps.weight"]
        whole = quants.dequantize(stack)
        for expert in range(stack.shape[0]):
            part = stack.part(expert, expert + 1)
            assert part.shape == (1, *stack.shape[1:]) and part.row_bytes == stack.row_bytes
            assert np.shares_memory(part.data, stack.data)
            assert np.array_equal(quants.dequantize(part), whole[expert : expert + 1])
        for bad in ((-1, 1), (0, 0), (2, 1), (0, stack.shape[0] + 1)):
            with pytest.raises(IndexError, match="ffn_gate_exps"):
                stack.part(*bad)
        with pytest.raises(IndexError):
            model.weights["output_norm.weight"].part(0, 1)


def test_tensors_outlive_close() -> None:
    model = Model.open(GOLDEN / "quant-q8.gguf")
    tensor = model.weights["output.weight"]
    before = bytes(tensor.data[:64])
    model.close()
    model.close()
    assert bytes(tensor.data[:64]) == before
    for use in (lambda: model.weights, lambda: model.fingerprint, model.verify_unchanged):
        with pytest.raises(ModelFormatError, match="closed"):
            use()


def test_open_and_close_leak_no_descriptor() -> None:
    def descriptors() -> int:
        return len(os.listdir("/dev/fd"))

    before = descriptors()
    for _ in range(10):
        Model.open(GOLDEN / "tiny-long.gguf").close()
        Model.open(GOLDEN / "tiny-long.gguf")  # forgotten: the descriptor goes with the object
        with pytest.raises(ModelFormatError):
            Model.open(GOLDEN / "README.md")
    assert descriptors() == before


def test_mixed_dtypes_between_layers_and_every_matrix_dtype() -> None:
    """Any matrix takes any dtype whose blocks fit its rows; gate and up of a layer agree."""
    file = gb.small_model((4, 128), hashed=1, hidden=256, ffn=256)
    ids = {name: fmt.ggml_id for name, fmt in quants.FORMATS.items() if name != "I32"}
    for i, (dtype, ggml_id) in enumerate(ids.items()):
        layer = i % 2
        for name in ("ffn_gate_exps", "ffn_up_exps", "attn_kv", "ffn_gate_inp", "attn_compressor_kv"):
            file.tensor(f"blk.{layer}.{name}.weight").ggml_id = ggml_id
        file.tensor("token_embd.weight").ggml_id = file.tensor("output.weight").ggml_id = ggml_id
        weights = Model.from_buffer(file.build()).weights
        assert weights[f"blk.{layer}.attn_kv.weight"].dtype == weights["output.weight"].dtype == dtype


def test_unneeded_tensors_are_ignored_and_listed() -> None:
    file = gb.small_model()
    extra = ["mtp.0.e_proj.weight", "blk.3.attn_norm.weight", "rope_freqs.weight"]
    file.tensors += [gb.TensorSpec(name, (32,), gb.GGML_F32, bytes(128)) for name in extra]
    model = Model.from_buffer(file.build())
    assert model.ignored == tuple(extra) and not set(extra) & set(model.weights)


def test_the_router_bias_is_optional_everywhere() -> None:
    file = gb.small_model()
    file.tensors = [t for t in file.tensors if not str(t.name).endswith("exp_probs_b.bias")]
    assert "blk.1.exp_probs_b.bias" not in Model.from_buffer(file.build()).weights
    file.tensors.append(gb.TensorSpec("blk.0.exp_probs_b.bias", (4,), gb.GGML_F32, bytes(16)))
    assert "blk.0.exp_probs_b.bias" in Model.from_buffer(file.build()).weights


# ---------------------------------------------------------------- FC-38: one error per file, naming the tensor


@pytest.mark.parametrize("name", ["tiny-flash.gguf", "quant-iq2.gguf"])
def test_fc38_each_tensor_missing_in_turn(name: str) -> None:
    data = bytearray((GOLDEN / name).read_bytes())
    with Model.open(GOLDEN / name) as model:
        roles = list(tensor_roles(model.shape))
    names = gb.walk(data).names
    for role in roles:
        if role.name not in names:
            assert role.optional
            continue
        at = names[role.name]
        data[at] ^= 0x20  # another name: absent, and one more unknown tensor
        if role.optional:
            assert role.name not in Model.from_buffer(data).weights
        else:
            with pytest.raises(TensorError, match="is missing") as caught:
                Model.from_buffer(data, "f")
            assert caught.value.data["tensor"] == role.name and caught.value.data["found"] is None
            assert str(role.shape) in caught.value.data["expected"]
        data[at] ^= 0x20


@pytest.mark.parametrize("change", ["longer", "transposed", "flat", "one more axis"])
def test_fc38_wrong_shapes(change: str) -> None:
    good = gb.small_model()
    for i, spec in enumerate(good.tensors):
        dims = {
            "longer": (*spec.dims[:-1], spec.dims[-1] + 1),
            "transposed": spec.dims[::-1],
            "flat": (int(np.prod(spec.dims)),),
            "one more axis": (*spec.dims, 1),
        }[change]
        if dims == spec.dims or len(dims) > 4:
            continue
        file = good.copy()
        file.tensors[i].dims = dims
        file.tensors[i].data = bytes(4 * int(np.prod(dims)))
        error = refuse(file.build())
        assert error.data["tensor"] == spec.name and "shape" in error.message
        assert (error.data["expected"], error.data["found"]) == (spec.dims[::-1], dims[::-1])


VECTORS = ["output_norm.weight", "blk.0.attn_sinks.weight", "blk.1.exp_probs_b.bias", "output_hc_scale.weight"]


@pytest.mark.parametrize("ggml_id", [gb.GGML_F16, gb.GGML_BF16, gb.GGML_I32])
@pytest.mark.parametrize("name", [*VECTORS, "blk.0.ffn_gate_tid2eid.weight", "blk.0.attn_kv.weight"])
def test_fc38_wrong_dtypes(name: str, ggml_id: int) -> None:
    file = gb.small_model()
    spec = file.tensor(name)
    accepted = {gb.GGML_I32} if "tid2eid" in name else set() if name in VECTORS else {gb.GGML_F16, gb.GGML_BF16}
    spec.ggml_id = ggml_id
    if ggml_id in accepted:
        Model.from_buffer(file.build())
        return
    error = refuse(file.build())
    assert error.data["tensor"] == name and error.data["found"] == quants.FORMAT_BY_ID[ggml_id].name
    assert error.data["found"] not in error.data["expected"] and "dtype" in error.message


@pytest.mark.parametrize("ggml_id", [gb.GGML_Q8_0, gb.GGML_MXFP4])
def test_position_tables_are_floats(ggml_id: int) -> None:
    file = gb.small_model()
    for name in ("blk.1.attn_compressor_ape.weight", "blk.1.indexer_compressor_ape.weight"):
        changed = file.copy()
        changed.tensor(name).ggml_id = ggml_id
        assert refuse(changed.build()).data["tensor"] == name


def test_fc38_types_39_30_and_250() -> None:
    """39 is MXFP4 and 30 is BF16, which ds4 reads where they make sense; 250 is nothing."""
    file = gb.small_model()
    for ggml_id, name in ((39, "output.weight"), (30, "output.weight")):
        good = file.copy()
        good.tensor(name).ggml_id = ggml_id
        Model.from_buffer(good.build())
    for ggml_id, name in ((39, "output_norm.weight"), (30, "output_norm.weight"), (250, "output.weight")):
        bad = file.copy()
        bad.tensor(name).ggml_id = ggml_id
        error = refuse(bad.build())
        assert error.data["tensor"] == name and error.data["expected"] and error.data["found"]


def test_gate_and_up_experts_share_a_dtype() -> None:
    file = gb.small_model()
    file.tensor("blk.1.ffn_up_exps.weight").ggml_id = gb.GGML_F16
    error = refuse(file.build())
    assert error.data["tensor"] == "blk.1.ffn_up_exps.weight"
    assert (error.data["expected"], error.data["found"]) == ("F32", "F16")


@pytest.mark.parametrize("bad", [-1, 4, 2**31 - 1, -(2**31)])
def test_expert_ids_name_experts(bad: int) -> None:
    file = gb.small_model()
    ids = [0, 3] * 16
    ids[2 * 5 + 1] = bad
    file.tensor("blk.0.ffn_gate_tid2eid.weight").data = struct.pack("<32i", *ids)
    error = refuse(file.build())
    assert error.data["tensor"] == "blk.0.ffn_gate_tid2eid.weight"
    assert (error.data["found"], error.data["token"], error.data["expected"]) == (bad, 5, "0 to 3")


def test_fc38_other_architecture(tmp_path: Path) -> None:
    path = tmp_path / "llama.gguf"
    file = gb.GgufBytes({"a": gb.string("general.architecture", "llama")}, gb.one_tensor().tensors)
    path.write_bytes(file.build())
    with pytest.raises(UnsupportedModelError, match="'llama'"):
        Model.open(path)


# ---------------------------------------------------------------- identity


def test_copies_and_other_names_have_the_same_fingerprint(tmp_path: Path) -> None:
    copy = tmp_path / "other name.gguf"
    shutil.copy(GOLDEN / "tiny-long.gguf", copy)
    with Model.open(GOLDEN / "tiny-long.gguf") as a, Model.open(copy) as b:
        assert a.fingerprint == b.fingerprint == Model.from_buffer(copy.read_bytes()).fingerprint
        assert len(a.fingerprint) == 64 and int(a.fingerprint, 16)


def test_fingerprints_differ_between_models() -> None:
    prints = set()
    for name in FILES:
        with Model.open(GOLDEN / name) as model:
            prints.add(model.fingerprint)
    assert len(prints) == len(FILES)


def test_what_changes_a_fingerprint() -> None:
    file = gb.small_model()
    same = Model.from_buffer(file.build()).fingerprint
    order = file.copy()
    order.tensors.reverse()
    order.pairs["n"] = gb.string("general.name", "renamed")
    assert Model.from_buffer(order.build()).fingerprint == same
    weights = file.copy()
    weights.tensor("output_norm.weight").data = b"\1" + bytes(127)
    dtype = file.copy()
    dtype.tensor("output.weight").ggml_id = gb.GGML_BF16
    shape = file.copy()
    shape.pairs["deepseek4.expert_weights_scale"] = gb.scalar("deepseek4.expert_weights_scale", gb.F32, 2.5)
    for changed in (weights, dtype, shape):
        assert Model.from_buffer(changed.build()).fingerprint != same


# ---------------------------------------------------------------- files that change under us


def test_fc34_a_file_changed_after_opening_is_noticed(tmp_path: Path) -> None:
    def opened(name: str) -> tuple[Path, Model]:
        path = tmp_path / name
        shutil.copy(GOLDEN / "tiny-long.gguf", path)
        return path, Model.open(path)

    path, model = opened("cut")
    os.truncate(path, 500_000)
    with pytest.raises(ModelFormatError, match="changed after it was opened") as caught:
        model.verify_unchanged()
    assert caught.value.data["expected"][0] == 1_028_000 and caught.value.data["found"][0] == 500_000
    path, model = opened("rewritten")
    with open(path, "r+b") as file:
        file.seek(600_000)
        file.write(b"other")
    os.utime(path, ns=(0, 12345))
    with pytest.raises(ModelFormatError, match="changed after it was opened"):
        model.verify_unchanged()
    path, model = opened("replaced")
    new = tmp_path / "new"
    new.write_bytes(b"another file under the same name")
    os.replace(new, path)
    model.verify_unchanged()  # the map holds the old file, so the weights are still right
    assert model.fingerprint


TOUCH = """
import os, sys
from ds4.model.weights import Model
model = Model.open(sys.argv[1])
os.truncate(sys.argv[1], 65536)
print(sum(int(t.data.sum()) for t in model.weights.values()))
"""


def test_fc34_reading_beyond_a_cut_ends_the_process_instead_of_giving_numbers(tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    shutil.copy(GOLDEN / "tiny-long.gguf", path)
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", TOUCH, str(path)], capture_output=True, cwd=root, timeout=60)
    assert done.returncode == -signal.SIGBUS and done.stdout == b""


def test_tensor_is_what_the_quants_module_decodes() -> None:
    tensor = Tensor("t", "F32", (2, 2), np.arange(4, dtype="<f4").view(np.uint8))
    assert quants.dequantize(tensor).tolist() == [[0, 1], [2, 3]]
