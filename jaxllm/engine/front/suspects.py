"""Requests that were running when an engine died: one that was twice is not run a third time."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable

import msgspec

from jaxllm.engine.messages import EngineRequest
from jaxllm.errors import InvalidRequestError

MOST_DEATHS = 2
MOST_REMEMBERED = 10_000

_encode = msgspec.msgpack.Encoder().encode


class Suspects:
    """Counts the deaths that each request has seen, whatever it is called; one that has ended well is forgotten."""

    def __init__(self) -> None:
        self._deaths: OrderedDict[bytes, int] = OrderedDict()

    def note(self, requests: Iterable[EngineRequest]) -> None:
        """An engine died while it ran these."""
        for fingerprint in {fingerprint_of(request) for request in requests}:  # choices of one are as one
            self._deaths[fingerprint] = self._deaths.pop(fingerprint, 0) + 1
        while len(self._deaths) > MOST_REMEMBERED:
            self._deaths.popitem(last=False)

    def clear(self, request: EngineRequest) -> None:
        """It has ended, and the engine lives."""
        if self._deaths:
            self._deaths.pop(fingerprint_of(request), None)

    def check(self, request: EngineRequest) -> None:
        """Raises InvalidRequestError where it is not run again."""
        if self._deaths and self._deaths.get(fingerprint_of(request), 0) >= MOST_DEATHS:
            raise InvalidRequestError(
                f"the engine died {MOST_DEATHS} times while it ran this request, which is not run again until the "
                "server is started again"
            )


def fingerprint_of(request: EngineRequest) -> bytes:
    """The same for all requests that ask for the same, whoever sends them and when."""
    asked = request.prompt_token_ids, request.sampling_params, request.pooling
    return hashlib.sha256(_encode(asked)).digest()
