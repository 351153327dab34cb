"""Other servers of the model: whose pages come here, and who fetches pages from here."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence

from jaxllm.engine.messages import TransferInfo
from jaxllm.engine.offload.host_pages import HostPages, Page
from jaxllm.engine.offload.page_listener import PageListener
from jaxllm.engine.offload.prefix_digests import Digest
from jaxllm.engine.offload.pulls import Pulls
from jaxllm.kv_transfer_config import KVTransferConfig


class Peers:
    """An engine's side of both directions, as far as its role has them."""

    def __init__(
        self,
        config: KVTransferConfig,
        secret: bytes,
        contents: str,
        page_bytes: int,
        state_bytes: int,
        host: HostPages,
        give: Callable[[Sequence[Digest]], Iterator[Page]],
    ):
        """What comes goes to `host`; `give` gives pages of prefixes up to the first that is not there.

        Raises:
            ConfigError: nobody can listen at its address.
        """
        self.pulls: Pulls | None = None
        self._listener: PageListener | None = None
        if config.takes:
            must_come = config.kv_load_failure_policy == "fail"
            lengths = (page_bytes, state_bytes)
            self.pulls = Pulls(host, secret, contents, *lengths, config.kv_timeout, must_come=must_come)
        if config.gives:
            self._listener = PageListener((config.kv_ip, config.kv_port), secret, contents, give)
        self.info = TransferInfo(
            engine_id=secrets.token_hex(8),
            role=config.kv_role,
            host=config.kv_ip,
            port=0 if self._listener is None else self._listener.port,
            peers=config.kv_peers,
        )

    @property
    def num_given(self) -> int:
        """Pages that others have been sent."""
        return 0 if self._listener is None else self._listener.num_given

    def close(self) -> None:
        """Bring and give nothing more."""
        if self.pulls is not None:
            self.pulls.close()
        if self._listener is not None:
            self._listener.close()
