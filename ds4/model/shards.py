"""Models split over several GGUF files: which files belong together, and whether they agree. Knows no tensor role.

A split file names its place in the keys split.no (from 0), split.count and split.tensors.count, and its siblings
lie beside it as NAME-00001-of-00003.gguf and so on. The first one carries the model's metadata.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ds4.errors import ModelFormatError, TensorError
from ds4.model.gguf import Gguf, TensorInfo
from ds4.model.gguf_values import show

MAX_SHARDS = 9999

_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


def shard_name(stem: str, index: int, count: int) -> str:
    return f"{stem}-{index + 1:05d}-of-{count:05d}.gguf"


def sibling_paths(path: Path, gguf: Gguf) -> tuple[Path, ...]:
    """All files of the model that `path`, already parsed as `gguf`, is part of: in order, `path` among them.

    Raises ModelFormatError when the name and the split keys disagree, or naming the sibling that is missing.
    """
    match = _NAME.fullmatch(path.name)
    count = _split_value(gguf, "split.count", 0, MAX_SHARDS, default=0)
    if "split.count" not in gguf.metadata and match and int(match["count"]) > 1:
        raise ModelFormatError(
            f"the name says part {int(match['number'])} of {int(match['count'])}, but the file has no split.count key",
            file=gguf.file,
            where="key 'split.count'",
        )
    if count <= 1:
        return (path,)
    index = _split_value(gguf, "split.no", 0, count - 1)
    if match is None or path.name != shard_name(match["stem"], index, count):
        raise ModelFormatError(
            f"this is part {index + 1} of {count} of a split model, and the other parts are found by name: "
            "give the file its original name",
            file=gguf.file,
            where="file name",
            expected=shard_name(match["stem"] if match else "NAME", index, count),
            found=path.name,
        )
    paths = tuple(path.with_name(shard_name(match["stem"], i, count)) for i in range(count))
    missing = [p.name for p in paths if not p.exists()]
    if missing:
        raise ModelFormatError(
            f"part {index + 1} of {count} of a split model, but {len(missing)} other part(s) are missing beside it: "
            + ", ".join(missing[:3]),
            file=gguf.file,
            where="file name",
            missing=tuple(missing),
        )
    return paths


def merge(shards: Sequence[Gguf]) -> tuple[Mapping[str, Any], list[tuple[Gguf, TensorInfo]]]:
    """Metadata of the model and every tensor with the shard it lies in.

    Raises ModelFormatError when the shards do not form one model: wrong place, wrong sum of tensors, a tensor in
    two of them, or a metadata value that contradicts the first shard's.
    """
    if len(shards) > 1:
        _check_places(shards)
    tensors: dict[str, tuple[Gguf, TensorInfo]] = {}
    for shard in shards:
        for info in shard.tensors.values():
            if info.name in tensors:
                raise TensorError(
                    "a tensor is in two parts of the split model",
                    file=shard.file,
                    tensor=info.name,
                    expected="one part only",
                    found=tensors[info.name][0].file,
                )
            tensors[info.name] = (shard, info)
    metadata = dict(shards[0].metadata)
    for shard in shards[1:]:
        _add_metadata(metadata, shard)
    return metadata, list(tensors.values())


def _check_places(shards: Sequence[Gguf]) -> None:
    """Each part where it says it is, before their sum is believed: so the wrong part is the one that is named."""
    total = sum(len(shard.tensors) for shard in shards)
    for index, shard in enumerate(shards):
        _check_key(shard, "split.no", index)
        _check_key(shard, "split.count", len(shards))
    for shard in shards:
        _check_key(shard, "split.tensors.count", total)


def _check_key(shard: Gguf, key: str, expected: int) -> None:
    found = shard.metadata.get(key)
    if type(found) is not int or found != expected:
        raise ModelFormatError(
            f"the parts do not belong together: {key} is {show(found)}, not {expected}",
            file=shard.file,
            where=f"key '{key}'",
            expected=expected,
            found=show(found),
        )


def _add_metadata(metadata: dict[str, Any], shard: Gguf) -> None:
    for key, value in shard.metadata.items():
        if key == "split.no" or key == "general.alignment":  # these describe the file, not the model
            continue
        if key in metadata and not _equal(metadata[key], value):
            raise ModelFormatError(
                "a metadata value contradicts that of the first part of the split model",
                file=shard.file,
                where=f"key '{key}'",
            )
        metadata.setdefault(key, value)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return type(a) is type(b) and a.dtype == b.dtype and bool(np.array_equal(a, b))
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_equal, a, b))
    return type(a) is type(b) and bool(a == b)


def _split_value(gguf: Gguf, key: str, low: int, high: int, default: int | None = None) -> int:
    value = gguf.metadata.get(key, default)
    if type(value) is not int or not low <= value <= high:
        raise ModelFormatError(
            f"{key} cannot be {show(value)}",
            file=gguf.file,
            where=f"key '{key}'",
            accepted=f"a whole number from {low} to {high}",
        )
    return value
