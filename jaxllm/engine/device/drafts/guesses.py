"""Drafts of requests whose tokens a grammar settles, made on the host: it knows their text, and fills their masks.

What a grammar forces is a draft that is always right. Where there is a choice, the draft is what followed in the text
when it said the same before, and ends before the first token that the grammar refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np

from jaxllm.engine.device.drafts.ngrams import ngram_drafts
from jaxllm.engine.device.drafts.remembered import RememberedTexts
from jaxllm.engine.device.sizes import Drafts, NgramDrafts
from jaxllm.engine.request import Request

if TYPE_CHECKING:
    from jaxllm.engine.grammar import Constraint

SHORTEST, LONGEST = 2, 5
"""Tokens of a match, where an engine's own drafts come from a model."""

FillMasks = Callable[["Sequence[Constraint | None]", np.ndarray], None]
"""Sets row i of `[R, V/32]` to the tokens that constraint i allows; rows of None allow all."""


class Guesses:
    """Fills what a masked step that tries drafts is told of its requests."""

    def __init__(self, drafts: Drafts, remembered: RememberedTexts):
        """Drafts are found as `drafts` says if it reads texts, and in a request's own text if a model makes them."""
        of_text = NgramDrafts(drafts.num_tokens, SHORTEST, LONGEST)
        self._rule = drafts if isinstance(drafts, NgramDrafts) else of_text
        self._remembered = remembered
        self._texts: WeakKeyDictionary[Request, _Text] = WeakKeyDictionary()

    def fill(self, requests: Sequence[Request], x: dict[str, np.ndarray], fill: FillMasks) -> None:
        """Write the drafts of requests with a grammar, which the device then makes none for, and everybody's masks.

        `x` is as `verify_packing` lays it out, row i for request i. All tokens of the requests must have been read.
        """
        places, width = x["mask"].shape[1:]
        at: list[Constraint | None] = [None] * (len(requests) * places)
        for row, request in enumerate(requests):
            if request.constraint is None:
                continue
            assert x["tokens"][row] >= 0, "guesses follow a token that has been read"
            most = min(int(x["most_drafts"][row]), places - 1)
            drafts, constraints = self._try(request, request.constraint, most)
            x["most_drafts"][row], x["num_given"][row] = 0, len(drafts)
            x["drafts"][row, : len(drafts)] = drafts
            at[row * places : row * places + len(constraints)] = constraints
        fill(at, x["mask"][: len(requests)].reshape(-1, width))

    def _try(self, request: Request, constraint: Constraint, most: int) -> tuple[list[int], list[Constraint]]:
        """Up to `most` drafts, and the request's place in its grammar before the first and after each."""
        drafts: list[int] = []
        ahead: list[int] = []
        places = [constraint]
        while len(drafts) < most:
            ahead = places[-1].forced() or ahead or self._found(request, drafts)
            following = places[-1].after(ahead[0]) if ahead else None
            if following is None:
                break
            drafts.append(ahead[0])
            places.append(following)
            ahead = ahead[1:]
        return drafts, places

    def _found(self, request: Request, drafts: Sequence[int]) -> list[int]:
        """What may follow the request's text and `drafts`."""
        text = self._texts.get(request)
        if text is None:
            text = self._texts[request] = _Text(request.max_total + self._rule.num_tokens)
        history = text.of(request.token_ids, drafts)
        position = np.array([len(history) - 1])
        found, count = ngram_drafts(history[None], position, self._remembered.tokens, self._rule, np)
        return np.asarray(found)[0, : int(count[0])].tolist()


class _Text:
    """A request's tokens as an array, which grows with them."""

    def __init__(self, most: int):
        self._tokens = np.zeros(most, np.int32)
        self._known = 0

    def of(self, tokens: Sequence[int], further: Sequence[int]) -> np.ndarray:
        """`tokens`, of which those that it was given before are the beginning, and `further` ones, which may change."""
        self._tokens[self._known : len(tokens)] = tokens[self._known :]
        self._known = len(tokens)
        end = self._known + len(further)
        self._tokens[self._known : end] = further
        return self._tokens[:end]
