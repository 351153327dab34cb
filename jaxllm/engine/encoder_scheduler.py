"""Which texts an encoder runs in the next step."""

from __future__ import annotations

import time

from jaxllm.engine.page_pool import PagePool
from jaxllm.engine.request import Request, Status
from jaxllm.engine.scheduler import Scheduler
from jaxllm.engine.work import Batch, Chunk

MOST_PASSED = 32
"""Texts that a step passes over, because they are too long for what is left of it, before it runs as it is."""


class EncoderScheduler(Scheduler):
    """Whole texts share a step's tokens. Nothing of one is kept between steps: there are no pages, slots or chunks.

    Texts go by priority, then by their groups' turns, then by arrival. One too long for what is left of a step is the
    next one's first, and shorter ones behind it go before it. Those of a step that has not been read are `running`.
    """

    def __init__(self, pool: PagePool, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int):
        """`pool` has no pages. No text is longer than `max_model_len`, which is at most `max_num_batched_tokens`."""
        super().__init__(pool, max_num_seqs, max_num_batched_tokens, max_model_len)

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
