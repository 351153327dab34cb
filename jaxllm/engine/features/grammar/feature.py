"""Grammars and thinking budgets as the core knows them: a mask of allowed tokens that the host fills late.

A mask is int32 words `[V/32]`, a bit a token. It follows from the token before; so it is filled while the backbone of
its step runs, and travels in the head's vector. Of a step that tries tokens ahead, each place has a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from jaxllm.engine.core.feature import (
    EVERYTHING,
    Course,
    Errand,
    Feature,
    Fields,
    Followed,
    Surroundings,
    Traced,
    TracedStep,
)
from jaxllm.engine.core.jobs import Jobs
from jaxllm.engine.core.keys import Key
from jaxllm.engine.core.request import Request
from jaxllm.engine.core.sampler import ALL, SamplingRows, allow_only, apply_mask, mask_words
from jaxllm.engine.core.sizes import StepSizes
from jaxllm.engine.core.slots import Slots
from jaxllm.engine.features.grammar.grammar import Constraint, Grammars
from jaxllm.engine.features.grammar.thinking_budget import Thinking
from jaxllm.engine.messages import EngineRequest, TokenDelta

THREADS = 4


@dataclass
class _GrammarState:
    constraint: Constraint | None = None
    """The request's place in the grammar that its tokens must follow, once that is built."""
    thinking: Thinking | None = None
    """Its reasoning, while that has a budget and is not over."""


class GrammarFeature(Feature):
    """What the tokens of a request must follow, or its reasoning must keep to."""

    name = "grammar"
    on = ("verify", "head")
    samples = late = True
    asked_by = ("structured_outputs", "max_thinking_tokens")

    def __init__(self) -> None:
        self.grammars: Grammars | None = None
        """Builds constraints, in the process that has requests."""
        self._jobs = Jobs("constrain", urgent_threads=THREADS)
        """A grammar may take seconds: only other requests with one wait for it."""

    def attach(self, around: Surroundings) -> None:
        self._around = around
        self._jobs = Jobs("constrain", urgent_threads=THREADS)

    def close(self) -> None:
        self._jobs.close()

    def prepare(self, request: Request, asked: EngineRequest) -> _GrammarState | None:
        tokenizer = self._around.tokenizer
        thinking = None if tokenizer is None else Thinking.of(request.params, tokenizer)
        constrained = request.params.structured_outputs is not None
        return _GrammarState(thinking=thinking) if constrained or thinking is not None else None

    def job(self, request: Request, extra: _GrammarState) -> Errand | None:
        outputs = request.params.structured_outputs
        if outputs is None:
            return None
        grammars = self.grammars
        assert grammars is not None, "the front door refuses a grammar where there is no tokenizer"

        def build() -> None:
            extra.constraint = grammars.build(outputs)

        return Errand(build, self._jobs)

    def certain(self, request: Request, extra: _GrammarState) -> int:
        return EVERYTHING if extra.thinking is None else extra.thinking.left

    def course(self, request: Request, extra: _GrammarState) -> Course | None:
        return extra.constraint

    def follow(self, request: Request, extra: _GrammarState, delta: TokenDelta) -> Followed:
        if extra.thinking is not None:
            for token in delta.token_ids:
                if not extra.thinking.over:
                    extra.thinking.accept(token)
            if extra.thinking.over:  # then the request is like any other
                extra.thinking = None
        constraint = extra.constraint
        if constraint is None:
            return Followed()
        for token in delta.token_ids:
            constraint.accept(token)  # also the one that ends the answer: a grammar that has failed allows it
        if delta.finish_reason is not None:
            return Followed()
        forced = constraint.forced() if self._forwards(request, extra) else []
        if len(forced) <= self._around.core.load[0]:
            forced = []  # a step with a chunk in it takes longer, for everyone: more than sampling these would
        for token in forced:
            constraint.accept(token)
        constraint.check()
        return Followed(forced, constraint.complete)

    def _forwards(self, request: Request, extra: _GrammarState) -> bool:
        """Whether forced tokens need not be sampled: their logits are not asked for, and none is counted."""
        if request.params.logprobs is not None or extra.thinking is not None:
            return False
        return not self._around.core.features.read_history(request)

    def fields(self, key: Key, sizes: StepSizes) -> dict[str, tuple[int, ...]]:
        words = mask_words(sizes.vocab_size)
        if key.kind == "head":
            return {"mask": (key.size, words)}
        most = sizes.ahead(key.size)
        return {"num_given": (key.size,), "drafts": (key.size, most), "mask": (key.size, most + 1, words)}

    def padding(self, key: Key, x: Fields) -> None:
        x["mask"][:] = ALL

    def fill(self, requests: Sequence[Request], x: Fields) -> None:
        extras = [request.extras.get(self.name, _GrammarState()) for request in requests]
        mask = x["mask"][: len(requests)]
        self.fill_courses([extra.constraint for extra in extras], mask)
        for row, extra in zip(mask, extras, strict=True):
            if extra.thinking is not None and extra.thinking.forced is not None:
                allow_only(row, extra.thinking.forced)

    def fill_courses(self, courses: Sequence[Course | None], mask: np.ndarray) -> None:
        if self.grammars is None:
            mask[:] = ALL
        else:
            self.grammars.fill(courses, mask)  # type: ignore[arg-type]

    def traced(self, step: TracedStep) -> Traced:
        return _Masking()


class _Masking(Traced):
    def logits(self, logits: jax.Array, rows: SamplingRows, slots: Slots, x: Fields) -> jax.Array:
        return apply_mask(logits, x["mask"])
