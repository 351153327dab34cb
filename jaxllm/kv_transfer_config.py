"""The settings of prompts that one server computes and another goes on with."""

from __future__ import annotations

from ipaddress import ip_address, ip_network
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from jaxllm.setting_values import Seconds, SettingsGroup, split_if_text


def _one_address(text: str) -> str:
    if text in ("", "0.0.0.0", "::", "*"):
        raise ValueError("it must be an address at which other servers reach this machine, such as 10.0.0.5")
    return text


class KVTransferConfig(SettingsGroup):
    """How KV pages go from the server that computes a prompt to the one that goes on with it, in vLLM's words."""

    kv_connector: Literal["jaxllm"] = "jaxllm"
    """How pages travel: there is one way, over TCP."""
    kv_role: Literal["kv_producer", "kv_consumer", "kv_both"]
    """kv_producer: other servers fetch the pages of prompts that were computed here. kv_consumer: this server fetches
    pages from others. kv_both: either, by the request."""
    kv_ip: Annotated[str, AfterValidator(_one_address)] = "127.0.0.1"
    """The address of this machine at which a producer listens, and that others are told to fetch pages from."""
    kv_port: Annotated[int, Field(ge=0, le=65535)] = 14579
    """The port for that; 0 takes a free one."""
    kv_timeout: Annotated[Seconds, Field(gt=0, le=3600)] = 30.0
    """Seconds after which a request no longer waits for pages from another server."""
    kv_load_failure_policy: Literal["recompute", "fail"] = "recompute"
    """What becomes of a request whose pages cannot be fetched: its prompt is computed here, or it fails."""
    kv_peers: Annotated[tuple[str, ...], BeforeValidator(split_if_text)] = ()
    """Hosts and networks that requests may have pages fetched from, as prefill-1,10.0.0.0/8 (default: any)."""

    @property
    def gives(self) -> bool:
        """Whether other servers fetch pages here."""
        return self.kv_role != "kv_consumer"

    @property
    def takes(self) -> bool:
        """Whether this server fetches pages from others."""
        return self.kv_role != "kv_producer"


def is_peer(host: str, peers: tuple[str, ...]) -> bool:
    """Whether a host is one of `peers`, by its name or address, or in one of those that are networks; any, of none."""
    return not peers or host in peers or any(_contains(peer, host) for peer in peers)


def _contains(peer: str, host: str) -> bool:
    try:
        return ip_address(host) in ip_network(peer)
    except ValueError:  # one of the two is a name
        return False
