"""How many tokens a step gives each request before anybody needs the host: several decodes in turn, or drafts."""

from __future__ import annotations

from collections.abc import Sequence

from jaxllm.engine.draft_depth import DraftDepth, DraftRecord
from jaxllm.engine.page_pool import PagePool
from jaxllm.engine.request import Request
from jaxllm.engine.work import Batch
from jaxllm.models.config import LengthRule


class RunAhead:
    """How many tokens a step can give each request: more than one where all requests decode. Where the host has a say
    in what the tokens are, they can only be drafts, which the host makes itself.
    """

    def __init__(
        self,
        pool: PagePool,
        max_model_len: int,
        length_rule: LengthRule | None = None,
        decode_steps: int = 1,
        drafts: DraftDepth | None = None,
    ):
        """`decode_steps` is the most tokens that a decode gives without drafts, `drafts` how many it tries ahead."""
        self.pool = pool
        self.max_model_len = max_model_len
        self.length_rule = length_rule
        self.decode_steps = decode_steps
        self.drafts = drafts or DraftDepth(0)

    def num_steps(self, requests: Sequence[Request]) -> int:
        """How many tokens a decode without drafts can give each of these requests.

        A request may be given more than it will take, when a stop is among them or its length is reached, but not when
        all of them would be.
        """
        running = _unfilled(requests)
        if self.decode_steps == 1 or not running:
            return 1
        longest = max(r.max_total - r.num_total for r in running)
        steps = min(self.decode_steps, self.pool.page_size, longest)  # a sequence gains one page at most
        fits = all(r.num_total + steps <= self.max_model_len and not self.outgrown(r, steps) for r in running)
        free = all(r.constraint is None for r in running)
        return steps if fits and free and self._all_decode(running, steps, steps) else 1

    def most_drafts(self, requests: Sequence[Request]) -> int:
        """How many tokens a step may try ahead with each of these requests.

        Steps with masks are compiled neither for requests that are steered nor for those with logits processors.
        """
        running, most = _unfilled(requests), self.drafts.with_running(len(requests))
        wanted = any(self._depth(r, most) for r in running)
        masked = any(r.constraint is not None for r in running)
        if masked and any(r.steering is not None or r.params.processes_logits for r in running):
            return 0
        return most if wanted and self._all_decode(running, 1, 1 + most) else 0

    def awaits_text(self, requests: Sequence[Request]) -> bool:
        """Whether tokens may be tried ahead with these requests once the host has read what is in flight of them: it
        makes the drafts of those with a grammar itself.
        """
        unread = any(r.constraint is not None and r.num_inflight for r in requests)
        return unread and self.most_drafts(requests) > 0

    def further(self, request: Request, batch: Batch) -> int:
        """How many tokens this step may run of the request behind those that are known now."""
        if not batch.most_drafts:
            return batch.num_steps - 1
        limits = [self._depth(request, batch.most_drafts), request.max_total - request.num_total - 1]
        if request.thinking is not None:
            limits.append(request.thinking.left - request.num_inflight - 1)
        rule = self.length_rule
        if rule is not None and rule.all_or_none and request.rotary_len <= rule.original_length:
            limits.append(rule.original_length - request.num_total - 1)
        return max(0, min(limits))

    def outgrown(self, request: Request, more: int = 0) -> bool:
        """Its next token, or `more` behind that, makes it too long for the rotary embedding of its pages."""
        rule, length = self.length_rule, request.num_total + more
        return rule is not None and rule.all_or_none and request.rotary_len <= rule.original_length < length

    def _depth(self, request: Request, most: int) -> int:
        """How many tokens to try ahead with a request, if there is room for them."""
        if not most:
            return 0
        if request.draft_record is None:
            request.draft_record = DraftRecord(self.drafts.most)
        return request.draft_record.depth(most)

    def _all_decode(self, running: Sequence[Request], certain: int, most: int) -> bool:
        """Whether one step can give each of these requests `certain` tokens, and up to `most` of them.

        It can where all decode, no thinking budget settles what the tokens are, and there are pages for the most.
        """
        missing = sum(self.pool.pages_for(r.num_computed + most) - len(r.pages) for r in running)
        return missing <= self.pool.num_free and all(
            r.num_total - r.num_computed == 1
            and (r.thinking is None or r.num_inflight + certain <= r.thinking.left)
            and not r.reads_hidden
            and not r.is_to_be_patched
            for r in running
        )


def _unfilled(requests: Sequence[Request]) -> list[Request]:
    """Those whose tokens in flight do not fill their length already."""
    return [request for request in requests if request.num_total < request.max_total]
