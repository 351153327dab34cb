"""Grammars and thinking budgets as the core knows them: a mask of allowed tokens that the host fills late.

A mask is int32 words `[V/32]`, a bit a token. It follows from the token before; so it is filled while the backbone of
its step runs, and travels in the head's vector. Of a step that tries tokens ahead, each place has a mask.
"""

from __future__ import annotations

import copy
import json
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask_par
from tokenizers import Tokenizer

from jaxllm.engine.core.feature import EVERYTHING, Course, Errand, Feature, Fields, Followed, Traced, TracedStep
from jaxllm.engine.core.jobs import Jobs
from jaxllm.engine.core.keys import Key
from jaxllm.engine.core.request import Request
from jaxllm.engine.core.sampler import ALL, SamplingRows, allow_only, apply_mask, forbid, mask_words
from jaxllm.engine.core.sizes import StepSizes
from jaxllm.engine.core.slots import Slots
from jaxllm.engine.features.grammar.thinking_budget import MarkerSearch, Thinking
from jaxllm.engine.messages import EngineRequest, TokenDelta
from jaxllm.errors import InvalidRequestError
from jaxllm.machine import cores
from jaxllm.requests.structured_outputs import (
    COMPILE_STACK_BYTES,
    StructuredOutputs,
    compile_grammar,
    early_failure,
    failure,
    new_matcher,
)
from jaxllm.threads import call_with_stack

BUILDING = 4


@dataclass
class _GrammarState:
    constraint: Constraint | None = None
    thinking: Thinking | None = None
    """Its reasoning, while that has a budget and is not over."""


class GrammarFeature(Feature):
    """What the tokens of a request must follow, or its reasoning must keep to."""

    name = "grammar"
    on = ("verify", "head")
    samples = late = True
    asked_by = ("structured_outputs", "max_thinking_tokens")

    grammars: Grammars | None = None

    def attach(self) -> None:
        self._jobs = Jobs("constrain", urgent_threads=BUILDING)
        """A grammar may take seconds: only other requests with one wait for it."""

    def close(self) -> None:
        self._jobs.close()

    def prepare(self, request: Request, asked: EngineRequest) -> _GrammarState | None:
        tokenizer = self.around.tokenizer
        budget = request.params.max_thinking_tokens
        thinking = None if tokenizer is None or budget is None else Thinking.of(request.params, tokenizer)
        constrained = request.params.structured_outputs is not None
        return _GrammarState(thinking=thinking) if constrained or thinking is not None else None

    def job(self, request: Request, extra: _GrammarState) -> Errand | None:
        outputs, grammars = request.params.structured_outputs, self.grammars
        if outputs is None:
            return None
        assert grammars is not None, "the front door refuses a grammar where there is no tokenizer"

        def build() -> None:
            extra.constraint = grammars.build(outputs)

        return Errand(build, self._jobs)

    def certain(self, request: Request, extra: _GrammarState) -> int:
        return EVERYTHING if extra.thinking is None else extra.thinking.left

    def hurried(self, request: Request, extra: _GrammarState) -> None:
        if extra.thinking is not None:
            extra.thinking.end_after(request.num_inflight)

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
        if len(forced) <= self.around.core.load[0]:
            forced = []  # a step with a chunk in it takes longer for all requests: more than sampling these would
        for token in forced:
            constraint.accept(token)
        constraint.check()
        return Followed(forced, constraint.complete)

    def _forwards(self, request: Request, extra: _GrammarState) -> bool:
        """Whether forced tokens need not be sampled: their logits are not asked for, and none is counted."""
        if request.params.logprobs is not None or extra.thinking is not None:
            return False
        return not self.around.core.features.read_history(request)

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


THREADS = min(4, cores().usable)
BUILD_STACK_BYTES = 2 * COMPILE_STACK_BYTES
"""For a matcher: a grammar that another process has compiled in half of it does not overflow it."""


class GrammarError(InvalidRequestError):
    """A request's grammar cannot go on; the request fails, and no other."""


class Constraint:
    """One request's place in its grammar.

    A whole block of reasoning may come before the grammar. `opening` follows an answer that may still begin with one,
    beside `matcher`, which follows the same answer without; both have a say in what comes next.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        outputs: StructuredOutputs,
        tokenizer: Tokenizer,
        vocabulary: LLTokenizer,
        opening: LLMatcher | None = None,
    ):
        self.matcher = matcher
        self._kind, self._vocabulary = outputs.kind, vocabulary
        self.opening = opening
        self.active = outputs.after is None or opening is not None
        """The grammar has a say; else the reasoning is open, which anything but the answer's end may continue."""
        self._direct = True
        """The grammar allows what there is of the answer, which may still begin with reasoning."""
        self._opened = [MarkerSearch(tokenizer, text) for text in outputs.openings]
        self._after = None if outputs.after is None else MarkerSearch(tokenizer, outputs.after)

    @property
    def matchers(self) -> list[LLMatcher]:
        """Each allows some of the tokens that may come next; all may if there are none."""
        if not self.active:
            return []
        return [self.matcher] * self._direct + ([] if self.opening is None else [self.opening])

    @property
    def complete(self) -> bool:
        """Nothing can follow: the grammar is satisfied, or has failed, which `check` tells."""
        return self.active and self._direct and self.opening is None and self.matcher.is_stopped()

    def accept(self, token: int) -> None:
        """Follow a generated token. Raises GrammarError: it is not allowed, or the grammar's limits are exceeded."""
        if self.opening is not None:
            self._accept_first(token, self.opening)
        elif self.active:
            self.check()
            self.matcher.consume_token(token)
            self.check()
        else:
            self.active = self._ends_reasoning(token)
            if self.active:
                self._begin()

    def _accept_first(self, token: int, opening: LLMatcher) -> None:
        ended = self._ends_reasoning(token)
        opened = [search.add(token) for search in self._opened]
        if opening.try_consume_tokens([token]) == 0:
            self.opening = None
            self.accept(token)
        elif any(opened):
            self.opening, self.active, self._direct = None, ended, True
            self.matcher.reset()
            if ended:
                self._begin()
        else:
            self._direct = self._direct and self.matcher.try_consume_tokens([token]) == 1

    def _ends_reasoning(self, token: int) -> bool:
        return self._after is not None and self._after.add(token)

    def _begin(self) -> None:
        assert self._after is not None, "reasoning has ended"
        text = self._after.behind.lstrip()
        tokens = self._vocabulary.tokenize_bytes(text.encode()) if text else []
        if self.matcher.try_consume_tokens(tokens) < len(tokens):
            raise GrammarError(
                f"the token that ended the reasoning begins the answer with {text!r}, which the constraint does not "
                "allow; another seed may go another way"
            )

    def after(self, token: int) -> Constraint | None:
        """See `Course`."""
        tried = copy.copy(self)
        tried.matcher = self.matcher.deep_copy()
        tried.opening = None if self.opening is None else self.opening.deep_copy()
        tried._opened, tried._after = list(map(copy.copy, self._opened)), copy.copy(self._after)
        try:
            tried.accept(token)
        except GrammarError:
            return None
        return None if tried.complete else tried

    def forced(self) -> list[int]:
        """Tokens that must follow: there is no choice, so they need no sampling."""
        settled = self.active and self.opening is None
        return self.matcher.compute_ff_tokens() if settled and not self.matcher.is_stopped() else []

    def check(self) -> None:
        if problem := failure(self.matcher):
            refused = "doesn't satisfy" in problem
            hint = " (allowed_token_ids, bad_words or min_tokens may forbid all that it allows)" if refused else ""
            raise GrammarError(f"{self._kind}: the grammar failed{hint}: {problem}")


class Grammars:
    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]):
        self._tokenizer, self._vocab_size, self._eos = tokenizer, vocab_size, list(eos_token_ids)
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Read the vocabulary now: a second or more for a large one, in which Python stands still."""
        with self._lock:
            if self._eos:
                _ = self._vocabulary

    def build(self, outputs: StructuredOutputs) -> Constraint:
        """A request's constraint; a large grammar takes long, so call it on a thread. Raises GrammarError."""
        if not self._eos:
            raise GrammarError("this model names no end-of-sequence token, which ends what follows a grammar")
        self.prepare()
        grammar = compile_grammar(outputs)

        def tried() -> tuple[LLMatcher, str]:  # it needs more of the stack with this vocabulary than the compiler's
            matcher = new_matcher(self._vocabulary, grammar)
            return matcher, early_failure(matcher)

        matcher, problem = call_with_stack("grammar", BUILD_STACK_BYTES, tried)
        if problem:
            raise GrammarError(f"{outputs.kind}: the grammar failed: {problem}")
        return Constraint(matcher, outputs, self._tokenizer, self._vocabulary, self._opening(outputs))

    def fill(self, constraints: Sequence[Constraint | None], mask: np.ndarray) -> None:
        """Set row i of `mask` [R, V/32] to the tokens that constraint i allows; rows of None allow all."""
        mask[...] = ALL
        rows = [(matcher, i) for i, c in enumerate(constraints) if c is not None for matcher in c.matchers]
        masks = np.zeros((len(rows), mask.shape[1]), mask.dtype)
        if rows:
            fill_next_token_bitmask_par(self._executor, [(matcher, at) for at, (matcher, _) in enumerate(rows)], masks)
        mask[[i for _, i in rows]] = 0
        for allowed, (_, i) in zip(masks, rows, strict=True):
            mask[i] |= allowed
        for row, constraint in zip(mask, constraints, strict=True):
            if constraint is not None and not constraint.active:
                for token in self._eos:
                    forbid(row, token)

    def _opening(self, outputs: StructuredOutputs) -> LLMatcher | None:
        if not outputs.openings:
            return None
        added = {token.content: number for number, token in self._tokenizer.get_added_tokens_decoder().items()}
        marks = "|".join(map(re.escape, sorted(filter(None, added), key=len, reverse=True)))
        split = re.compile(f"({marks})" if marks else "(?!)")
        texts = [
            " ".join(f"<[{added[p]}]>" if p in added else json.dumps(p, ensure_ascii=False) for p in pieces if p)
            for pieces in map(split.split, outputs.openings)
        ]
        grammar = LLMatcher.grammar_from_lark(f"start: ({' | '.join(texts)}) REST\nREST: /(.|\\n)*/")
        return new_matcher(self._vocabulary, grammar)

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        return LLTokenizer(self._tokenizer.to_str(), n_vocab=self._vocab_size, eos_token=self._eos)

    @cached_property
    def _executor(self) -> LLExecutor:
        return LLExecutor(num_threads=THREADS)
