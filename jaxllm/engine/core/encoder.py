"""An encoder's steps: whole texts, of which nothing is kept between steps."""

from __future__ import annotations

import time

from jaxllm.engine.core.handle import Handle
from jaxllm.engine.core.request import Batch, Chunk, Request, Status
from jaxllm.engine.core.runner import Runner
from jaxllm.engine.core.scheduler import Scheduler

MOST_PASSED = 32
"""Texts that a step passes over, because they are too long for what is left of it, before it runs as it is."""


class EncoderScheduler(Scheduler):
    """Whole texts share a step's tokens. Nothing of one is kept between steps: there are no pages, slots or chunks.

    Texts go by priority, then by their groups' turns, then by arrival. One too long for what is left of a step is the
    next one's first, and shorter ones after it go before it. The texts of a step that has not been read are `running`.
    The pool has no pages, and no text is longer than a step has room for.
    """

    def schedule(self, *, admitting: bool = True) -> Batch:
        """Choose the next step's texts. Empty when none waits, or without `admitting`."""
        batch, passed = Batch(), list[Request]()
        if not admitting:
            return batch
        left = self.max_num_batched_tokens
        while self.waiting and left and len(batch.chunks) < self.max_num_seqs and len(passed) < MOST_PASSED:
            request = self.waiting.heads()[0]
            fits = request.num_prompt <= left
            self.waiting.charge(request, request.num_prompt if fits else 0)
            self.waiting.remove(request)
            if not fits:
                passed.append(request)
                continue
            request.status = Status.RUNNING
            request.num_cached = 0
            request.first_scheduled_time = time.time()
            self.running.append(request)
            batch.chunks.append(Chunk(request, 0, request.num_prompt, 1))
            left -= request.num_prompt
        for request in passed:
            self.waiting.add(request)
        return batch

    def _release(self, request: Request) -> None:
        """It holds nothing."""


class EncoderRunner(Runner):
    """An encoder's texts have no slots: a step is sent all that it needs."""

    def prepare(self, request: Request, seed: int) -> None:
        """Nothing is kept of a request, so nothing is laid out."""

    def dispatch(self, batch: Batch) -> Handle:
        """Enqueue the step for `batch` without waiting for anything. Nothing is sampled."""
        self._begin()
        key = self.device.covering("encode", batch.num_tokens, self._features.wanted("encode", batch.chunks))
        ints, x = self._features.packing(key, self.sizes).new()
        x["num_seqs"][...] = len(batch.chunks)
        begins: list[tuple[Chunk, int]] = []
        row = 0
        for index, chunk in enumerate(batch.chunks):
            begins.append((chunk, row))
            x["tokens"][row : row + chunk.length] = chunk.request.token_ids
            row += chunk.length
            x["query_start"][index + 1 :] = row
        self._features.pack(key, x, batch.chunks)
        self._count(key, batch.num_tokens, chunks=batch.chunks)
        self.device.run(key, ints)
        return self._end(Handle(readings=self._read(begins, [], {})), batch)
