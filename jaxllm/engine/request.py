"""A request's life inside the engine."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from jaxllm.engine.messages import CapturedRows, EngineRequest, PagesAt
from jaxllm.engine.page_pool import PrefixNode
from jaxllm.engine.reserved_states import ReservedStates
from jaxllm.requests.adapters import AdapterUse
from jaxllm.requests.captures import CaptureParams
from jaxllm.requests.patching import Patching
from jaxllm.requests.pooling import PoolingParams
from jaxllm.requests.prompt_scores import ScoresInProgress
from jaxllm.requests.sampling import SamplingParams
from jaxllm.requests.steering import Steering

if TYPE_CHECKING:
    from jaxllm.engine.adapters.reading import Rows
    from jaxllm.engine.draft_depth import DraftRecord
    from jaxllm.engine.grammar import Constraint
    from jaxllm.engine.offload.pulls import Pull
    from jaxllm.engine.settings import Settings
    from jaxllm.engine.thinking_budget import Thinking


class Status(enum.Enum):
    """Where a request is."""

    PREPARING = "preparing"
    """Its grammar is being built, an executable that only requests like it need, or its pages are being fetched."""
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """One sequence: its tokens, and what of it is on the device.

    `token_ids` are the prompt and every sampled token that the host has seen; `num_inflight` more are being sampled.
    `num_computed` tokens have their KV in pages, or will have once the dispatched steps have run. Where drafts are in
    flight both are the most that they can be: the device settles how many of them are taken.
    """

    request_id: str
    token_ids: list[int]
    num_prompt: int
    params: SamplingParams
    arrival_time: float
    priority: int = 0
    cache_salt: str | None = None
    cache_generation: int = 0
    """Counts how often the prefix cache had been reset when it came."""
    group: str = ""
    """Requests of different groups take turns, and share what there is."""
    max_total: int = 0
    """Prompt and generated tokens at which it must stop."""
    seed: int = 0
    rotary_len: int = 0
    """The length that its tokens were, or will be, prefilled at: what length-dependent rotary embeddings go by."""

    status: Status = Status.WAITING
    num_inflight: int = 0
    num_unsettled: int = 0
    """How many of those may turn out not to be tokens: drafts under way, of which the device takes some."""
    draft_record: DraftRecord | None = None
    """What has come of the tokens that were tried ahead with it."""
    num_drafted: int = 0
    """How many tokens were tried ahead with it, and have been settled."""
    num_taken: int = 0
    """How many of those were what the model chose."""
    num_computed: int = 0
    num_admitted: int = 0
    """Where its first chunk since it was last admitted begins: behind the pages found in the prefix cache."""
    num_cached: int = -1
    """Prompt tokens found in the prefix cache when first admitted; -1 before that."""
    pages: list[int] = field(default_factory=list)
    num_registered: int = 0
    """Leading pages that are in the prefix cache."""
    prefix_node: PrefixNode = None
    state_row: int = 0
    """Where its first chunk since it was last admitted finds the state of a cached prefix; 0 for nowhere."""
    branches_at: int = 0
    """Where its tokens part from other requests' although no state is kept there: tokens; 0 for nowhere."""
    reserved_states: ReservedStates = field(default_factory=ReservedStates)
    """Rows of states that scheduled steps keep of it, and whose tokens the host does not all know."""
    answer_node: PrefixNode = None
    """The longest prefix in its answer whose state is kept."""
    slot: int = -1
    first_scheduled_time: float | None = None
    num_preemptions: int = 0
    padding: float = 0.0
    """Its share of the padding rows that its steps ran."""
    prompt_scores: ScoresInProgress | None = None
    """Log-probabilities of its prompt, where they are asked for."""
    scores_from: int = 1
    """The first token of the prompt that they are of."""
    capture: CaptureParams | None = None
    """Activations that are wanted of it."""
    steering: Steering | None = None
    """What is added to its residual stream."""
    patching: Patching | None = None
    """What takes the place of its residual stream, at single layers and tokens."""
    captured: list[CapturedRows] = field(default_factory=list)
    """What has reached the host of them, and its caller has not been told."""
    constraint: Constraint | None = None
    """Its place in the grammar that its tokens must follow."""
    thinking: Thinking | None = None
    """Its reasoning, while that has a budget and is not over."""
    pooling: PoolingParams | None = None
    """What is read off the hidden states instead of sampling."""
    second_text: int = 0
    """Where the second of two texts begins, which an encoder tells from the first; 0 where there is one."""
    pooled: np.ndarray | None = None
    """What of it has reached the host."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that spell bad_words."""
    settings: Settings | None = None
    """What its slot will be told of it."""
    adapters: tuple[AdapterUse, ...] = ()
    adapter_rows: tuple[Rows, ...] = ()
    """What each of its adapters adds to the model, in host memory."""
    adapter_places: list[int] = field(default_factory=list)
    """Where each of its adapters is on the devices while it runs."""
    hands_on: bool = False
    """Another server will fetch the pages of its prompt."""
    pages_at: PagesAt | None = None
    """Where another server gives those."""
    pull: Pull | None = None
    """What brings them."""

    @classmethod
    def from_message(cls, message: EngineRequest, max_model_len: int, seed: int) -> Request:
        """`seed` is used where the request brings none of its own."""
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
            cache_salt=message.cache_salt,
            group=message.group,
            max_total=most if message.pooling is None else prompt + 1,  # never sampled: done when the prompt is
            seed=seed if params.seed is None else params.seed,
            rotary_len=prompt,
            pooling=message.pooling,
            second_text=message.second_text,
            adapters=message.adapters,
            scores_from=message.scores_from,
            capture=message.capture,
            steering=message.steering,
            patching=message.patching,
            hands_on=message.hands_on,
            pages_at=message.pages_at,
        )

    def add_pooled(self, values: np.ndarray, first: bool) -> None:
        """Sums of further chunks add up, logits of further tokens follow; the first begin anew after a preemption."""
        if first or self.pooled is None:
            self.pooled = values.copy()
        elif self.pooling is not None and self.pooling.kind == "logits":
            self.pooled = np.concatenate([self.pooled, values])
        else:
            self.pooled += values

    def pooled_bytes(self) -> bytes:
        """What the caller gets: float32, little-endian."""
        assert self.pooled is not None and self.pooling is not None
        values = self.pooled / self.num_prompt if self.pooling.kind == "mean" else self.pooled
        return values.astype("<f4").tobytes()

    @property
    def num_total(self) -> int:
        """Tokens known and being sampled."""
        return len(self.token_ids) + self.num_inflight

    @property
    def num_output(self) -> int:
        """Sampled tokens that the host has seen."""
        return len(self.token_ids) - self.num_prompt

    @property
    def adapter_ids(self) -> list[int]:
        """What its adapters are known by."""
        return [use.id for use in self.adapters]

    @property
    def cache_root(self) -> PrefixNode:
        """Only requests with the same one share cached prefixes: their salt, what is added to the weights, what
        steers and patches them, and which weights they began with.
        """
        root: PrefixNode = self.cache_salt
        changes = tuple(change.digest for change in (self.steering, self.patching) if change is not None)
        if self.adapters or changes:
            root = (self.cache_salt, *((use.id, use.scale) for use in self.adapters), *changes)
        return root_of(root, self.cache_generation)

    @property
    def order(self) -> tuple[int, float, str]:
        """Who goes first: lower priority value, then earlier arrival."""
        return (self.priority, self.arrival_time, self.request_id)

    @property
    def needs_history(self) -> bool:
        """Its slot must hold the whole token history."""
        return self.params.adjusts_logits or self.params.processes_logits

    @property
    def awaits_mask(self) -> bool:
        """The last token being sampled may be one that its grammar or its thinking budget settles."""
        thinking = self.thinking
        return self.constraint is not None or (thinking is not None and self.num_inflight > thinking.left)

    @property
    def first_read(self) -> int:
        """The first token whose hidden state is needed: only those before it may come from the prefix cache."""
        if self.pooling is not None and self.pooling.kind in ("mean", "cls"):
            return 0
        first = len(self.token_ids) - 1
        if self.params.prompt_logprobs is not None:
            first = min(first, self.scores_from - 1)
        return first if self.capture is None else min(first, self.capture.first(self.num_prompt))

    @property
    def reads_hidden(self) -> bool:
        """More than its next token is read from its steps."""
        return self.pooling is not None or self.params.wants_vocabulary or self.capture is not None

    @property
    def is_to_be_patched(self) -> bool:
        """Some token of it that has not been run will be patched, if it comes to that."""
        return self.patching is not None and self.num_computed < self.patching.end

    @property
    def fast_forwards(self) -> bool:
        """Tokens that its grammar forces need not be sampled: nobody asked for their logits or counts them."""
        counted = self.params.logprobs is not None or self.needs_history or self.thinking is not None
        return self.constraint is not None and not counted


def root_of(root: PrefixNode, generation: int) -> PrefixNode:
    """Where cached prefixes begin since the cache was last reset, the `generation`th time."""
    return (root, "since reset", generation) if generation else root
