"""Packs a batch for the Device, enqueues its step, and hands back a handle at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import BinaryIO

import jax
import numpy as np

from jaxllm.engine.device.admission import adapter_scales, admission, history, settings_of
from jaxllm.engine.device.choice import Sampled
from jaxllm.engine.device.device import Device
from jaxllm.engine.device.drafts.guesses import FillMasks, Guesses
from jaxllm.engine.device.drafts.remembered import RememberedTexts
from jaxllm.engine.device.executables import Compiles
from jaxllm.engine.device.handle import Handle, LeavingPages, SampledRow
from jaxllm.engine.device.keys import MASKED, MASKED_ADAPTED, Key, Variant
from jaxllm.engine.device.packing import backbone_packing, decode_packing, head_packing, verify_packing
from jaxllm.engine.device.page_copies import PageCopies
from jaxllm.engine.device.parts import joined, parts_of
from jaxllm.engine.device.patches import RowPatch, fill_patches, patch_values, step_patches
from jaxllm.engine.device.processing import Processors
from jaxllm.engine.device.ran_step import RanExecutable, RanStep
from jaxllm.engine.device.readout import Readout, scoring_key
from jaxllm.engine.device.recording import fill_places, record, wanted_taps
from jaxllm.engine.device.sizes import StepSizes
from jaxllm.engine.masks import ALL, mask_words
from jaxllm.engine.offload.cache_rows import CacheRow
from jaxllm.engine.offload.prefix_digests import Digest
from jaxllm.engine.request import Request, Status
from jaxllm.engine.work import Batch, Chunk
from jaxllm.requests.captures import Tap


class Runner:
    """What a slot was told is not sent again: a step carries only what changed."""

    def __init__(
        self,
        device: Device,
        sizes: StepSizes,
        vocab_size: int,
        eos_token_ids: list[int],
        processors: Processors | None = None,
    ):
        self._device = device
        self._sizes = sizes
        self._readout = Readout(device, sizes, vocab_size)
        self.vocab_size = vocab_size
        self._eos = eos_token_ids
        self._copies = PageCopies(device, sizes)
        self._nobody = sizes.max_num_seqs
        """The slot that padding reads and writes."""
        self._known_pages = [0] * sizes.max_num_seqs
        """How many of its sequence's pages each slot has been told."""
        self._remembered = RememberedTexts(sizes.remembered)
        self._guesses = None if sizes.drafts is None else Guesses(sizes.drafts, self._remembered)
        self._processors = processors or Processors()
        self._steered: set[int] = set()
        """Slots that have been told something to be steered by."""
        self._processed: set[int] = set()
        """Slots that have been told of logits processors."""
        self.scheduled_tokens: dict[str, int] = {}
        self.padded_tokens: dict[str, int] = {}
        self._counted: dict[Key, list[RanExecutable]] = {}
        """Of the step that is being dispatched, in order: its parts may run the same one."""

    def prepare(self, request: Request) -> None:
        """Lay out what the request's slot will be told. What raises here concerns nobody else."""
        request.settings = settings_of(request, self.vocab_size, self._eos)

    def missing(self, request: Request) -> list[Key]:
        """Executables that not every request needs, that this one does, and that are not compiled yet."""
        keys = []
        size = self._device.most_rows
        if request.params.structured_outputs is not None or request.params.max_thinking_tokens is not None:
            keys.append(Key("head", size, replace(MASKED, processed=request.params.processes_logits)))
        if request.params.structured_outputs is not None and self._guesses is not None:
            keys.append(Key("verify", size, MASKED_ADAPTED if self._sizes.adapters is not None else MASKED))
        if request.params.prompt_logprobs is not None:
            keys.append(scoring_key(request, size))
        if request.params.wants_vocabulary:
            keys.append(Key("score_all", size))
        if request.adapters:
            keys += self._device.covering_adapted()
        taps = () if request.capture is None else request.capture.taps
        processed, steered = request.params.processes_logits, request.steering is not None
        patched = 0 if request.patching is None else len(request.patching.places)
        if taps or steered or processed or patched:
            variant = Variant(
                sampled=processed,
                adapted=bool(request.adapters),
                processed=processed,
                steered=steered,
                patched=patched,
                recorded=len(taps),
            )
            keys += self._device.demanded(len(request.token_ids), variant)
        if steered:
            keys.append(Key("steer"))
        if processed:
            keys.append(Key("process"))
        if request.pooling is not None:
            keys.append(Key("token_logits", size) if request.pooling.kind == "logits" else Key("pool"))
        return self._device.missing(keys)

    @property
    def sizes(self) -> StepSizes:
        """Those that every step shares."""
        return self._sizes

    @property
    def most_rows(self) -> int:
        """Of states that `unembed` takes at a time."""
        return self._device.most_rows

    def unembed(self, states: np.ndarray, normed: bool) -> np.ndarray:
        """The logits `[n, V]` of states `[n, E]`, after the last norm unless they are `normed`; waits for them."""
        return self._readout.unembed(states, normed)

    def compile(self, key: Key) -> None:
        """Wait until a step can be run at once. Any thread may call this."""
        self._device.compile(key)

    @property
    def compiles(self) -> Compiles:
        """How much has been compiled, and how much is still to be."""
        return self._device.compiles

    def change_weights(self, change: Callable[[list[jax.Array]], tuple[jax.Array, ...]]) -> None:
        """See `Device.change_weights`."""
        self._device.change_weights(change)

    def keep_weights(self, file: BinaryIO) -> None:
        """Leave the weights in a file; no step can be run after that."""
        self._device.keep_weights(file)

    def close(self) -> None:
        """Compile nothing more. Any thread may call this."""
        self._device.close()

    def dispatch(self, batch: Batch, fill: FillMasks | None = None) -> Handle:
        """Enqueue the step for `batch` without waiting for anything.

        `fill` is asked for the masks of drafts that grammars have a say in; those of other steps come with
        `sample_waiting`.
        """
        self._begin()
        leaving = self._copies.read(batch.leaving)
        self._copies.write(batch.returning)
        for rows, place in batch.entering:
            self._device.run(Key("adapt"), _one(place), *rows)
        for request in batch.admitted:
            self._admit(request)
        handle = joined([self._dispatch(part, fill) for part in parts_of(batch, self._device.num_parts)])
        handle.leaving = leaving
        return self._end(handle, batch)

    def _dispatch(self, batch: Batch, fill: FillMasks | None) -> Handle:
        if batch.verifies:
            return self._verify(batch, fill)
        decodes = self._device.all_decode(batch.decode_only and not batch.masked)
        return self._decode(batch) if decodes else self._prefill(batch)

    def _begin(self) -> None:
        self._device.recent.clear()
        self._counted.clear()

    def _end(self, handle: Handle, batch: Batch) -> Handle:
        copy_to_host(handle)
        handle.ran = RanStep.of(batch, self._executed(), time.perf_counter())
        return handle

    def _executed(self) -> list[RanExecutable]:
        """What the step has run so far, in order."""
        counted = {key: iter(several) for key, several in self._counted.items()}
        return [next(counted.get(key, iter(())), RanExecutable(key)) for key in self._device.recent]

    def read_pages(self, rows: list[tuple[CacheRow, Digest]]) -> list[LeavingPages]:
        """Copy pages and states to the host without waiting for it."""
        return self._copies.read(rows)

    def sample_waiting(self, handle: Handle, fill: Callable[[list[Request], np.ndarray], None]) -> None:
        """Enqueue the second half of a step whose rows wait for masks, which `fill` writes: [R, V/32], one bit a token.

        Requests that have ended meanwhile are left out.
        """
        handle.rows = [row for row in handle.waiting if row.request.status is Status.RUNNING]
        handle.waiting = []
        if handle.rows:
            handle.sampled = self._head(handle.rows, fill)
            copy_to_host(handle)
            if handle.ran is not None:
                handle.ran.executables = self._executed()

    def remember_answer(self, request: Request) -> None:
        """Drafts of later requests may come from the answer of this one, where those are looked through."""
        if self._sizes.remembers_answers:
            self._recall(request, request.token_ids[request.num_prompt :])

    def _recall(self, request: Request, text: Sequence[int]) -> None:
        """Remember a text, unless its request keeps its prefixes to itself: right drafts can be seen in a clock."""
        if request.cache_salt is None:
            for ints in self._remembered.add(text):
                self._device.run(Key("recall"), ints)

    def _decode(self, batch: Batch) -> Handle:
        rows = [SampledRow(chunk.request, i) for i, chunk in enumerate(batch.chunks)]
        count = len(rows)
        key = self._device.covering("decode", count, _variant(rows, batch))
        packing = decode_packing(key.size, self._sizes.has_states)
        ints = np.zeros(packing.size, np.int32)
        x = packing.views(ints)
        x["num_decodes"][...] = count
        x["num_steps"][...] = batch.num_steps
        x["tokens"][:count] = [_token_or_device(chunk) for chunk in batch.chunks]
        x["slot"][:] = self._slot_rows(rows, key.size)
        x["new_page"][:count] = [self._new_page(chunk.request) for chunk in batch.chunks]
        _pack_states(x, batch.chunks)
        self._count(key, count, batch.num_steps, batch.chunks)
        sampled = self._device.run(key, ints)
        return Handle(rows, sampled, num_steps=batch.num_steps, stride=self._sizes.decode_steps)

    def _verify(self, batch: Batch, fill: FillMasks | None) -> Handle:
        rows = [SampledRow(chunk.request, i) for i, chunk in enumerate(batch.chunks)]
        count = len(rows)
        key = self._device.covering("verify", count, _variant(rows, batch, batch.masked))
        words = mask_words(self.vocab_size) if key.variant.masked else 0
        packing = verify_packing(key.size, self._sizes.has_states, self._sizes.num_drafts(key.size), words)
        ints = np.zeros(packing.size, np.int32)
        x = packing.views(ints)
        x["num_decodes"][...] = count
        x["tokens"][:count] = [_token_or_device(chunk) for chunk in batch.chunks]
        x["slot"][:] = self._slot_rows(rows, key.size)
        reserved = [chunk.num_sampled - 1 for chunk in batch.chunks]
        x["most_drafts"][:count] = reserved
        if batch.masked:
            assert fill is not None and self._guesses is not None, "whoever has grammars fills masks"
            self._guesses.fill([row.request for row in rows], x, fill)
        elif key.variant.masked:  # the one without masks is still being compiled
            x["mask"][:] = ALL
        self._pack_new_pages(x["new_pages"], batch)
        _pack_states(x, batch.chunks)
        self._count(key, count, chunks=batch.chunks)
        sampled = self._device.run(key, ints)
        return Handle(rows, sampled, stride=self._sizes.num_drafts(key.size) + 1, reserved=reserved)

    def _prefill(self, batch: Batch) -> Handle:
        taps = wanted_taps(batch.chunks)
        patches = step_patches(batch.chunks)
        variant = replace(_variant([], batch), patched=len(patches), recorded=len(taps))
        key = self._device.covering("backbone", batch.num_tokens, variant)
        vectors = [self._pack_backbone(batch, key, taps, patches)]
        if patches:
            vectors.append(patch_values(patches, key.variant.patched))
        self._count(key, batch.num_tokens, chunks=batch.chunks)
        found = self._device.run(key, *vectors)
        rows: list[SampledRow] = []
        pooling: list[tuple[Chunk, int]] = []
        scored: list[tuple[Chunk, int]] = []
        begins = []
        row = 0
        for chunk in batch.chunks:
            begins.append((chunk, row))
            if chunk.request.pooling is not None:
                pooling.append((chunk, row))
            elif chunk.num_sampled:
                assert chunk.num_sampled == 1, "a step whose backbone runs by itself gives one token"
                rows.append(SampledRow(chunk.request, row + chunk.length - 1))
            if chunk.request.params.prompt_logprobs is not None:
                scored.append((chunk, row))
            row += chunk.length
        scores, vocabularies = self._readout.scores(scored), self._readout.vocabularies(rows)
        handle = Handle(scores=scores, pooled=self._readout.pool(pooling), vocabularies=vocabularies)
        if taps:
            handle.recorded = record(found, taps, begins)
        if batch.masked:
            handle.waiting = rows
        elif rows:
            handle.rows, handle.sampled = rows, self._head(rows)
        return handle

    def _pack_backbone(self, batch: Batch, key: Key, taps: list[Tap], patches: list[RowPatch]) -> np.ndarray:
        sizes, room = self._sizes, key.variant.recorded
        shape, limits = sizes.taps if room else (), (sizes.max_num_seqs, sizes.page_size, sizes.has_states)
        packing = backbone_packing(key.size, *limits, shape, key.variant.patched)
        ints = np.zeros(packing.size, np.int32)
        x = packing.views(ints)
        if room:
            fill_places(x["taps"], taps, room)
        if patches:
            fill_patches(x, patches)
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
        key = self._device.covering("head", count, _variant(rows, masked=fill is not None))
        packing = head_packing(key.size, mask_words(self.vocab_size) if key.variant.masked else 0)
        ints = np.zeros(packing.size, np.int32)
        x = packing.views(ints)
        x["hidden_row"][:count] = [row.row for row in rows]
        x["slot"][:] = self._slot_rows(rows, key.size)
        if fill is not None:
            fill([row.request for row in rows], x["mask"][:count])
        elif key.variant.masked:  # the one without a mask is still being compiled
            x["mask"][:] = ALL
        self._count(key, count)
        sampled: Sampled = self._device.run(key, ints)
        return sampled

    def _admit(self, request: Request) -> None:
        """Tell a slot all about its request; what adjusts logits goes to the device only where the sampler reads it."""
        self._known_pages[request.slot] = len(request.pages)
        settings = request.settings
        assert settings is not None, "prepare() comes before dispatch()"
        ints = admission(request, settings, self._sizes.pages_per_seq)
        floats = np.concatenate([settings.floats, adapter_scales(request, self._sizes.adapter_places)])
        self._device.run(Key("admit"), ints, floats)
        slot = _one(request.slot)
        if settings.adjustments is not None:
            self._device.run(Key("adjust"), *settings.adjustments._replace(slot=slot))  # type: ignore[arg-type]
        if request.num_preemptions == 0:
            self._recall(request, request.params.predicted_token_ids)
        if request.steering is not None or request.slot in self._steered:
            self._steer(request)
        if request.params.processes_logits or request.slot in self._processed:
            self._process(request)
        if request.needs_history or self._sizes.drafts is not None:
            self._device.run(Key("remember"), slot, history(request, self._sizes.max_model_len))

    def _steer(self, request: Request) -> None:
        """Tell a slot what its request is steered by, or that it is no longer steered."""
        steering = request.steering
        vectors = np.zeros((len(self._sizes.caches), self._sizes.hidden_size), self._device.hidden_dtype)
        ends = np.zeros(2, np.int32)
        if steering is not None:
            vectors[list(steering.layers)] = steering.rows()
            ends[:] = steering.start, steering.stop
        self._device.run(Key("steer"), _one(request.slot), vectors, ends)
        (self._steered.discard if steering is None else self._steered.add)(request.slot)

    def _process(self, request: Request) -> None:
        """Tell a slot which logits processors its request uses, or that it uses none any more."""
        row = self._processors.row(request.params.chosen_processors)
        self._device.run(Key("process"), _one(request.slot), row)
        (self._processed.add if request.params.processes_logits else self._processed.discard)(request.slot)

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

    def _count(self, key: Key, used: int, times: int = 1, chunks: Sequence[Chunk] = ()) -> None:
        """`chunks` share the padding among them, by their tokens."""
        name, padding = f"{key.kind}-{key.size}", (key.size - used) * times
        self._counted.setdefault(key, []).append(RanExecutable(key, used, times))
        self.scheduled_tokens[name] = self.scheduled_tokens.get(name, 0) + used * times
        self.padded_tokens[name] = self.padded_tokens.get(name, 0) + padding
        if padding:
            for chunk in chunks:
                chunk.request.padding += padding * chunk.length / used


def _one(number: int) -> np.ndarray:
    """A number as steps take it."""
    return np.array([number], np.int32)


def copy_to_host(handle: Handle) -> None:
    """Begin to copy all that a step gives."""
    for array in handle.arrays():
        array.copy_to_host_async()


def _variant(rows: list[SampledRow], batch: Batch | None = None, masked: bool = False) -> Variant:
    """What the rows ask of the sampler, and of the model the requests of a batch that runs it."""
    requests = [] if batch is None else [chunk.request for chunk in batch.chunks]
    return Variant(
        sampled=masked or not all(row.request.params.greedy for row in rows),
        masked=masked,
        processed=any(row.request.params.processes_logits for row in rows),
        adapted=any(request.adapters for request in requests),
        steered=any(request.steering is not None for request in requests),
    )


def _pack_states(x: dict[str, np.ndarray], chunks: Sequence[Chunk]) -> None:
    """Which states the chunks are resumed from, and which of theirs are kept."""
    for name in ("state_read", "state_kept", "kept_tokens"):
        if name in x:
            x[name][: len(chunks)] = [getattr(chunk, name) for chunk in chunks]


def _token_or_device(chunk: Chunk) -> int:
    """The chunk's only token, or -1 when it is still on the device."""
    tokens = chunk.request.token_ids
    return tokens[chunk.start] if chunk.start < len(tokens) else -1
