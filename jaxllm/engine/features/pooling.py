"""What is read off the hidden states of a prompt in place of sampling: sums, single states, logits of given tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.engine.core.feature import (
    EVERYTHING,
    Built,
    Feature,
    Fields,
    Plan,
    Ran,
    Reading,
    Traced,
    TracedStep,
)
from jaxllm.engine.core.keys import Key
from jaxllm.engine.core.packing import Packing
from jaxllm.engine.core.request import Chunk, Request, Status
from jaxllm.engine.core.sizes import Buckets, StepSizes
from jaxllm.engine.core.slots import Slots
from jaxllm.engine.core.step import StepFunctions
from jaxllm.engine.messages import EngineRequest, TokenDelta
from jaxllm.pallas_kernels import StepMetadata
from jaxllm.requests.outputs import MAX_TOKEN_IDS, PoolingParams

SUMS = Key("read", 0, frozenset({"sums"}))


@dataclass
class _PoolingState:
    params: PoolingParams
    second_text: int
    """Where the second of two texts begins, which an encoder tells from the first; 0 where there is one."""
    values: np.ndarray | None = None
    """What has reached the host."""

    def add(self, values: np.ndarray, first: bool) -> None:
        """Sums of further chunks add up, logits of further tokens follow; the first begin anew after a preemption."""
        if first or self.values is None:
            self.values = values.copy()
        elif self.params.kind == "logits":
            self.values = np.concatenate([self.values, values])
        else:
            self.values += values

    def bytes_of(self, num_prompt: int) -> bytes:
        """What the caller gets: float32, little-endian."""
        assert self.values is not None, "the last values have come"
        values = self.values / num_prompt if self.params.kind == "mean" else self.values
        return values.astype("<f4").tobytes()


class _Row(NamedTuple):
    """Whose values a row holds, and how many; the `first` of a request's rows and the `last` may be the same."""

    request: Request
    width: int
    first: bool
    last: bool


class PoolingFeature(Feature):
    """Its requests run backbones only. An encoder is told besides where each of its texts goes on as a second one."""

    name = "pooling"
    on = ("encode",)
    always = True
    asked_by = ("pooling",)
    words = ("sums", "token_logits")

    def plan(self, buckets: Buckets) -> Plan:
        logits = [_logits_key(rows) for rows in (buckets.head if buckets.encodes else buckets.head[-1:])]
        if buckets.encodes:
            return Plan(first=logits or [SUMS])
        return Plan(late=[SUMS, *logits])

    def uses(self, key: Key, uses: Any) -> Any:
        return uses._replace(takes=("hidden",)) if key == SUMS else uses

    def build(self, key: Key, maker: StepFunctions) -> Built:
        """`(parts, ints) -> ([max_num_seqs, E],)` float32, the sums of the hidden states that belong together; or
        `([R, n],)`, the logits of given tokens, float32.
        """
        seqs, most = maker.sizes.max_num_seqs, maker.sizes.max_num_batched_tokens
        packing = _logits_packing(key.size)

        def sums(parts: dict[str, Any], owner: jax.Array) -> Any:
            return (jax.ops.segment_sum(parts["hidden"].astype(jnp.float32), owner, seqs + 1)[:-1],)

        def logits(parts: dict[str, Any], ints: jax.Array) -> Any:
            x = packing.unpack(ints)
            found = maker.model(parts).logits(parts["hidden"][x["hidden_row"]])
            return (jnp.take_along_axis(found, x["token_ids"], axis=1),)

        return Built(sums, [maker.state.ints(most)]) if key == SUMS else Built(logits, [maker.state.ints(packing.size)])

    def prepare(self, request: Request, asked: EngineRequest) -> _PoolingState | None:
        return asked.pooling and _PoolingState(asked.pooling, asked.second_text)

    def needs(self, request: Request, extra: _PoolingState) -> Iterable[Key]:
        return [_logits_key(self.around.device.most_rows) if extra.params.kind == "logits" else SUMS]

    def first_read(self, request: Request, extra: _PoolingState) -> int:
        return 0 if extra.params.kind in ("mean", "cls") else EVERYTHING

    def apart(self, request: Request, extra: _PoolingState, tokens: range) -> bool:
        return True

    def fields(self, key: Key, sizes: StepSizes) -> dict[str, tuple[int, ...]]:
        return {"second_text": (min(key.size, sizes.max_num_seqs),)}

    def pack(self, key: Key, x: Fields, chunks: Sequence[Chunk]) -> tuple[np.ndarray, ...]:
        x["second_text"][: len(chunks)] = [chunk.request.extras[self.name].second_text for chunk in chunks]
        return ()

    def traced(self, step: TracedStep) -> Traced:
        return _Texts(step.x["second_text"])

    def read(self, ran: Ran) -> Iterable[Reading]:
        sums: list[tuple[_Row, slice]] = []
        logits: list[tuple[Request, int]] = []
        size = self.around.sizes.hidden_size
        for chunk, row in ran.chunks:
            request, end = chunk.request, row + chunk.length
            extra = request.extras.get(self.name)
            kind = None if extra is None else extra.params.kind
            if kind == "mean":
                sums.append((_Row(request, size, chunk.start == 0, chunk.num_sampled > 0), slice(row, end)))
            elif kind == "cls" and chunk.start == 0:
                sums.append((_Row(request, size, True, True), slice(row, row + 1)))
            elif kind == "last" and chunk.num_sampled:
                sums.append((_Row(request, size, True, True), slice(end - 1, end)))
            elif kind == "logits" and chunk.num_sampled:
                logits.append((request, end - 1))
        return [*self._sums(sums), *(self._logits(logits) if logits else ())]

    def _sums(self, wanted: list[tuple[_Row, slice]]) -> Iterable[Reading]:
        if wanted:
            owner = np.full(self.around.sizes.max_num_batched_tokens, self.around.sizes.max_num_seqs, np.int32)
            for index, (_, rows) in enumerate(wanted):
                owner[rows] = index
            yield self._reading([row for row, _ in wanted], self.around.device.run(SUMS, owner))

    def _logits(self, wanted: list[tuple[Request, int]]) -> Iterable[Reading]:
        """Each request takes as many rows as its token ids fill."""
        size = self.around.device.most_rows
        pieces = [
            (_Row(request, len(ids[start:end]), start == 0, end >= len(ids)), row, ids[start:end])
            for request, row in wanted
            for ids in [request.extras[self.name].params.token_ids or range(self.around.sizes.vocab_size)]
            for start in range(0, len(ids), MAX_TOKEN_IDS)
            for end in [start + MAX_TOKEN_IDS]
        ]
        for start in range(0, len(pieces), size):
            part = pieces[start : start + size]
            ints, x = _logits_packing(size).new()
            for index, (_, row, ids) in enumerate(part):
                x["hidden_row"][index] = row
                x["token_ids"][index, : len(ids)] = ids
            yield self._reading([row for row, _, _ in part], self.around.device.run(_logits_key(size), ints))

    def _reading(self, rows: list[_Row], result: Any) -> Reading:
        def deliver() -> Iterable[TokenDelta]:
            for values, (request, width, first, last) in zip(np.asarray(result), rows, strict=False):
                if request.status is Status.FINISHED:
                    continue
                extra = request.extras[self.name]
                extra.add(values[:width], first)
                if last:
                    pooled = extra.bytes_of(request.num_prompt)
                    yield TokenDelta(request_id=request.request_id, pooled=pooled, finish_reason="stop")

        return Reading(result, deliver)


class _Texts(Traced):
    def __init__(self, second: Any):
        self._second = second

    def metadata(self, meta: StepMetadata, slots: Slots) -> StepMetadata:
        return with_token_types(meta, self._second)


def with_token_types(meta: StepMetadata, second: Any) -> StepMetadata:
    """Which of two texts each token is of: `second` `[S]` is where each sequence's second one begins, 0 for nowhere."""
    begins = second[jnp.minimum(meta.seq_ids, len(second) - 1)]
    return replace(meta, token_types=((begins > 0) & (meta.positions >= begins)).astype(jnp.int32))


def _logits_key(rows: int) -> Key:
    return Key("read", rows, frozenset({"token_logits"}))


def _logits_packing(rows: int) -> Packing:
    """`rows` rows of hidden states, and the tokens of each whose logits are asked for."""
    return Packing(hidden_row=(rows,), token_ids=(rows, MAX_TOKEN_IDS))
