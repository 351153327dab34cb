"""Packs a batch for the Device, enqueues its step, and hands back a handle at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from jaxllm.engine.device.admission import admission, history, settings_of
from jaxllm.engine.device.choice import Sampled
from jaxllm.engine.device.device import Device
from jaxllm.engine.device.executables import Compiles
from jaxllm.engine.device.handle import Handle, SampledRow, Score
from jaxllm.engine.device.keys import MASKED, PLAIN, SAMPLED, Key, Variant
from jaxllm.engine.device.packing import backbone_packing, decode_packing, head_packing, verify_packing
from jaxllm.engine.device.readout import Readout, scoring_key
from jaxllm.engine.device.sizes import StepSizes
from jaxllm.engine.masks import mask_words
from jaxllm.engine.request import Request, Status
from jaxllm.engine.scheduler import Batch, Chunk


class Runner:
    """What a slot was told is not sent again: a step carries only what changed."""

    def __init__(self, device: Device, sizes: StepSizes, vocab_size: int, eos_token_ids: list[int]):
        self._device = device
        self._sizes = sizes
        self._readout = Readout(device, sizes, vocab_size)
        self.vocab_size = vocab_size
        self._eos = eos_token_ids
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
        size = self._device.most_rows
        if request.params.structured_outputs is not None or request.params.max_thinking_tokens is not None:
            keys.append(Key("head", size, MASKED))
        if request.params.prompt_logprobs is not None:
            keys.append(scoring_key(request, size))
        if request.params.wants_vocabulary:
            keys.append(Key("score_all", size))
        if request.pooling is not None:
            keys.append(Key("token_logits", size) if request.pooling.kind == "logits" else Key("pool"))
        return self._device.missing(keys)

    def compile(self, key: Key) -> None:
        """Wait until a step can be run at once. Any thread may call this."""
        self._device.compile(key)

    @property
    def compiles(self) -> Compiles:
        """How much has been compiled, and how much is still to be."""
        return self._device.compiles

    def close(self) -> None:
        """Compile nothing more. Any thread may call this."""
        self._device.close()

    def dispatch(self, batch: Batch) -> Handle:
        """Enqueue the step for `batch` without waiting for anything."""
        for request in batch.admitted:
            self._admit(request)
        if not batch.decode_only or batch.masked:
            handle = self._prefill(batch)
        else:
            handle = self._verify(batch) if self._sizes.drafts is not None else self._decode(batch)
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
        rows = [SampledRow(chunk.request, i) for i, chunk in enumerate(batch.chunks)]
        count = len(rows)
        key = self._device.covering("decode", count, _variant(rows))
        packing = decode_packing(key.size, self._sizes.has_states)
        ints = np.zeros(packing.size, np.int32)
        x = packing.views(ints)
        x["num_decodes"][...] = count
        x["num_steps"][...] = batch.num_steps
        x["tokens"][:count] = [_token_or_device(chunk) for chunk in batch.chunks]
        x["slot"][:] = self._slot_rows(rows, key.size)
        x["new_page"][:count] = [self._new_page(chunk.request) for chunk in batch.chunks]
        _pack_states(x, batch.chunks)
        self._count(key, count, batch.num_steps)
        sampled = self._device.run(key, ints)
        return Handle(rows, sampled, num_steps=batch.num_steps, stride=self._sizes.decode_steps)

    def _verify(self, batch: Batch) -> Handle:
        rows = [SampledRow(chunk.request, i) for i, chunk in enumerate(batch.chunks)]
        count = len(rows)
        key = self._device.covering("verify", count, _variant(rows))
        packing = verify_packing(key.size)
        ints = np.zeros(packing.size, np.int32)
        x = packing.views(ints)
        x["num_decodes"][...] = count
        x["tokens"][:count] = [_token_or_device(chunk) for chunk in batch.chunks]
        x["slot"][:] = self._slot_rows(rows, key.size)
        reserved = [chunk.num_sampled - 1 for chunk in batch.chunks]
        x["most_drafts"][:count] = reserved
        self._pack_new_pages(x["new_pages"], batch)
        self._count(key, count)
        sampled = self._device.run(key, ints)
        return Handle(rows, sampled, stride=self._sizes.num_drafts + 1, reserved=reserved)

    def _prefill(self, batch: Batch) -> Handle:
        key = self._device.covering("backbone", batch.num_tokens)
        ints = self._pack_backbone(batch, key.size)
        self._count(key, batch.num_tokens)
        self._device.run(key, ints)
        rows: list[SampledRow] = []
        pooling: list[tuple[Chunk, int]] = []
        scores: list[Score] = []
        row = 0
        for chunk in batch.chunks:
            if chunk.request.pooling is not None:
                pooling.append((chunk, row))
            elif chunk.num_sampled:
                assert chunk.num_sampled == 1, "a step whose backbone runs by itself gives one token"
                rows.append(SampledRow(chunk.request, row + chunk.length - 1))
            if chunk.request.params.prompt_logprobs is not None:
                scores += self._readout.score(chunk, row)
            row += chunk.length
        vocabularies = self._readout.vocabularies(rows)
        handle = Handle(scores=scores, pooled=self._readout.pool(pooling), vocabularies=vocabularies)
        if batch.masked:
            handle.waiting = rows
        elif rows:
            handle.rows, handle.sampled = rows, self._head(rows)
        return handle

    def _pack_backbone(self, batch: Batch, size: int) -> np.ndarray:
        sizes = self._sizes
        packing = backbone_packing(size, sizes.max_num_seqs, sizes.page_size, sizes.has_states)
        ints = np.zeros(packing.size, np.int32)
        x = packing.views(ints)
        x["num_decodes"][...] = batch.num_decodes
        x["num_seqs"][...] = len(batch.chunks)
        x["slot"][:] = self._slot_rows(batch.chunks, x["slot"].shape[0])
        self._pack_new_pages(x["new_pages"], batch)
        _pack_states(x, batch.chunks)
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
        key = self._device.covering("head", count, _variant(rows) if fill is None else MASKED)
        packing = head_packing(key.size, mask_words(self.vocab_size) if key.variant.masked else 0)
        ints = np.zeros(packing.size, np.int32)
        x = packing.views(ints)
        x["hidden_row"][:count] = [row.row for row in rows]
        x["slot"][:] = self._slot_rows(rows, key.size)
        if fill is not None:
            fill([row.request for row in rows], x["mask"][:count])
        self._count(key, count)
        sampled: Sampled = self._device.run(key, ints)
        return sampled

    def _admit(self, request: Request) -> None:
        """Tell a slot all about its request; what adjusts logits goes to the device only where the sampler reads it."""
        self._known_pages[request.slot] = len(request.pages)
        settings = request.settings
        assert settings is not None, "prepare() comes before dispatch()"
        ints = admission(request, settings, self._sizes.pages_per_seq)
        self._device.run(Key("admit"), ints, settings.floats)
        slot = np.int32(request.slot)
        if settings.adjustments is not None:
            self._device.run(Key("adjust"), *settings.adjustments._replace(slot=slot))  # type: ignore[arg-type]
        if settings.adjustments is not None or self._sizes.drafts is not None:
            self._device.run(Key("remember"), slot, history(request, self._sizes.max_model_len))

    def _pack_new_pages(self, rows: np.ndarray, batch: Batch) -> None:
        """What the requests have gained since their slots were last told; the rest goes to nobody."""
        gained = [page for chunk in batch.chunks for page in self._new_pages(chunk.request)]
        rows[:, 0] = self._nobody
        rows[: len(gained)] = np.reshape(gained, (-1, 3))

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


def _pack_states(x: dict[str, np.ndarray], chunks: Sequence[Chunk]) -> None:
    """Which states the chunks are resumed from, and which of theirs are kept."""
    if "state_read" in x:
        x["state_read"][: len(chunks)] = [chunk.state_read for chunk in chunks]
        x["state_kept"][: len(chunks)] = [chunk.state_kept for chunk in chunks]
        x["kept_tokens"][: len(chunks)] = [chunk.kept_tokens for chunk in chunks]


def _token_or_device(chunk: Chunk) -> int:
    """The chunk's only token, or -1 when it is still on the device."""
    tokens = chunk.request.token_ids
    return tokens[chunk.start] if chunk.start < len(tokens) else -1
