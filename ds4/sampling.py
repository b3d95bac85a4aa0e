"""SamplingParams: how the next token is drawn from logits. The drawing itself is in ds4._core.

Order, for every draw:

1. `logit_bias` is added.
2. Penalties, over the session's tokens from `penalty_start` on: a token seen c > 0 times has its logit divided
   (if positive) or multiplied (if not) by `repetition_penalty`, then lowered by `presence_penalty` and by
   c * `frequency_penalty`.
3. `temperature` 0 takes the largest logit, lowest id first among equals, whatever the seed. Otherwise logits are
   divided by it and turned into probabilities.
4. Candidates are ordered by falling logit, then rising id. `top_k` keeps the first k; `top_p` keeps the shortest
   beginning that holds at least top_p of what top_k left, at least one token; `min_p` drops tokens less likely than
   min_p times the most likely.
5. One uniform number picks among the candidates, in that order. It is a hash of (seed, position) and nothing else
   (SplitMix64 of Steele, Lea and Flood 2014), so a stream depends on prompt, parameters and seed only, and goes on
   unchanged after a rewind, a fork or a restore.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ds4.errors import SamplingError


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of one draw; validated when made. Raises SamplingError naming the field.

    top_k 0 or -1, top_p 1, min_p 0, repetition_penalty 1, presence and frequency penalty 0 mean off; top_p 0 keeps
    the best token only. `logit_bias` maps token id to a number to add; -inf bans a token. `seed` None uses the
    session's own seed.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    penalty_start: int = 0  # position from which tokens count for the penalties
    seed: int | None = None

    def __post_init__(self) -> None:
        self._number("temperature", 0.0, math.inf, "a finite number, 0 (greedy) or more", open_end=True)
        self._number("top_p", 0.0, 1.0, "a number from 0 to 1")
        self._number("min_p", 0.0, 1.0, "a number from 0 to 1")
        self._number("repetition_penalty", 0.0, math.inf, "a finite number above 0", open_start=True, open_end=True)
        self._number("presence_penalty", -math.inf, math.inf, "a finite number", open_start=True, open_end=True)
        self._number("frequency_penalty", -math.inf, math.inf, "a finite number", open_start=True, open_end=True)
        self._integer("top_k", -1, 2**63 - 1, "a whole number; 0 or -1 for no limit")
        self._integer("penalty_start", 0, 2**31 - 1, "a position, 0 or more")
        if self.seed is not None:
            self._integer("seed", 0, 2**64 - 1, "a whole number from 0 to 2**64 - 1, or None")
        self._bias()

    def _refuse(self, field: str, value: Any, wanted: str) -> None:
        raise SamplingError(f"{field} must be {wanted}", field=field, value=value)

    def _number(
        self, field: str, low: float, high: float, wanted: str, *, open_start: bool = False, open_end: bool = False
    ) -> None:
        value = getattr(self, field)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not low <= value <= high or (open_start and value == low) or (open_end and value == high):
            self._refuse(field, value, wanted)

    def _integer(self, field: str, low: int, high: int, wanted: str) -> None:
        value = getattr(self, field)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            self._refuse(field, value, wanted)

    def _bias(self) -> None:
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, Mapping):
            self._refuse("logit_bias", self.logit_bias, "a mapping of token id to number")
        for token, bias in self.logit_bias.items():
            if not isinstance(token, int) or isinstance(token, bool) or token < 0:
                self._refuse("logit_bias", token, "keyed by token ids (whole numbers, not text)")
            if not isinstance(bias, (int, float)) or isinstance(bias, bool) or not bias < math.inf:
                self._refuse("logit_bias", bias, f"a number below infinity for token {token}")
        # A private copy: a caller that changes its dict must not change a frozen record.
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
