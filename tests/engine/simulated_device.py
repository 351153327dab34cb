"""A device whose pages and slots hold tokens, and the engine core on top of it.

What is sampled depends on the whole context read through the pages, so that a page which is shared, lost or overwritten
wrongly shows as a wrong token.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np

from jaxllm.engine.core.executables import Compiles
from jaxllm.engine.core.feature import Feature
from jaxllm.engine.core.handle import Handle, RanStep, SampledRow
from jaxllm.engine.core.keys import Key
from jaxllm.engine.core.registry import Features
from jaxllm.engine.core.request import Batch, Request, Status
from jaxllm.engine.core.sampler import Sampled, Settled
from jaxllm.engine.features.adapters.adapters import PUT_TABLES
from jaxllm.engine.features.offload.offload import LeavingPages, OffloadFeature, PageBlocks
from jaxllm.engine.features.offload.pages import CacheRow

VOCAB = 3


def salted(salt: Any, adapters: Sequence[Any]) -> Any:
    """What stands for a salt and what adapters add."""
    return repr((salt, adapters)) if adapters else salt


def next_token(tokens: Sequence[int], salt: str | None, allowed: Sequence[int] = range(VOCAB)) -> int:
    """The model: any change in the context may change the token."""
    return allowed[zlib.crc32(repr((list(tokens), salt)).encode()) % len(allowed)]


def alone(prompt: Sequence[int], salt: str | None, max_total: int, stop: int | None) -> list[int]:
    """What a request ends with when nothing else runs."""
    tokens = list(prompt)
    while len(tokens) < max_total:
        tokens.append(next_token(tokens, salt))
        if tokens[-1] == stop:
            break
    return tokens


@dataclass
class SimulatedHandle(Handle):
    """A step that is done at once; `contexts` are what its rows read in the pages, up to `positions`."""

    contexts: dict[int, list[int]] = field(default_factory=dict)
    positions: dict[int, int] = field(default_factory=dict)

    def wait(self) -> float:
        return 0.0


class SimulatedPage(list):
    """What a page or a state holds, as the host keeps it: its budget counts either as one."""

    nbytes = 1


class SimulatedLeaving(LeavingPages):
    """Pages that the host is given."""

    def contents(self) -> list[SimulatedPage]:
        return self.arrays


class SimulatedOffload(OffloadFeature):
    """Copies what the simulated device holds."""

    def attach(self) -> None:
        with mock.patch("jaxllm.engine.features.offload.offload.PageCopies"):
            super().attach()
        runner: Any = self.around.device
        self.copies.read, self.copies.write = runner.read_pages, runner.write_pages  # type: ignore[method-assign]


class SimulatedRunner:
    """Takes the place of Runner. `log` says in which order halves of steps were run."""

    def __init__(self, num_pages: int, page_size: int, has_states: bool = False):
        self.page_size = page_size
        self.features = Features()
        """Those of the core, once there is one."""
        self.vocab_size = VOCAB
        self._position: dict[int, int] = {}
        """Slot -> the position of its next token, which the host does not know where drafts are under way."""
        self.compiles = Compiles(0, 0, 0, 0.0)
        self.device = self
        self.scheduled_tokens: dict[str, int] = {}
        self.padded_tokens: dict[str, int] = {}
        self.batches: list[Batch] = []
        self.entered: list[int] = []
        """The places that adapters have taken before the last step."""
        self.returned: list[list[CacheRow]] = []
        """The rows that were filled with what the host has, before each step."""
        self.log: list[str] = []
        self._pages: list[list[tuple[int, int, str | None] | None]] = [[None] * page_size for _ in range(num_pages)]
        self._sampled: dict[tuple[int, int], int] = {}
        """(slot, position) -> token."""
        self._states: dict[int, tuple[list[int], str | None]] | None = {} if has_states else None
        """Row -> the tokens that a layer's state stands for."""
        self._adapters: dict[int, Any] = {}
        """Place -> what the adapter there adds."""

    def salt(self, request: Request) -> str | None:
        """All that the model's answer depends on besides the tokens: the salt, and the adapters that it finds."""
        asked = request.extras.get("adapters")
        return salted(request.cache_root, [] if asked is None else [self._adapters[place] for place in asked.places])

    def prepare(self, request: Request, seed: int) -> None:
        pass

    def before_step(self) -> None:
        for feature in self.features:
            feature.before_step()

    def run(self, key: Key, *vectors: Any) -> None:
        """As the Device that features have: it takes up adapters."""
        if key == PUT_TABLES:
            place, *rows = vectors
            self._adapters[int(place[0])] = tuple(rows)
            self.entered.append(int(place[0]))

    def missing(self, request: Request) -> list[Any]:
        return []

    def compile(self, key: Any) -> None:
        pass

    def close(self) -> None:
        pass

    def dispatch(self, batch: Batch) -> SimulatedHandle:
        """Every chunk is written before anything is read, as in a layer."""
        self.batches.append(batch)
        self.entered = []
        self.returned.append([])
        self.before_step()
        self.log.append("backbone")
        starts = {chunk.request.request_id: chunk.start for chunk in batch.chunks}
        for request in batch.admitted:
            for feature, extra in self.features.of(request, Feature.seat):
                feature.seat(request, extra)
        self._position |= {request.slot: starts[request.request_id] for request in batch.admitted}
        begins = [self._position[chunk.request.slot] for chunk in batch.chunks]
        for chunk in batch.chunks:
            request, start = chunk.request, self._position[chunk.request.slot]
            told = request.token_ids[chunk.start : chunk.start + chunk.length]
            assert start == chunk.start or (start < chunk.start and chunk.length == 1 and not told)
            tokens = told if len(told) == chunk.length else [*told, self._sampled[request.slot, start + len(told)]]
            for position, token in enumerate(tokens, start):
                self._write(request, position, token)
            self._position[request.slot] = start + chunk.length
        rows = [SampledRow(chunk.request, i) for i, chunk in enumerate(batch.chunks) if chunk.num_sampled]
        positions = {row.row: self._position[row.request.slot] - 1 for row in rows}
        contexts = {row.row: self._read(row.request, positions[row.row] + 1) for row in rows}
        self._read_states(batch, begins)
        handle = SimulatedHandle(
            contexts=contexts, positions=positions, num_steps=batch.num_steps, stride=batch.num_steps
        )
        if batch.verifies:
            self._verify(handle, rows, [chunk.num_sampled - 1 for chunk in batch.chunks])
        elif batch.late:
            handle.waiting = rows
        else:
            self._sample(handle, rows)
            self._decode_on(handle, batch.num_steps - 1)
        self._write_states(batch, begins)
        handle.ran = RanStep.of(batch, [], 0.0)
        return handle

    def read_pages(self, rows: Sequence[tuple[CacheRow, bytes]]) -> list[SimulatedLeaving]:
        contents = [SimulatedPage(self._contents(row)) for row, _ in rows]
        return [SimulatedLeaving([digest for _, digest in rows], contents, mock.Mock(spec=PageBlocks))] if rows else []

    def write_pages(self, rows: Sequence[tuple[CacheRow, Any]]) -> None:
        if rows:
            self.returned[-1] = [row for row, _ in rows]
        for row, content in rows:
            if row.kind == "page":
                self._pages[row.number] = list(content)
            else:
                assert self._states is not None
                self._states[row.number] = tuple(content)  # type: ignore[assignment]

    def _contents(self, row: CacheRow) -> Any:
        if row.kind == "page":
            return self._pages[row.number]
        assert self._states is not None
        return self._states[row.number]

    def _read_states(self, batch: Batch, begins: Sequence[int]) -> None:
        """The tokens that each chunk's state stands for must be those before the chunk."""
        if self._states is None:
            return
        for chunk, begin in zip(batch.chunks, begins, strict=True):
            request = chunk.request
            row = chunk.extras["states"].read or request.slot
            tokens, salt = self._states[row] if begin else ([], self.salt(request))
            assert salt == self.salt(request), "a foreign state was read"
            assert tokens == self._read(request, begin), "the state of other tokens was read"

    def _write_states(self, batch: Batch, begins: Sequence[int]) -> None:
        """What each slot holds after the step, and what is kept on the way; all rows have been read.

        Where drafts are tried, the device knows by itself which page is the last that the step has filled.
        """
        if self._states is None:
            return
        verifies = batch.verifies
        for chunk, begin in zip(batch.chunks, begins, strict=True):
            request, end = chunk.request, self._position[chunk.request.slot]
            after = self._read(request, end)
            self._states[request.slot] = after, self.salt(request)
            told = chunk.extras["states"]
            kept = end // self.page_size * self.page_size if verifies else told.tokens
            comes_by = begin < kept <= end
            assert comes_by or batch.tries or not told.kept, "it does not come by the state that it is to keep"
            if told.kept and comes_by:
                self._states[told.kept] = after[:kept], self.salt(request)

    def _decode_on(self, handle: SimulatedHandle, steps: int) -> None:
        """Each sampled token is run as well, and the one behind it sampled."""
        if not steps:
            return
        assert handle.sampled is not None
        sequences = [[token] for token in np.asarray(handle.sampled.tokens).tolist()]
        for row, tokens in zip(handle.rows, sequences, strict=True):
            request = row.request
            for position in range(handle.positions[row.row] + 1, handle.positions[row.row] + 1 + steps):
                self._write(request, position, tokens[-1])
                tokens.append(next_token(self._read(request, position + 1), self.salt(request)))
                self._sampled[request.slot, position + 1] = tokens[-1]
            self._position[request.slot] += steps
        handle.sampled = Sampled(np.array(sequences).reshape(-1), None)  # type: ignore[arg-type]

    def _verify(self, handle: SimulatedHandle, rows: list[SampledRow], reserved: list[int]) -> None:
        """Drafts, of which about two in three are right, are run and taken as far as they are what is sampled."""
        handle.rows, handle.reserved, handle.stride = rows, reserved, max(reserved) + 1
        sampled, counts = [], []
        for row, most in zip(rows, reserved, strict=True):
            request, position = row.request, handle.positions[row.row]
            chosen = [next_token(handle.contexts[row.row], self.salt(request))]
            drafted = zlib.crc32(repr(handle.contexts[row.row]).encode()) % (most + 1)
            drafts = []
            for ahead in range(1, drafted + 1):
                wrong = zlib.crc32(repr((drafts, position)).encode()) % 3 == 0
                drafts.append((chosen[-1] + wrong) % VOCAB)
                self._write(request, position + ahead, drafts[-1])
                chosen.append(next_token(self._read(request, position + ahead + 1), self.salt(request)))
            taken = next((i for i, draft in enumerate(drafts) if draft != chosen[i]), drafted)
            self._sampled |= {(request.slot, position + 1 + i): token for i, token in enumerate(chosen)}
            self._position[request.slot] = position + 1 + taken
            sampled.append(chosen + [-1] * (handle.stride - len(chosen)))
            counts.append((drafted, taken))
        settled = Settled(*np.array(counts).T)
        handle.sampled = Sampled(np.array(sampled).reshape(-1), None, settled)  # type: ignore[arg-type]

    def sample_waiting(self, handle: SimulatedHandle) -> None:
        """The second half; the mask has one bit a token."""
        rows = [row for row in handle.waiting if row.request.status is Status.RUNNING]
        handle.waiting = []
        if rows:
            mask = np.zeros((len(rows), 1), np.int32)
            for feature in self.features:
                if feature.late:
                    feature.fill([row.request for row in rows], {"mask": mask})
            self._sample(handle, rows, mask[:, 0])

    def _sample(self, handle: SimulatedHandle, rows: list[SampledRow], mask: np.ndarray | None = None) -> None:
        self.log.append("head")
        tokens = []
        for i, row in enumerate(rows):
            allowed = [t for t in range(VOCAB) if mask is None or mask[i] >> t & 1]
            tokens.append(next_token(handle.contexts[row.row], self.salt(row.request), allowed))
            self._sampled[row.request.slot, handle.positions[row.row] + 1] = tokens[-1]
        handle.rows, handle.sampled = rows, Sampled(np.array(tokens), None)  # type: ignore[arg-type]

    def _write(self, request: Request, position: int, token: int) -> None:
        page, row = divmod(position, self.page_size)
        self._pages[request.pages[page]][row] = (position, token, self.salt(request))

    def _read(self, request: Request, context: int) -> list[int]:
        tokens = []
        for position in range(context):
            page, row = divmod(position, self.page_size)
            held = self._pages[request.pages[page]][row]
            assert held is not None and held[0] == position and held[2] == self.salt(request), "a foreign page was read"
            tokens.append(held[1])
        return tokens
