"""After an engine has died: it is started again, and a request that engines keep dying of is refused."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec

from jaxllm.engine.messages import EngineClient, EngineRequest
from jaxllm.errors import InvalidRequestError, JaxLLMError

logger = logging.getLogger(__name__)

Client = TypeVar("Client", bound=EngineClient)

RESTART_PAUSES = (0.0, 1.0, 5.0, 30.0, 60.0)
"""Seconds to wait before each attempt to start an engine that died."""


def start_again(
    name: str,
    start: Callable[[threading.Event], Client],
    take: Callable[[Client], None],
    closing: threading.Event,
    pauses: Iterable[float],
) -> bool:
    """Start an engine in place of one that died, after each of the `pauses` until it starts, and have `take` take it.

    Returns whether it runs: not where `closing` was set meanwhile, or the pauses have come to an end.
    """
    for pause in pauses:
        if closing.wait(pause):
            return False
        logger.warning("%s died; starting it again", name)
        try:
            client = start(closing)
        except (JaxLLMError, OSError) as error:
            logger.error("%s did not start: %s", name, error)
            continue
        take(client)
        if closing.is_set():  # while it was starting
            client.shutdown()
            return False
        return True
    logger.error("%s did not start; giving up", name)
    return False


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
        self._deaths.pop(fingerprint_of(request), None)

    def check(self, request: EngineRequest) -> None:
        """Raises InvalidRequestError where it is not run again."""
        if self._deaths.get(fingerprint_of(request), 0) >= MOST_DEATHS:
            raise InvalidRequestError(
                f"the engine died {MOST_DEATHS} times while it ran this request, which is not run again until the "
                "server is started again"
            )


def fingerprint_of(request: EngineRequest) -> bytes:
    """The same for all requests that ask for the same, whoever sends them and when."""
    asked = request.prompt_token_ids, request.sampling_params, request.pooling
    return hashlib.sha256(_encode(asked)).digest()
