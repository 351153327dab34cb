"""Adapters in host memory, read when the first request asks for them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from jaxllm.engine.adapters.reading import AdapterReader, Rows
from jaxllm.errors import CheckpointError, InvalidRequestError
from jaxllm.requests.adapters import AdapterUse


def check_adapters(uses: Sequence[AdapterUse], most: int) -> None:
    """Raises InvalidRequestError: an engine with places for `most` adapters cannot run a request with these."""
    if most == 0:
        raise InvalidRequestError(f"adapter {uses[0].name!r}: this engine runs without adapters; see enable_lora")
    if len(uses) > most:
        raise InvalidRequestError(
            f"{len(uses)} adapters are asked for at once; accepted are max_loras, which is {most}"
        )
    names = [use.name for use in uses]
    twice = next((use.name for use in uses if sum(other.id == use.id for other in uses) > 1), None)
    if twice is not None:
        raise InvalidRequestError(f"the adapters are {', '.join(names)}: {twice!r} is among them twice")


class AdapterStore:
    """Keeps the rows of the adapters used last. Any thread may ask for some."""

    def __init__(self, reader: AdapterReader, most: int):
        self._reader = reader
        self._most = most
        self._rows: OrderedDict[int, Rows] = OrderedDict()
        self._lock = threading.Lock()
        self._reading = threading.Lock()

    def known(self, use: AdapterUse) -> Rows | None:
        """The rows of an adapter, if it has been read."""
        with self._lock:
            if use.id in self._rows:
                self._rows.move_to_end(use.id)
            return self._rows.get(use.id)

    def read(self, use: AdapterUse) -> Rows:
        """The rows of an adapter, which are read now if need be.

        Raises:
            InvalidRequestError: it cannot be read, or not be used with this model.
        """
        with self._reading:  # two requests for one adapter read it once
            rows = self.known(use)
            if rows is None:
                try:
                    rows = self._reader.read(use.path)
                except CheckpointError as error:
                    raise InvalidRequestError(f"adapter {use.name!r}: {error}") from error
                with self._lock:
                    self._rows[use.id] = rows
                    while len(self._rows) > self._most:
                        self._rows.popitem(last=False)
        return rows
