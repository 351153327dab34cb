"""How many tokens a step gives each request before the host is needed: several decodes, or tokens tried ahead."""

from __future__ import annotations

from collections.abc import Sequence

from jaxllm.engine.core.feature import EVERYTHING, Feature
from jaxllm.engine.core.pages import PagePool
from jaxllm.engine.core.registry import Features
from jaxllm.engine.core.request import Request
from jaxllm.engine.core.work import Batch
from jaxllm.models.config import LengthRule


class Ahead:
    """How many tokens a step can give each request: more than one where all requests decode. Where the host has a say
    in what the tokens are, they can only be tried, and the host chooses those that are.
    """

    def __init__(
        self,
        pool: PagePool,
        max_model_len: int,
        features: Features,
        length_rule: LengthRule | None = None,
        decode_steps: int = 1,
    ):
        """`decode_steps` is the most tokens that a decode gives without trying any."""
        self.pool = pool
        self.max_model_len = max_model_len
        self._features = features
        self.length_rule = length_rule
        self.decode_steps = decode_steps

    def num_steps(self, requests: Sequence[Request]) -> int:
        """How many tokens a decode that tries none can give each of these requests.

        A request may be given more than it will take, when a stop is among them or its length is reached, but not when
        all of them would be.
        """
        running = _unfilled(requests)
        if self.decode_steps == 1 or not running:
            return 1
        longest = max(r.max_total - r.num_total for r in running)
        steps = min(self.decode_steps, self.pool.page_size, longest)  # a sequence gains one page at most
        fits = all(r.num_total + steps <= self.max_model_len and not self.outgrown(r, steps) for r in running)
        free = all(self._features.course(r) is None for r in running)
        return steps if fits and free and self._all_decode(running, steps, steps) else 1

    def most_ahead(self, requests: Sequence[Request]) -> int:
        """How many tokens a step may try ahead with each of these requests.

        Where something is late, such steps are not compiled with features that are rare.
        """
        running = _unfilled(requests)
        found = (feature.ahead(running, len(requests)) for feature in self._features.having(Feature.ahead))
        most = max(found, default=0)
        if not most:
            return 0
        late = any(self._features.course(r) is not None for r in running)
        if late and any(f.rare and "verify" in f.on for r in running for f, _ in self._features.of(r)):
            return 0
        return most if self._all_decode(running, 1, 1 + most) else 0

    def awaits_text(self, requests: Sequence[Request]) -> bool:
        """Whether tokens may be tried ahead with these requests once the host has read what is in flight of them: it
        chooses what is tried of those whose text it knows the course of.
        """
        unread = any(r.num_inflight and self._features.course(r) is not None for r in requests)
        return unread and self.most_ahead(requests) > 0

    def further(self, request: Request, batch: Batch) -> int:
        """How many tokens this step may run of the request after those that are known now."""
        if not batch.most_ahead:
            return batch.num_steps - 1
        deep = self._features.of(request, Feature.depth)
        depths = [feature.depth(request, extra, batch.most_ahead) for feature, extra in deep]
        limits = [max(depths, default=0), request.max_total - request.num_total - 1]
        limits.append(self._features.certain(request) - request.num_inflight - 1)
        rule = self.length_rule
        if rule is not None and rule.all_or_none and request.rotary_len <= rule.original_length:
            limits.append(rule.original_length - request.num_total - 1)
        return max(0, min(limits))

    def outgrown(self, request: Request, more: int = 0) -> bool:
        """Its next token, or `more` after that, makes it too long for the rotary embedding of its pages."""
        rule, length = self.length_rule, request.num_total + more
        return rule is not None and rule.all_or_none and request.rotary_len <= rule.original_length < length

    def _all_decode(self, running: Sequence[Request], certain: int, most: int) -> bool:
        """Whether one step can give each of these requests `certain` tokens, and up to `most` of them.

        It can where all decode, no feature must see their tokens first, and there are pages for the most.
        """
        missing = sum(self.pool.pages_for(r.num_computed + most) - len(r.pages) for r in running)
        return missing <= self.pool.num_free and all(
            r.num_total - r.num_computed == 1
            and r.num_inflight + certain <= self._features.certain(r)
            and not self._features.apart(r, range(r.num_computed, EVERYTHING))
            for r in running
        )


def _unfilled(requests: Sequence[Request]) -> list[Request]:
    """Those whose tokens in flight do not fill their length already."""
    return [request for request in requests if request.num_total < request.max_total]
