"""Where other servers of the model fetch the pages of prompts that were computed here."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from functools import partial

import msgspec
import numpy as np

from jaxllm.engine.features.offload.pages import Digest, Page
from jaxllm.errors import ConfigError, reason
from jaxllm.sharding.wire import Wire, WireError, accept_each, admit, frame, interrupt

MOST_DIGESTS = 2**14
"""Of one question: their header stays well below what a frame may have."""


class PagesWanted(msgspec.Struct, tag=True):
    """The pages of these prefixes are wanted, by an engine whose pages hold what `contents` is a digest of."""

    contents: str
    digests: list[Digest]


class SomePages(msgspec.Struct, tag=True):
    """Comes with the next pages in their order: uint8 `[pages, page_bytes]`."""


class AllGiven(msgspec.Struct, tag=True):
    """There are no more of them."""


class NoPages(msgspec.Struct, tag=True):
    reason: str


FromGiver = SomePages | AllGiven | NoPages


logger = logging.getLogger(__name__)

MOST_CONNECTIONS = 64
HANDSHAKE_SECONDS = 10.0
PART_SECONDS = 60.0
PART_BYTES = 16 * 2**20


class PageListener:
    """Listens at an address, and gives pages to whoever proves that it has the secret, on threads of its own."""

    def __init__(
        self, address: tuple[str, int], secret: bytes, contents: str, give: Callable[[Sequence[Digest]], Iterator[Page]]
    ):
        """`give` gives pages up to the first missing one, on any thread. Raises ConfigError: it cannot listen."""
        self._secret, self._contents, self._give = secret, contents, give
        self._listener = _listen(address)
        self.port: int = self._listener.getsockname()[1]
        self._counting = threading.Lock()
        self._open: set[socket.socket] = set()
        self._closed = False
        self.num_given = 0
        accept = partial(accept_each, self._listener, MOST_CONNECTIONS, "pages-to", self._serve)
        threading.Thread(target=accept, name="pages", daemon=True).start()

    def close(self) -> None:
        """Give nothing more; whoever is being given something sees the connection end."""
        with self._counting:
            self._closed = True
            ending = [self._listener, *self._open]
        for one in ending:
            interrupt(one)
        self._listener.close()

    def _serve(self, connection: socket.socket, source: str) -> None:
        try:
            with connection:
                with self._counting:
                    self._open.add(connection)
                    is_closed = self._closed
                if not is_closed:
                    self._answer(connection, source)
        except (OSError, WireError) as error:
            logger.info("pages were not given to %s: %s", source, reason(error))
        except CancelledError:
            logger.info("pages were not given to %s: the engine was shut down", source)
        finally:
            with self._counting:
                self._open.discard(connection)

    def _answer(self, connection: socket.socket, source: str) -> None:
        connection.settimeout(HANDSHAKE_SECONDS)
        if not admit(connection, self._secret):
            logger.warning("a server at %s was given no pages: its cluster_secret is another", source)
            return
        wire: Wire[PagesWanted] = Wire(connection, PagesWanted)
        wanted, _ = wire.receive(HANDSHAKE_SECONDS)
        connection.settimeout(PART_SECONDS)
        if len(wanted.digests) > MOST_DIGESTS:
            wire.send(NoPages(f"{len(wanted.digests)} pages were asked for at once; accepted are {MOST_DIGESTS}"))
        elif wanted.contents != self._contents:
            wire.send(NoPages("its pages are of another model, or were made with other settings"))
        else:
            self._send(wire, self._give(wanted.digests))

    def _send(self, wire: Wire[PagesWanted], pages: Iterator[Page]) -> None:
        for part in _in_parts(pages):
            wire.send_frame(frame(SomePages(), [np.stack(part)]))
            with self._counting:
                self.num_given += len(part)
        wire.send(AllGiven())


def _in_parts(pages: Iterator[Page]) -> Iterator[list[Page]]:
    part: list[Page] = []
    for page in pages:
        if part and (page.nbytes != part[0].nbytes or (len(part) + 1) * page.nbytes > PART_BYTES):
            yield part
            part = []
        part.append(page)
    if part:
        yield part


def _listen(address: tuple[str, int]) -> socket.socket:
    host, port = address
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server(address, family=family)
    except OSError as error:
        raise ConfigError(
            f"kv_transfer_config.kv_ip is {host} and kv_port {port}, where this server cannot listen: {reason(error)}"
        ) from None
