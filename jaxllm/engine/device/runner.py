"""Owns the devices: packs a batch, enqueues its step, and hands back a handle at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np

from jaxllm.engine.device.admission import adjustments, admission, settings_of
from jaxllm.engine.device.executables import Executables
from jaxllm.engine.device.handle import Handle, Pooled, PooledRow, SampledRow, Score
from jaxllm.engine.device.keys import MASKED, PLAIN, SAMPLED, Key, Variant
from jaxllm.engine.device.packing import (
    backbone_packing,
    decode_packing,
    head_packing,
    logits_packing,
    pool_packing,
    score_packing,
)
from jaxllm.engine.device.slots import mask_words
from jaxllm.engine.device.step import DeviceState, Sampled, StepSizes
from jaxllm.engine.request import Request, Status
from jaxllm.engine.scheduler import Batch, Chunk
from jaxllm.requests.pooling import MAX_TOKEN_IDS


class Runner:
    """The only owner of device state. What a slot was told is not sent again: a step carries only what changed."""

    def __init__(
        self,
        executables: Executables,
        weights: tuple[jax.Array, ...],
        state: DeviceState,
        sizes: StepSizes,
        vocab_size: int,
        eos_token_ids: list[int],
    ):
        self.executables = executables
        self._weights = weights
        self._sizes = sizes
        self.vocab_size = vocab_size
        self._eos = eos_token_ids
        self._pages, self._slots, self._hidden = state
        self._nobody = sizes.max_num_seqs
        """The slot that padding reads and writes."""
        self._known_pages = [0] * sizes.max_num_seqs
        """How many of its sequence's pages each slot has been told."""
        self.scheduled_tokens: dict[str, int] = {}
        self.padded_tokens: dict[str, int] = {}

    def prepare(self, request: Request) -> None:
        """Lay out what the request's slot will be told. What raises here concerns nobody else."""
        request.settings = settings_of(request, self.vocab_size, self._eos)

    def missing(self, request: Request) -> list[Key]:
        """Executables that not every request needs, that this one does, and that are not compiled yet."""
        keys = []
        size = self.executables.most_rows
        if request.params.structured_outputs is not None or request.params.max_thinking_tokens is not None:
            keys.append(Key("head", size, MASKED))
        if request.params.prompt_logprobs is not None:
            keys.append(_scoring_key(request, size))
        if request.pooling is not None:
            keys.append(Key("token_logits", size) if request.pooling.kind == "logits" else Key("pool"))
        return self.executables.missing(keys)

    def dispatch(self, batch: Batch) -> Handle:
        """Enqueue the step for `batch` without waiting for anything."""
        for request in batch.admitted:
            self._admit(request)
        handle = self._decode(batch) if batch.decode_only and not batch.masked else self._prefill(batch)
        _copy_to_host(handle)
        return handle

    def sample_waiting(self, handle: Handle, fill: Callable[[list[Request], np.ndarray], None]) -> None:
        """Enqueue the second half of a step whose rows wait for masks, which `fill` writes: [R, V/32], one bit a token.

        Requests that have ended meanwhile are left out.
        """
        handle.rows = [row for row in handle.waiting if row.request.status is Status.RUNNING]
        handle.waiting = []
        if handle.rows:
            handle.sampled = self._head(handle.rows, fill)
            _copy_to_host(handle)

    def _decode(self, batch: Batch) -> Handle:
        rows = [SampledRow(chunk.request, i, chunk.start) for i, chunk in enumerate(batch.chunks)]
        count = len(rows)
        key, step = self.executables.covering("decode", count, _variant(rows))
        packing = decode_packing(key.size)
        ints = np.zeros(packing.size, np.int32)
        x = packing.views(ints)
        x["num_decodes"][...] = count
        x["num_steps"][...] = batch.num_steps
        x["tokens"][:count] = [_token_or_device(chunk) for chunk in batch.chunks]
        x["slot"][:] = self._slot_rows(rows, key.size)
        x["new_page"][:count] = [self._new_page(chunk.request) for chunk in batch.chunks]
        self._count(key, count, batch.num_steps)
        self._pages, self._slots, sampled = step(self._weights, self._pages, self._slots, ints)
        return Handle(rows, sampled, num_steps=batch.num_steps, stride=self._sizes.decode_steps)

    def _prefill(self, batch: Batch) -> Handle:
        key, step = self.executables.covering("backbone", batch.num_tokens)
        ints = self._pack_backbone(batch, key.size)
        self._count(key, batch.num_tokens)
        self._pages, self._slots, self._hidden = step(self._weights, self._pages, self._slots, self._hidden, ints)
        rows: list[SampledRow] = []
        pooling: list[tuple[Chunk, int]] = []
        scores: list[Score] = []
        row = 0
        for chunk in batch.chunks:
            if chunk.request.pooling is not None:
                pooling.append((chunk, row))
            else:
                last = range(chunk.length - chunk.num_sampled, chunk.length)
                rows += [SampledRow(chunk.request, row + i, chunk.start + i) for i in last]
            if chunk.request.params.prompt_logprobs is not None:
                scores += self._score(chunk, row)
            row += chunk.length
        handle = Handle(scores=scores, pooled=self._pool(pooling))
        if batch.masked:
            handle.waiting = rows
        elif rows:
            handle.rows, handle.sampled = rows, self._head(rows)
        return handle

    def _pack_backbone(self, batch: Batch, size: int) -> np.ndarray:
        packing = backbone_packing(size, self._sizes.max_num_seqs, self._sizes.page_size)
        ints = np.zeros(packing.size, np.int32)
        x = packing.views(ints)
        x["num_decodes"][...] = batch.num_decodes
        x["num_seqs"][...] = len(batch.chunks)
        x["slot"][:] = self._slot_rows(batch.chunks, x["slot"].shape[0])
        gained = [page for chunk in batch.chunks for page in self._new_pages(chunk.request)]
        x["new_pages"][:, 0] = self._nobody
        x["new_pages"][: len(gained)] = np.reshape(gained, (-1, 3))
        row = 0
        for index, chunk in enumerate(batch.chunks):
            end = row + chunk.length
            known = chunk.request.token_ids[chunk.start : chunk.start + chunk.length]
            x["tokens"][row:end] = known if len(known) == chunk.length else [*known, -1]
            row = end
            x["query_start"][index + 1 :] = row
        return ints

    def _head(self, rows: list[SampledRow], fill: Callable[[list[Request], np.ndarray], None] | None = None) -> Sampled:
        count = len(rows)
        key, step = self.executables.covering("head", count, _variant(rows) if fill is None else MASKED)
        packing = head_packing(key.size, mask_words(self.vocab_size) if key.variant.masked else 0)
        ints = np.zeros(packing.size, np.int32)
        x = packing.views(ints)
        x["hidden_row"][:count] = [row.row for row in rows]
        x["position"][:count] = [row.position for row in rows]
        x["slot"][:] = self._slot_rows(rows, key.size)
        if fill is not None:
            fill([row.request for row in rows], x["mask"][:count])
        self._count(key, count)
        self._slots, sampled = step(self._weights, self._slots, self._hidden, ints)
        return sampled

    def _score(self, chunk: Chunk, row: int) -> list[Score]:
        """Log-probabilities of the prompt tokens that follow a chunk's tokens."""
        request = chunk.request
        last = min(chunk.start + chunk.length, request.num_prompt - 1)
        size = self.executables.most_rows
        packing = score_packing(size)
        scores = []
        step = self.executables.get(_scoring_key(request, size))
        for start in range(chunk.start, last, size):
            positions = range(start + 1, min(start + size, last) + 1)
            targets = request.token_ids[positions.start : positions.stop]
            ints = np.zeros(packing.size, np.int32)
            x = packing.views(ints)
            first = row + start - chunk.start
            x["hidden_row"][: len(targets)] = np.arange(first, first + len(targets))
            x["target"][: len(targets)] = targets
            result = step(self._weights, self._hidden, ints)
            scores.append(Score(request, positions, targets, result))
        return scores

    def _pool(self, chunks: list[tuple[Chunk, int]]) -> list[Pooled]:
        """What the requests that pool want of these chunks, each of which begins at a row of the hidden buffer."""
        sums: list[tuple[PooledRow, slice]] = []
        logits: list[tuple[Request, int]] = []
        size = self._sizes.hidden_size
        for chunk, row in chunks:
            request, end = chunk.request, row + chunk.length
            kind = request.pooling.kind  # type: ignore[union-attr]
            if kind == "mean":
                sums.append((PooledRow(request, size, chunk.start == 0, chunk.num_sampled > 0), slice(row, end)))
            elif kind == "cls" and chunk.start == 0:
                sums.append((PooledRow(request, size, True, True), slice(row, row + 1)))
            elif kind == "last" and chunk.num_sampled:
                sums.append((PooledRow(request, size, True, True), slice(end - 1, end)))
            elif kind == "logits" and chunk.num_sampled:
                logits.append((request, end - 1))
        return [*self._sums(sums), *self._token_logits(logits)]

    def _sums(self, wanted: list[tuple[PooledRow, slice]]) -> list[Pooled]:
        if not wanted:
            return []
        packing = pool_packing(self._sizes.max_num_batched_tokens)
        owner = np.full(packing.size, self._sizes.max_num_seqs, np.int32)
        for index, (_, rows) in enumerate(wanted):
            owner[rows] = index
        result = self.executables.get(Key("pool"))(self._hidden, owner)
        return [Pooled([row for row, _ in wanted], result)]

    def _token_logits(self, wanted: list[tuple[Request, int]]) -> list[Pooled]:
        """Each request takes as many rows as its token ids fill."""
        size = self.executables.most_rows
        pieces = [
            (PooledRow(request, len(ids[start:end]), start == 0, end >= len(ids)), row, ids[start:end])
            for request, row in wanted
            for ids in [request.pooling.token_ids or range(self.vocab_size)]  # type: ignore[union-attr]
            for start in range(0, len(ids), MAX_TOKEN_IDS)
            for end in [start + MAX_TOKEN_IDS]
        ]
        found = []
        for start in range(0, len(pieces), size):
            part = pieces[start : start + size]
            packing = logits_packing(size, MAX_TOKEN_IDS)
            ints = np.zeros(packing.size, np.int32)
            x = packing.views(ints)
            for index, (_, row, ids) in enumerate(part):
                x["hidden_row"][index] = row
                x["token_ids"][index, : len(ids)] = ids
            result = self.executables.get(Key("token_logits", size))(self._weights, self._hidden, ints)
            found.append(Pooled([row for row, _, _ in part], result))
        return found

    def _admit(self, request: Request) -> None:
        """Tell a slot all about its request; what adjusts logits goes to the device only where the sampler reads it."""
        self._known_pages[request.slot] = len(request.pages)
        settings = request.settings
        assert settings is not None, "prepare() comes before dispatch()"
        ints = admission(request, settings, self._sizes.pages_per_seq)
        self._slots = self.executables.get(Key("admit"))(self._slots, ints, settings.floats)
        if settings.adjustments is not None:
            rows = adjustments(request, settings.adjustments, self._sizes.max_model_len)
            self._slots = self.executables.get(Key("adjust"))(self._slots, rows)

    def _new_pages(self, request: Request) -> list[tuple[int, int, int]]:
        """(slot, place, page) of the pages that a request has gained since its slot was last told."""
        known, pages = self._known_pages[request.slot], request.pages
        self._known_pages[request.slot] = len(pages)
        return [(request.slot, place, pages[place]) for place in range(known, len(pages))]

    def _new_page(self, request: Request) -> int:
        """The page that a decoding request has gained, 0 where it has gained none."""
        gained = self._new_pages(request)
        return gained[0][2] if gained else 0

    def _slot_rows(self, rows: Sequence[SampledRow | Chunk], size: int) -> np.ndarray:
        """The slot of each row's request, then the one that belongs to nobody."""
        slots = np.full(size, self._nobody, np.int32)
        slots[: len(rows)] = [row.request.slot for row in rows]
        return slots

    def _count(self, key: Key, used: int, times: int = 1) -> None:
        name = f"{key.kind}-{key.size}"
        self.scheduled_tokens[name] = self.scheduled_tokens.get(name, 0) + used * times
        self.padded_tokens[name] = self.padded_tokens.get(name, 0) + (key.size - used) * times


def _copy_to_host(handle: Handle) -> None:
    for array in handle.arrays():
        array.copy_to_host_async()


def _variant(rows: list[SampledRow]) -> Variant:
    return PLAIN if all(row.request.params.greedy for row in rows) else SAMPLED


def _scoring_key(request: Request, size: int) -> Key:
    return Key("score_all" if request.params.prompt_logprobs == -1 else "score", size)


def _token_or_device(chunk: Chunk) -> int:
    """The chunk's only token, or -1 when it is still on the device."""
    tokens = chunk.request.token_ids
    return tokens[chunk.start] if chunk.start < len(tokens) else -1
