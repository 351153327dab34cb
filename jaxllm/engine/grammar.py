"""Grammars at work: which tokens may come next, for every running request that is constrained.

A matcher follows one request's tokens. Matchers are built off the loop, so that no stream waits for a large grammar.
They fill their masks together, on threads, while the device runs the step that the masks are for.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask_par
from tokenizers import Tokenizer

from jaxllm.engine.markers import MarkerSearch
from jaxllm.engine.masks import ALL, allow
from jaxllm.errors import InvalidRequestError, one_line
from jaxllm.requests.grammar_process import COMPILE_STACK_BYTES
from jaxllm.requests.structured_outputs import StructuredOutputs, compile_grammar, new_matcher
from jaxllm.threads import call_with_stack

THREADS = min(4, os.cpu_count() or 1)
BUILD_STACK_BYTES = 2 * COMPILE_STACK_BYTES
"""For a matcher: a grammar that another process has compiled in half of it does not overflow it."""


class GrammarError(InvalidRequestError):
    """A request's grammar cannot go on; the request fails, and no other."""


class Constraint:
    """One request's place in its grammar."""

    def __init__(self, matcher: LLMatcher, outputs: StructuredOutputs, tokenizer: Tokenizer):
        self.matcher = matcher
        self.opening = _only_token(tokenizer, outputs.opening)
        """A token that may come first in place of the grammar, which then begins behind the marker; else None."""
        self.active = outputs.after is None or self.opening is not None
        self._after = MarkerSearch(tokenizer, outputs.after or "")

    @property
    def complete(self) -> bool:
        """The grammar is satisfied, and nothing can follow."""
        return self.active and self.matcher.is_stopped()

    def accept(self, token: int) -> None:
        """Follow a generated token.

        Raises:
            GrammarError: the grammar does not allow it, or its limits are exceeded.
        """
        opened = token == self.opening
        self.opening = None
        if opened:
            self.active = False
        elif self.active:
            self.matcher.consume_token(token)
            self.check(" (allowed_token_ids, bad_words or min_tokens may forbid all that it allows)")
        else:
            self.active = self._after.add(token)

    def forced(self) -> list[int]:
        """Tokens that must follow: there is no choice, so they need no sampling."""
        return self.matcher.compute_ff_tokens() if self.active and not self.matcher.is_stopped() else []

    def check(self, hint: str = "") -> None:
        """Raises GrammarError where the matcher has failed: it says so nowhere else, and allows no token."""
        if self.matcher.is_error():
            raise GrammarError(f"the grammar failed{hint}: {one_line(self.matcher.get_error())}")


class Grammars:
    """Builds constraints and fills masks, for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]):
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos = list(eos_token_ids)
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
        matcher = call_with_stack("grammar", BUILD_STACK_BYTES, lambda: new_matcher(self._vocabulary, grammar))
        constraint = Constraint(matcher, outputs, self._tokenizer)
        constraint.check()
        return constraint

    def fill(self, constraints: Sequence[Constraint | None], mask: np.ndarray) -> None:
        """Set row i of `mask` [R, V/32] to the tokens that constraint i allows; rows of None allow all."""
        mask[...] = ALL
        active = [(c.matcher, i) for i, c in enumerate(constraints) if c is not None and c.active]
        if active:
            fill_next_token_bitmask_par(self._executor, active, mask)
        for row, constraint in zip(mask, constraints, strict=True):
            if constraint is not None and constraint.opening is not None:
                allow(row, constraint.opening)

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        return LLTokenizer(self._tokenizer.to_str(), n_vocab=self._vocab_size, eos_token=self._eos)

    @cached_property
    def _executor(self) -> LLExecutor:
        return LLExecutor(num_threads=THREADS)


def _only_token(tokenizer: Tokenizer, text: str | None) -> int | None:
    """The one token that `text` is; None where it is several."""
    ids = [] if text is None else tokenizer.encode(text, add_special_tokens=False).ids
    return ids[0] if len(ids) == 1 else None
