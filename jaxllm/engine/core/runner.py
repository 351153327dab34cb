"""Packs a batch for the Device, enqueues its step, and hands back a handle at once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import jax
import numpy as np

from jaxllm.engine.core.device import Device
from jaxllm.engine.core.feature import EVERYTHING, Feature, Fields, Ran, Reading
from jaxllm.engine.core.handle import Handle, RanExecutable, RanStep, SampledRow
from jaxllm.engine.core.keys import Key
from jaxllm.engine.core.packing import SETTING_FLOATS, SETTING_INTS, admit_packing
from jaxllm.engine.core.registry import Features
from jaxllm.engine.core.request import Batch, Chunk, Request, Settings, Status
from jaxllm.engine.core.sampler import Sampled
from jaxllm.engine.core.sizes import StepSizes
from jaxllm.requests.sampling import LOGPROBS_MODES, MAX_LOGPROBS

ADMIT = Key("put", 0, frozenset({"admit"}))
PUT_HISTORY = Key("put", 0, frozenset({"history"}))


class Runner:
    """Packs steps. A step carries only what has changed since its slots were told before."""

    def __init__(self, device: Device, sizes: StepSizes, features: Features | None = None):
        """`features` are those of the core that this runs steps for."""
        self.device = device
        self.sizes = sizes
        self._features = features if features is not None else Features()
        self._padding = sizes.max_num_seqs
        """The slot that padding reads and writes."""
        self._known_pages = [0] * sizes.max_num_seqs
        """The number of its sequence's pages that each slot has been told."""
        self.scheduled_tokens: dict[str, int] = {}
        self.padded_tokens: dict[str, int] = {}
        self._counted: dict[Key, list[RanExecutable]] = {}
        """The executables of the step that is being dispatched, in order: its parts may run the same one."""

    def prepare(self, request: Request, seed: int) -> None:
        """Lay out what the request's slot will be told; `seed` is used where the request brings none of its own. An
        error here ends the request alone.
        """
        uses = sum(feature.bit for feature, _ in self._features.of(request))
        request.settings = settings_of(request, self.sizes.vocab_size, uses, seed)

    def missing(self, request: Request) -> list[Key]:
        """Executables that not every request needs, that this one does, and that are not compiled yet."""
        needing = self._features.of(request, Feature.needs)
        keys = [key for feature, extra in needing for key in feature.needs(request, extra)]
        own = [(f, extra) for f, extra in self._features.of(request) if f.on and not (f.in_sampler or f.always)]
        variant = frozenset(f"{f.name}{f.amount(extra)}" if f.rooms else f.name for f, extra in own)
        if variant:
            count = len(request.token_ids)
            decodes = not self._features.apart(request, range(count, EVERYTHING))
            keys += self.device.demanded(count, variant, decodes)
        return self.device.missing(dict.fromkeys(keys))

    def dispatch(self, batch: Batch) -> Handle:
        """Enqueue the step for `batch` without waiting for anything; see `sample_waiting` for what is late."""
        self._begin()
        self.before_step()
        starts = {chunk.request.request_id: chunk.start for chunk in batch.chunks} if batch.admitted else {}
        for request in batch.admitted:
            self._admit(request, starts[request.request_id])
        handle = joined([self._dispatch(part) for part in parts_of(batch, self.device.num_parts)])
        return self._end(handle, batch)

    def before_step(self) -> None:
        """Have features do what comes before a step, or before nothing."""
        for feature in self._features.having(Feature.before_step):
            feature.before_step()

    def _dispatch(self, batch: Batch) -> Handle:
        if batch.verifies:
            return self._verify(batch)
        decodes = self.device.all_decode(batch.decode_only and not batch.late)
        return self._decode(batch) if decodes else self._prefill(batch)

    def _begin(self) -> None:
        self.device.recent.clear()
        self._counted.clear()

    def _end(self, handle: Handle, batch: Batch) -> Handle:
        copy_to_host(handle)
        handle.ran = RanStep.of(batch, self._executed(), time.perf_counter())
        return handle

    def _executed(self) -> list[RanExecutable]:
        """The executables that the step has run so far, in order."""
        counted = {key: iter(several) for key, several in self._counted.items()}
        return [next(counted.get(key, iter(())), RanExecutable(key)) for key in self.device.recent]

    def sample_waiting(self, handle: Handle) -> None:
        """Enqueue the second half of a step, for whose rows what is late is known now.

        Requests that have ended meanwhile are left out.
        """
        handle.rows = [row for row in handle.waiting if row.request.status is Status.RUNNING]
        handle.waiting = []
        if handle.rows:
            handle.sampled = self._head(handle.rows, late=True)
            copy_to_host(handle)
            if handle.ran is not None:
                handle.ran.executables = self._executed()

    def _decode(self, batch: Batch) -> Handle:
        rows = [SampledRow(chunk.request, i) for i, chunk in enumerate(batch.chunks)]
        count = len(rows)
        key = self.device.covering("decode", count, self._features.wanted("decode", batch.chunks, _samples(rows)))
        ints, x = self._features.packing(key, self.sizes).new()
        x["num_decodes"][...] = count
        x["num_steps"][...] = batch.num_steps
        x["tokens"][:count] = [_token_or_device(chunk) for chunk in batch.chunks]
        x["slot"][:] = self._slot_rows(rows, key.size)
        x["new_page"][:count] = [self._new_page(chunk.request) for chunk in batch.chunks]
        sent = self._features.pack(key, x, batch.chunks)
        self._count(key, count, batch.num_steps, batch.chunks)
        sampled = self.device.run(key, ints, *sent)
        return Handle(rows, sampled, num_steps=batch.num_steps, stride=self.sizes.decode_steps)

    def _verify(self, batch: Batch) -> Handle:
        rows = [SampledRow(chunk.request, i) for i, chunk in enumerate(batch.chunks)]
        count = len(rows)
        wanted = self._features.wanted("verify", batch.chunks, _samples(rows), late=batch.late)
        key = self.device.covering("verify", count, wanted)
        ints, x = self._features.packing(key, self.sizes).new()
        x["num_decodes"][...] = count
        x["tokens"][:count] = [_token_or_device(chunk) for chunk in batch.chunks]
        x["slot"][:] = self._slot_rows(rows, key.size)
        reserved = [chunk.num_sampled - 1 for chunk in batch.chunks]
        x["most_ahead"][:count] = reserved
        self._pack_new_pages(x["new_pages"], batch)
        sent = self._features.pack(key, x, batch.chunks)
        if batch.late:
            for feature in self._features.having(Feature.fill_ahead):
                feature.fill_ahead([row.request for row in rows], x)
        self._count(key, count, chunks=batch.chunks)
        sampled = self.device.run(key, ints, *sent)
        return Handle(rows, sampled, stride=self.sizes.ahead(key.size) + 1, reserved=reserved)

    def _prefill(self, batch: Batch) -> Handle:
        key = self.device.covering("backbone", batch.num_tokens, self._features.wanted("backbone", batch.chunks))
        ints, x = self._features.packing(key, self.sizes).new()
        self._pack_chunks(x, batch)
        sent = self._features.pack(key, x, batch.chunks)
        self._count(key, batch.num_tokens, chunks=batch.chunks)
        found = self.device.run(key, ints, *sent)
        rows: list[SampledRow] = []
        begins: list[tuple[Chunk, int]] = []
        row = 0
        for chunk in batch.chunks:
            begins.append((chunk, row))
            if chunk.num_sampled and chunk.request.samples:
                assert chunk.num_sampled == 1, "a step whose backbone runs by itself gives one token"
                rows.append(SampledRow(chunk.request, row + chunk.length - 1))
            row += chunk.length
        handle = Handle(readings=self._read(begins, rows, found or {}))
        if batch.late:
            handle.waiting = rows
        elif rows:
            handle.rows, handle.sampled = rows, self._head(rows)
        return handle

    def _read(
        self, begins: list[tuple[Chunk, int]], rows: list[SampledRow], found: dict[str, jax.Array]
    ) -> list[Reading]:
        """The features' readings of the hidden states that a backbone has left."""
        names = {name for chunk, _ in begins for name in chunk.request.extras}
        ran = Ran(begins, rows, found)
        return [r for f in self._features.having(Feature.read) if f.name in names for r in f.read(ran)]

    def _pack_chunks(self, x: Fields, batch: Batch) -> None:
        x["num_decodes"][...] = batch.num_decodes
        x["num_seqs"][...] = len(batch.chunks)
        x["slot"][:] = self._slot_rows(batch.chunks, x["slot"].shape[0])
        self._pack_new_pages(x["new_pages"], batch)
        row = 0
        for index, chunk in enumerate(batch.chunks):
            end = row + chunk.length
            known = chunk.request.token_ids[chunk.start : chunk.start + chunk.length]
            x["tokens"][row:end] = known if len(known) == chunk.length else [*known, -1]
            row = end
            x["query_start"][index + 1 :] = row

    def _head(self, rows: list[SampledRow], late: bool = False) -> Sampled:
        count = len(rows)
        wanted = self._features.wanted("head", rows, _samples(rows), late)
        key = self.device.covering("head", count, wanted)
        ints, x = self._features.packing(key, self.sizes).new()
        x["hidden_row"][:count] = [row.row for row in rows]
        x["slot"][:] = self._slot_rows(rows, key.size)
        for feature in self._features.inside(key.kind, key.variant, Feature.padding):
            feature.padding(key, x)
        if late:
            for feature in self._features.inside(key.kind, key.variant, Feature.fill):
                feature.fill([row.request for row in rows], x)
        self._count(key, count)
        sampled: Sampled = self.device.run(key, ints)
        return sampled

    def _admit(self, request: Request, start: int) -> None:
        """Tell a slot all about its request."""
        self._known_pages[request.slot] = len(request.pages)
        assert request.settings is not None, "prepare() comes before dispatch()"
        self.device.run(ADMIT, admission(request, start, self.sizes.pages_per_seq), request.settings.floats)
        for feature, extra in self._features.of(request, Feature.seat):
            feature.seat(request, extra)
        if self._features.read_history(request):
            slot = np.array([request.slot], np.int32)
            self.device.run(PUT_HISTORY, slot, history(request, self.sizes.max_model_len))

    def _pack_new_pages(self, rows: np.ndarray, batch: Batch) -> None:
        """Write the pages that requests have gained since their slots were last told; the rest names padding's slot."""
        gained = [page for chunk in batch.chunks for page in self._new_pages(chunk.request)]
        rows[:, 0] = self._padding
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
        """The slot of each row's request, then that of padding."""
        slots = np.full(size, self._padding, np.int32)
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


def copy_to_host(handle: Handle) -> None:
    """Begin to copy all that a step gives."""
    for array in handle.arrays():
        array.copy_to_host_async()


def _samples(rows: Sequence[SampledRow]) -> bool:
    """Some row asks more of the sampler than argmax."""
    return not all(row.request.params.greedy for row in rows)


def _token_or_device(chunk: Chunk) -> int:
    """The chunk's only token, or -1 when it is still on the device."""
    tokens = chunk.request.token_ids
    return tokens[chunk.start] if chunk.start < len(tokens) else -1


def settings_of(request: Request, vocab_size: int, uses: int, seed: int) -> Settings:
    """Everything about a request that does not depend on when it runs; `uses` has a bit for each of its features.
    `rotary_len` is set at its admission: it grows if the request is preempted because it has outgrown it.

    Raises:
        OverflowError, ValueError: a value does not fit where the device keeps it.
    """
    p = request.params
    ints, floats = np.zeros(SETTING_INTS.size, np.int32), np.zeros(SETTING_FLOATS.size, np.float32)
    values = {
        "top_k": min(p.top_k, vocab_size), "prompt_len": request.num_prompt,
        "seed": np.array([(seed if p.seed is None else p.seed) & (2**64 - 1)], np.uint64).view(np.int32),
        "logprobs": p.logprobs is not None and 1 + LOGPROBS_MODES.index(p.logprobs_mode or LOGPROBS_MODES[0]),
        "temperature": p.temperature, "top_p": p.top_p, "min_p": p.min_p,
        "asked_ids": np.array([*[-1] * (MAX_LOGPROBS - len(p.logprob_token_ids)), *p.logprob_token_ids], np.int32),
        "uses": uses,
    }  # fmt: skip
    views = SETTING_INTS.views(ints) | SETTING_FLOATS.views(floats)
    for name, value in values.items():
        views[name][...] = value
    return Settings(ints, floats)


def admission(request: Request, start: int, pages_per_seq: int) -> np.ndarray:
    """The int32 vector of a request that takes its slot: where it begins, its pages so far, and its settings."""
    ints, x = admit_packing(pages_per_seq).new()
    assert request.settings is not None, "settings are laid out when a request is added"
    x["slot"][...] = request.slot
    x["position"][...] = start
    x["page_table"][: len(request.pages)] = request.pages
    x["settings"][:] = request.settings.ints
    SETTING_INTS.views(x["settings"])["rotary_len"][...] = request.rotary_len
    return ints


def history(request: Request, max_model_len: int) -> np.ndarray:
    """The int32 row of the tokens that a request has when it takes its slot."""
    row = np.zeros(max_model_len + 1, np.int32)
    row[: len(request.token_ids)] = request.token_ids
    return row


def parts_of(batch: Batch, most: int) -> list[Batch]:
    """The step for `batch` as up to `most` steps of some of its chunks each, in their order.

    If some requests decode and others begin, the decodes are a part of their own: the next step waits for the tokens
    of one part no longer than it must. A step whose masks are filled while it runs stays whole: what is sampled last
    reads the hidden states of all.
    """
    if most == 1 or batch.late:
        return [batch]
    decodes, others = batch.chunks[: batch.num_decodes], batch.chunks[batch.num_decodes :]
    if others:
        parts = [*([decodes] if decodes else []), *evenly(others, max(1, most - bool(decodes)))]
    else:
        parts = evenly(decodes, most)
    return [replace(batch, chunks=part, num_decodes=sum(chunk.length == 1 for chunk in part)) for part in parts]


def evenly(chunks: Sequence[Chunk], most: int) -> list[list[Chunk]]:
    """Chunks in up to `most` runs of about as many tokens.

    Worked example: chunks of 5, 1, 1 and 6 tokens in two runs are [5, 1] and [1, 6].
    """
    total, before = sum(chunk.length for chunk in chunks), 0
    runs: list[list[Chunk]] = [[] for _ in range(most)]
    for chunk in chunks:
        runs[(2 * before + chunk.length) * most // (2 * total)].append(chunk)
        before += chunk.length
    return [run for run in runs if run]


def joined(handles: Sequence[Handle]) -> Handle:
    """One handle of all parts of a step."""
    first, *others = handles
    for other in others:
        first.readings += other.readings
        first.further.append(other)
    return first
