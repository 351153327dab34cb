"""A request's life inside the engine, and its part of one step."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from jaxllm.engine.core.pages import PrefixNode
from jaxllm.engine.messages import EngineRequest
from jaxllm.requests.sampling import SamplingParams


class Status(enum.Enum):
    """The stage of its life that a request is in."""

    PREPARING = "preparing"
    """Its grammar is being built, an executable that only requests like it need, or its pages are being fetched."""
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Settings(NamedTuple):
    """The vectors that a request's slot is told, made when it is added: a value that does not fit ends that request
    alone.
    """

    ints: np.ndarray
    floats: np.ndarray


@dataclass(eq=False)
class Request:
    """One sequence: its tokens, and what of it is on the device.

    `token_ids` are the prompt and every sampled token that the host has seen; `num_inflight` more are being sampled.
    `num_computed` tokens have their KV in pages, or will have once the dispatched steps have run. If tokens
    are tried ahead, both are the most that they can be: the device settles how many of them are taken.
    """

    request_id: str
    token_ids: list[int]
    num_prompt: int
    params: SamplingParams
    arrival_time: float
    priority: int = 0
    group: str = ""
    """Requests of different groups take turns, and share what there is."""
    max_total: int = 0
    """Prompt and generated tokens at which it must stop."""
    rotary_len: int = 0
    """The length that its tokens were, or will be, prefilled at: what length-dependent rotary embeddings go by."""

    status: Status = Status.WAITING
    num_inflight: int = 0
    num_unsettled: int = 0
    """The number of those that are tried ahead: the device takes some, and the others are no tokens."""
    num_computed: int = 0
    num_cached: int = -1
    """Prompt tokens found in the prefix cache when first admitted; -1 before that."""
    pages: list[int] = field(default_factory=list)
    num_registered: int = 0
    """Leading pages that are in the prefix cache."""
    prefix_node: PrefixNode = None
    slot: int = -1
    first_scheduled_time: float | None = None
    num_preemptions: int = 0
    padding: float = 0.0
    """Its share of the padding rows that its steps ran."""
    settings: Settings | None = None
    """The vectors that its slot will be told."""
    cache_root: PrefixNode = None
    """Only requests with the same one share cached prefixes."""
    samples: bool = True
    """It is given tokens; else something is read of its prompt."""
    extras: dict[str, Any] = field(default_factory=dict)
    """Each used feature's own record of it, by the feature's name."""

    @classmethod
    def from_message(cls, message: EngineRequest, max_model_len: int) -> Request:
        """A request as a front door sends it, in a context of `max_model_len`."""
        params = message.sampling_params
        prompt = len(message.prompt_token_ids)
        budget = max_model_len - prompt if params.max_tokens is None else params.max_tokens
        most = min(prompt + budget, max_model_len)
        return cls(
            request_id=message.request_id,
            token_ids=list(message.prompt_token_ids),
            num_prompt=prompt,
            params=params,
            arrival_time=message.arrival_time,
            priority=message.priority,
            group=message.group,
            max_total=most if message.samples else prompt + 1,  # one more than the prompt, so that no token is sampled
            rotary_len=prompt,
            samples=message.samples,
        )

    @property
    def num_total(self) -> int:
        """Tokens known and being sampled."""
        return len(self.token_ids) + self.num_inflight

    @property
    def num_output(self) -> int:
        """Sampled tokens that the host has seen."""
        return len(self.token_ids) - self.num_prompt

    @property
    def order(self) -> tuple[int, float, str]:
        """The order of requests: lower priority value, then earlier arrival."""
        return (self.priority, self.arrival_time, self.request_id)


def root_of(root: PrefixNode, generation: int) -> PrefixNode:
    """The root of cached prefixes since the cache was last reset, the `generation`th time."""
    return (root, "since reset", generation) if generation else root


@dataclass
class Chunk:
    """Tokens `start … start + length - 1` of one request; if `num_sampled` is not 0, the prompt ends in it or before
    it, and its end chooses new tokens, unless the request is only read.

    A decode may choose several, one after another: every one of them but the last is run as well. If tokens are
    tried ahead, `num_sampled` is the most it can be, and so is `start` as long as a step before has not been read.
    """

    request: Request
    start: int
    length: int
    num_sampled: int
    apart: bool = False
    """More is done with its tokens than choosing the next one: they need a backbone by itself."""
    extras: dict[str, Any] = field(default_factory=dict)
    """Each feature's own record of it, by the feature's name."""


@dataclass
class Batch:
    """One step's work: chunks of one token come first, in the kernels' order."""

    chunks: list[Chunk] = field(default_factory=list)
    num_decodes: int = 0
    """Leading chunks of exactly one token."""
    admitted: list[Request] = field(default_factory=list)
    """Each takes its slot with the first of its chunks."""
    num_steps: int = 1
    """The tokens that a decode gives each request, one after another."""
    most_ahead: int = 0
    """The most tokens that a decode may try ahead with a request: as many as its chunk may sample, less one."""
    unsettled: bool = False
    """Only the device knows where some of the requests are: it is still to take or refuse what was tried with them."""
    late: bool = False
    """The host has a say in some token that is sampled, once it has seen the one before."""

    @property
    def num_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)

    @property
    def tries(self) -> bool:
        """The step has room for tokens tried ahead, perhaps for none: only the device knows where sequences are."""
        return self.most_ahead > 0 or self.unsettled

    @property
    def verifies(self) -> bool:
        """It runs as one "verify". With a late feature every step before has been read, so nothing is unsettled."""
        return self.decode_only and (self.tries if not self.late else self.most_ahead > 0)

    @property
    def decode_only(self) -> bool:
        """Every chunk is one token that samples, and no more is done with it: one executable does it all."""
        return all(chunk.length == 1 and chunk.num_sampled and not chunk.apart for chunk in self.chunks)
