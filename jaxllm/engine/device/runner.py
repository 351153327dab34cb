"""Owns the devices: packs a batch, enqueues its step, and hands back a handle at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.engine.device.executables import Executables
from jaxllm.engine.device.handle import Handle, Pooled, PooledRow, SampledRow, Score
from jaxllm.engine.device.keys import MASKED, PLAIN, SAMPLED, Key, Variant
from jaxllm.engine.device.packing import (
    SAMPLING_FLOATS,
    SAMPLING_INTS,
    backbone_packing,
    decode_packing,
    head_packing,
    logits_packing,
    pool_packing,
    score_packing,
)
from jaxllm.engine.device.slots import MAX_BLOCKED, SlotUpdate, mask_words
from jaxllm.engine.device.step import DeviceState, Sampled, StepSizes
from jaxllm.engine.request import Request, Status
from jaxllm.engine.scheduler import Batch, Chunk
from jaxllm.requests.pooling import MAX_TOKEN_IDS
from jaxllm.requests.sampling import MAX_LOGIT_BIAS
from jaxllm.text.bad_words import MAX_SPELLING_LENGTH, MAX_SPELLINGS

_ALL = 2**30
"""More tokens than any context has."""


class Runner:
    """The only owner of device state. Arrays by slot mirror on the host what each step must be told."""

    def __init__(
        self,
        executables: Executables,
        weights: tuple[jax.Array, ...],
        abstract: DeviceState,
        sizes: StepSizes,
        vocab_size: int,
        eos_token_ids: list[int],
    ):
        self.executables = executables
        self._weights = weights
        self._sizes = sizes
        self._vocab_size = vocab_size
        self._eos = eos_token_ids
        self._pages, self._slots, self._hidden = _zeros(abstract)
        slots = sizes.max_num_seqs + 1
        self._page_table = np.zeros((slots, sizes.pages_per_seq), np.int32)
        self._num_pages = [0] * slots
        self._rotary_len = np.zeros(slots, np.int32)
        self._ints = {n: np.zeros((slots, 2) if n == "seed" else slots, np.int32) for n in SAMPLING_INTS}
        self._floats = {n: np.zeros(slots, np.float32) for n in SAMPLING_FLOATS}
        self.scheduled_tokens: dict[str, int] = {}
        self.padded_tokens: dict[str, int] = {}

    def missing(self, request: Request) -> list[Key]:
        """Executables that not every request needs, that this one does, and that are not compiled yet."""
        keys = []
        size = self.executables.most_rows
        if request.params.structured_outputs is not None:
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
        for chunk in batch.chunks:
            self._note_pages(chunk.request)
        handle = self._decode(batch) if batch.decode_only and not batch.constrained else self._prefill(batch)
        _copy_to_host(handle)
        return handle

    def sample_waiting(self, handle: Handle, fill: Callable[[list[Request], np.ndarray], None]) -> None:
        """Enqueue the second half of a step whose rows wait for masks, which `fill` writes: [R, V/32], one bit a token.

        Requests that have ended meanwhile are left out.
        """
        rows = [row for row in handle.waiting if row.request.status is Status.RUNNING]
        handle.waiting, handle.requests = [], [row.request for row in rows]
        if rows:
            handle.sampled = self._head(rows, fill)
            _copy_to_host(handle)

    def _decode(self, batch: Batch) -> Handle:
        requests = [chunk.request for chunk in batch.chunks]
        count = len(requests)
        key, step = self.executables.covering("decode", count, _variant(requests))
        packing = decode_packing(key.size, self._sizes.pages_per_seq, key.variant.sampled)
        ints, floats = np.zeros(packing.ints.size, np.int32), np.zeros(packing.floats.size, np.float32)
        x = packing.ints.views(ints)
        slots = self._slot_rows(requests, key.size)
        x["num_decodes"][...] = count
        x["tokens"][:] = 0
        x["tokens"][:count] = [_token_or_device(chunk) for chunk in batch.chunks]
        x["position"][:count] = [chunk.start for chunk in batch.chunks]
        x["slot"][:] = slots
        x["rotary_len"][:] = self._rotary_len[slots]
        x["page_table"][:count] = self._page_table[slots[:count]]
        if key.variant.sampled:
            self._pack_sampling(x, packing.floats.views(floats), slots)
        self._count(key, count)
        self._pages, self._slots, sampled = step(self._weights, self._pages, self._slots, ints, floats)
        return Handle(requests, sampled)

    def _prefill(self, batch: Batch) -> Handle:
        key, step = self.executables.covering("backbone", batch.num_tokens)
        ints = self._pack_backbone(batch, key.size)
        self._count(key, batch.num_tokens)
        self._pages, self._hidden = step(self._weights, self._pages, self._slots, self._hidden, ints)
        rows: list[SampledRow] = []
        pooling: list[tuple[Chunk, int]] = []
        scores: list[Score] = []
        row = 0
        for chunk in batch.chunks:
            last = row + chunk.length - 1
            if chunk.request.pooling is not None:
                pooling.append((chunk, row))
            elif chunk.samples:
                rows.append(SampledRow(chunk.request, last, chunk.start + chunk.length - 1))
            if chunk.request.params.prompt_logprobs is not None:
                scores += self._score(chunk, row)
            row += chunk.length
        handle = Handle(scores=scores, pooled=self._pool(pooling))
        if batch.constrained:
            handle.waiting = rows
        elif rows:
            handle.requests, handle.sampled = [row.request for row in rows], self._head(rows)
        return handle

    def _pack_backbone(self, batch: Batch, size: int) -> np.ndarray:
        packing = backbone_packing(size, self._sizes.max_num_seqs, self._sizes.pages_per_seq)
        ints = np.zeros(packing.size, np.int32)
        x = packing.views(ints)
        count = len(batch.chunks)
        slots = self._slot_rows([chunk.request for chunk in batch.chunks], x["slot"].shape[0])
        x["num_decodes"][...] = batch.num_decodes
        x["num_seqs"][...] = count
        x["seq_ids"][:] = x["slot"].shape[0]
        x["slot"][:] = slots
        x["rotary_len"][:] = self._rotary_len[slots]
        x["page_table"][:count] = self._page_table[slots[:count]]
        row = 0
        for index, chunk in enumerate(batch.chunks):
            end = row + chunk.length
            known = chunk.request.token_ids[chunk.start : chunk.start + chunk.length]
            x["tokens"][row:end] = known if len(known) == chunk.length else [*known, -1]
            x["positions"][row:end] = np.arange(chunk.start, chunk.start + chunk.length)
            x["seq_ids"][row:end] = index
            x["context_len"][index] = chunk.start + chunk.length
            row = end
            x["query_start"][index + 1 :] = row
        return ints

    def _head(self, rows: list[SampledRow], fill: Callable[[list[Request], np.ndarray], None] | None = None) -> Sampled:
        requests = [row.request for row in rows]
        count = len(rows)
        key, step = self.executables.covering("head", count, _variant(requests) if fill is None else MASKED)
        words = mask_words(self._vocab_size) if key.variant.masked else 0
        packing = head_packing(key.size, key.variant.sampled, words)
        ints, floats = np.zeros(packing.ints.size, np.int32), np.zeros(packing.floats.size, np.float32)
        x = packing.ints.views(ints)
        x["hidden_row"][:count] = [row.row for row in rows]
        x["position"][:count] = [row.position for row in rows]
        x["slot"][:] = self._slot_rows(requests, key.size)
        if key.variant.sampled:
            self._pack_sampling(x, packing.floats.views(floats), x["slot"])
        if key.variant.masked:
            x["mask"][...] = -1
        if fill is not None:
            fill(requests, x["mask"][:count])
        self._count(key, count)
        self._slots, sampled = step(self._weights, self._slots, self._hidden, ints, floats)
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
                sums.append((PooledRow(request, size, chunk.start == 0, chunk.samples), slice(row, end)))
            elif kind == "cls" and chunk.start == 0:
                sums.append((PooledRow(request, size, True, True), slice(row, row + 1)))
            elif kind == "last" and chunk.samples:
                sums.append((PooledRow(request, size, True, True), slice(end - 1, end)))
            elif kind == "logits" and chunk.samples:
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
            for ids in [request.pooling.token_ids or range(self._vocab_size)]  # type: ignore[union-attr]
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
        """Fill a slot's rows; its history and biases go to the device only where the sampler will read them."""
        slot, p = request.slot, request.params
        self._num_pages[slot] = 0
        self._page_table[slot] = 0
        self._rotary_len[slot] = request.rotary_len
        seed = np.array([request.seed & (2**64 - 1)], np.uint64).view(np.int32)
        values: dict[str, Any] = {
            "top_k": min(p.top_k, self._vocab_size), "seed": seed, "prompt_len": request.num_prompt,
            "blocked_until": request.num_prompt + p.min_tokens, "adjust": p.adjusts_logits,
            "logprobs": p.logprobs is not None, "window": _ALL if p.repeat_last_n is None else p.repeat_last_n,
            "temperature": p.temperature, "top_p": p.top_p, "min_p": p.min_p,
            "presence": p.presence_penalty, "frequency": p.frequency_penalty, "repetition": p.repetition_penalty,
        }  # fmt: skip
        for name, rows in (*self._ints.items(), *self._floats.items()):
            rows[slot] = values[name]
        if request.needs_history:
            step = self.executables.get(Key("set_slot"))
            self._slots = step(self._slots, self._slot_update(request))

    def _slot_update(self, request: Request) -> SlotUpdate:
        history = np.zeros(self._sizes.max_model_len + 1, np.int32)
        history[: len(request.token_ids)] = request.token_ids
        ids = np.full(MAX_LOGIT_BIAS, self._vocab_size, np.int32)
        values = np.zeros(MAX_LOGIT_BIAS, np.float32)
        bias = request.params.logit_bias
        ids[: len(bias)], values[: len(bias)] = list(bias), list(bias.values())
        blocked = np.full(MAX_BLOCKED, self._vocab_size, np.int32)
        stops = [*request.params.stop_token_ids, *(() if request.params.ignore_eos else self._eos)]
        blocked[: len(stops)] = stops
        allowed = np.full(mask_words(self._vocab_size), -1, np.int32)
        if request.params.allowed_token_ids is not None:
            bits = np.zeros(allowed.size * 32, bool)
            bits[list(request.params.allowed_token_ids)] = True
            allowed = np.packbits(bits, bitorder="little").view(np.int32)
        bad_words = np.full((MAX_SPELLINGS, MAX_SPELLING_LENGTH), -1, np.int32)
        bad_words[:, -1] = self._vocab_size
        for row, tokens in zip(bad_words, request.bad_words, strict=False):
            row[-len(tokens) :] = tokens
        return SlotUpdate(np.int32(request.slot), history, ids, values, blocked, allowed, bad_words)  # type: ignore[arg-type]

    def _note_pages(self, request: Request) -> None:
        """Copy the pages a request has gained into its row of the page table."""
        known, pages = self._num_pages[request.slot], request.pages
        if len(pages) > known:
            self._page_table[request.slot, known : len(pages)] = pages[known:]
            self._num_pages[request.slot] = len(pages)

    def _slot_rows(self, requests: list[Request], size: int) -> np.ndarray:
        """Each request's slot, then the slot that belongs to nobody."""
        slots = np.full(size, self._sizes.max_num_seqs, np.int32)
        slots[: len(requests)] = [request.slot for request in requests]
        return slots

    def _pack_sampling(self, x: dict[str, np.ndarray], f: dict[str, np.ndarray], slots: np.ndarray) -> None:
        for name, rows in self._ints.items():
            x[name][...] = rows[slots]
        for name, values in self._floats.items():
            f[name][...] = values[slots]

    def _count(self, key: Key, used: int) -> None:
        name = f"{key.kind}-{key.size}"
        self.scheduled_tokens[name] = self.scheduled_tokens.get(name, 0) + used
        self.padded_tokens[name] = self.padded_tokens.get(name, 0) + key.size - used


def _copy_to_host(handle: Handle) -> None:
    for array in handle.arrays():
        array.copy_to_host_async()


def _variant(requests: list[Request]) -> Variant:
    return PLAIN if all(request.params.greedy for request in requests) else SAMPLED


def _scoring_key(request: Request, size: int) -> Key:
    return Key("score_all" if request.params.prompt_logprobs == -1 else "score", size)


def _token_or_device(chunk: Chunk) -> int:
    """The chunk's only token, or -1 when it is still on the device."""
    tokens = chunk.request.token_ids
    return tokens[chunk.start] if chunk.start < len(tokens) else -1


def _zeros(abstract: DeviceState) -> DeviceState:
    """Allocate the device state in place, already sharded."""
    shardings = jax.tree.map(lambda a: a.sharding, abstract)
    return jax.jit(lambda: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), abstract), out_shardings=shardings)()
