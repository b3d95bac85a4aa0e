"""Where a model's bytes are, and how many of them a decode step has to read. Knows no file and no device.

The figures are those of weights alone: what sessions read of their caches comes on top.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ds4.model import roles
from ds4.model.quants import row_bytes, tensor_bytes
from ds4.model.roles import tensor_roles
from ds4.model.shape import ModelShape


@dataclass(frozen=True)
class GroupBytes:
    """One group of tensors (a name of roles.GROUPS)."""

    group: str
    n_tensors: int
    n_bytes: int
    dtypes: Mapping[str, int]  # dtype: bytes


def group_bytes(shape: ModelShape, dtypes: Mapping[str, str]) -> list[GroupBytes]:
    """Bytes by group, in the order of roles.GROUPS. `dtypes` maps tensor names to dtypes; absent ones are skipped."""
    counts = dict.fromkeys(roles.GROUPS, 0)
    sums: dict[str, dict[str, int]] = {group: {} for group in roles.GROUPS}
    for role in tensor_roles(shape):
        if role.name in dtypes:
            dtype = dtypes[role.name]
            counts[role.group] += 1
            by_dtype = sums[role.group]
            by_dtype[dtype] = by_dtype.get(dtype, 0) + tensor_bytes(dtype, role.shape)
    return [GroupBytes(g, counts[g], sum(sums[g].values()), sums[g]) for g in roles.GROUPS if counts[g]]


def distinct_experts(shape: ModelShape, n_sessions: int) -> float:
    """Expected number of different experts in a layer when n sessions decode one token each, chosen evenly."""
    missed = 1.0 - shape.n_experts_used / shape.n_experts
    return shape.n_experts * (1.0 - missed**n_sessions)


def step_bytes(shape: ModelShape, dtypes: Mapping[str, str], n_sessions: int) -> dict[str, float]:
    """Bytes by group that one step reads when n sessions decode one token each and every weight is read once.

    Dense weights count once, an embedding row and an id row once per session, routed experts by `distinct_experts`.
    """
    share = distinct_experts(shape, n_sessions) / shape.n_experts
    total: dict[str, float] = {}
    for role in tensor_roles(shape):
        if role.name not in dtypes:
            continue
        dtype = dtypes[role.name]
        if role.group in (roles.EMBEDDING, roles.ID_TABLES):
            n_bytes: float = n_sessions * row_bytes(dtype, role.shape[-1])
        elif role.group == roles.ROUTED:
            n_bytes = share * tensor_bytes(dtype, role.shape)
        else:
            n_bytes = tensor_bytes(dtype, role.shape)
        total[role.group] = total.get(role.group, 0.0) + n_bytes
    return total
