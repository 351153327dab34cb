"""Which weights made the tokens of a choice."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from jaxllm.requests.outputs import WeightVersionSpan


class WeightSpan(msgspec.Struct):
    """Tokens from `start` up to `end` of a choice, counted from 0, were made by weights of this version."""

    version: str
    start: int
    end: int


def weight_spans(spans: Iterable[WeightVersionSpan]) -> list[WeightSpan]:
    """As clients see them."""
    return [WeightSpan(*span) for span in spans]
