"""A device for the scheduler's tests, whose pages and slots hold tokens.

What is sampled depends on the whole context read through the pages, so that a page which is shared, lost or overwritten
wrongly shows as a wrong token.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from jaxllm.engine.request import Request
from jaxllm.engine.scheduler import Batch

VOCAB = 3


def next_token(tokens: Sequence[int], salt: str | None) -> int:
    """The model: any change in the context may change the token."""
    return zlib.crc32(repr((list(tokens), salt)).encode()) % VOCAB


def alone(prompt: Sequence[int], salt: str | None, max_total: int, stop: int | None) -> list[int]:
    """What a request ends with when nothing else runs."""
    tokens = list(prompt)
    while len(tokens) < max_total:
        tokens.append(next_token(tokens, salt))
        if tokens[-1] == stop:
            break
    return tokens


class SimulatedDevice:
    def __init__(self, num_pages: int, page_size: int):
        self.page_size = page_size
        self._pages: list[list[tuple[int, int, str | None] | None]] = [[None] * page_size for _ in range(num_pages)]
        self._sampled: dict[tuple[int, int], int] = {}
        """(slot, position) -> token."""

    def run(self, batch: Batch) -> list[tuple[Request, int]]:
        """Every chunk is written before anything is read, as in a layer; returns the tokens sampled."""
        for chunk in batch.chunks:
            request = chunk.request
            for position in range(chunk.start, chunk.start + chunk.length):
                known = position < len(request.token_ids)
                token = request.token_ids[position] if known else self._sampled[request.slot, position]
                page, row = divmod(position, self.page_size)
                self._pages[request.pages[page]][row] = (position, token, request.cache_salt)
        return [
            (chunk.request, self._sample(chunk.request, chunk.start + chunk.length))
            for chunk in batch.chunks
            if chunk.samples
        ]

    def _sample(self, request: Request, context: int) -> int:
        tokens = []
        for position in range(context):
            page, row = divmod(position, self.page_size)
            held = self._pages[request.pages[page]][row]
            assert held is not None and held[0] == position and held[2] == request.cache_salt, "a foreign page was read"
            tokens.append(held[1])
        token = next_token(tokens, request.cache_salt)
        self._sampled[request.slot, context] = token
        return token
