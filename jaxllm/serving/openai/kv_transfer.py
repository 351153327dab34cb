"""`kv_transfer_params`: a prompt that one server computes, and another goes on with; names and meanings are vLLM's."""

from __future__ import annotations

from typing import Self

import msgspec
from pydantic import Field, model_validator

from jaxllm.engine.messages import PagesAt
from jaxllm.serving.generation import Generation
from jaxllm.serving.hand_over import HandOver
from jaxllm.serving.http.request_model import RequestModel, refuse

MAX_HOST = 255
MAX_PAGES = 2**20


class KVTransferParams(RequestModel):
    """Who computes a prompt, and who goes on with it."""

    do_remote_decode: bool = False
    """Compute the prompt and one token, and keep the prompt's pages where another server can fetch them; the answer's
    kv_transfer_params are for the request to that server."""
    do_remote_prefill: bool = False
    """Fetch the prompt's pages from the server that remote_host and remote_port name, and go on from there."""
    remote_engine_id: str | None = Field(default=None, max_length=MAX_HOST)
    """Accepted, without effect: pages are found by what the prompt is."""
    remote_request_id: str | None = Field(default=None, max_length=MAX_HOST)
    """Accepted, without effect: pages are found by what the prompt is."""
    remote_host: str | None = Field(default=None, max_length=MAX_HOST, pattern="^[!-~]+$")
    """Where that server gives pages."""
    remote_port: int | None = Field(default=None, ge=1, le=65535)
    """At which port."""
    remote_block_ids: list[int] | None = Field(default=None, max_length=MAX_PAGES)
    """Which of the prompt's pages are there: 0, 1, 2, … as the other server's answer said; by default all full ones."""

    @model_validator(mode="after")
    def _one_side(self) -> Self:
        if self.do_remote_decode and self.do_remote_prefill:
            raise refuse("do_remote_decode and do_remote_prefill are both true; a request is one of them")
        if not self.do_remote_prefill:
            return self
        for name in ("remote_host", "remote_port"):
            if getattr(self, name) is None:
                raise refuse(
                    f"{name} is missing: do_remote_prefill needs the address that the other server's answer has"
                )
        ids = self.remote_block_ids
        if ids is not None and ids != list(range(len(ids))):
            raise refuse("remote_block_ids must be 0, 1, 2, … as the other server's answer has them")
        return self

    def hand_over(self) -> HandOver | None:
        """What is asked of the engine; None where nothing is."""
        if self.do_remote_decode:
            return HandOver()
        if not self.do_remote_prefill:
            return None
        assert self.remote_host is not None and self.remote_port is not None
        count = None if self.remote_block_ids is None else len(self.remote_block_ids)
        return HandOver(PagesAt(self.remote_host, self.remote_port, count))


class KVTransferAnswer(msgspec.Struct, kw_only=True):
    """The kv_transfer_params of the request to the server that goes on."""

    do_remote_prefill: bool = True
    do_remote_decode: bool = False
    remote_engine_id: str
    remote_request_id: str
    remote_host: str
    remote_port: int
    remote_block_ids: list[int]


def kv_transfer_answer(generation: Generation) -> KVTransferAnswer | msgspec.UnsetType:
    """Where the pages of a prompt are that was computed for another server; nothing of other requests."""
    found = generation.handed_on
    if found is None:
        return msgspec.UNSET
    return KVTransferAnswer(
        remote_engine_id=found.engine.engine_id,
        remote_request_id=generation.id,
        remote_host=found.engine.host,
        remote_port=found.engine.port,
        remote_block_ids=list(range(found.pages)),
    )
