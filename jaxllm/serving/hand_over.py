"""Prompts that one server computes, and another goes on with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxllm.chat.prompt import Prompt
from jaxllm.config.parts import is_peer
from jaxllm.engine.messages import PagesAt, TransferInfo
from jaxllm.errors import Field, InvalidRequestError
from jaxllm.requests.adapters import AdapterUse

WIRE_NAME = "kv_transfer_params"


@dataclass(frozen=True)
class HandOver:
    """Either side of it: go on with the prompt whose pages are at `pages_at`, or compute one for another server."""

    pages_at: PagesAt | None = None

    @property
    def hands_on(self) -> bool:
        return self.pages_at is None


@dataclass(frozen=True)
class HandedOn:
    """A prompt that was computed for another server: which engine has its full pages, and how many those are."""

    engine: TransferInfo
    pages: int


def check_hand_over(
    asked: HandOver, info: TransferInfo | None, prompts: Sequence[Prompt], adapters: Sequence[AdapterUse]
) -> None:
    """Refuse what an engine's role, or a request's other fields, do not allow.

    Raises:
        InvalidRequestError: naming the field, its value, and what would be accepted.
    """
    if info is None:
        raise InvalidRequestError(
            [Field(WIRE_NAME), " is not available: this server was started without kv_transfer_config"]
        )
    name, missing = ("do_remote_decode", "kv_consumer") if asked.hands_on else ("do_remote_prefill", "kv_producer")
    if info.role == missing:
        other = "kv_producer" if asked.hands_on else "kv_consumer"
        raise InvalidRequestError(
            [
                Field(WIRE_NAME, name),
                f" is true, and this server's kv_role is {info.role}; accepted with {other}, kv_both",
            ]
        )
    if asked.pages_at is not None and not is_peer(asked.pages_at.host, info.peers):
        raise InvalidRequestError(
            [
                Field(WIRE_NAME, "remote_host"),
                f" is {asked.pages_at.host!r}; this server fetches pages from {', '.join(info.peers)} (kv_peers)",
            ]
        )
    if adapters:
        raise InvalidRequestError(
            [Field(WIRE_NAME), " is set with an adapter, whose pages other servers do not know; leave it out"]
        )
    if len(prompts) > 1:
        raise InvalidRequestError([Field(WIRE_NAME), f" is set with {len(prompts)} prompts; accepted is 1"])
    most = prompts[0].params.max_tokens
    if asked.hands_on and most != 1:
        raise InvalidRequestError(
            [Field("max_tokens"), f" is {most}; with {WIRE_NAME}.do_remote_decode it must be 1"], Field("max_tokens")
        )
