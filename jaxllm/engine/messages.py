"""The small typed messages between a front door and the engine loop, and the protocol that carries them.

They are plain data (msgspec encodes them), so the loop can live in a thread or in its own process
without either side knowing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec
import numpy as np

from jaxllm.config.values import LogprobsMode
from jaxllm.looking import What
from jaxllm.requests.captures import CaptureParams, LayerShapes
from jaxllm.requests.logits_processors import Declared
from jaxllm.requests.outputs import ModelTasks, PoolingParams, PromptScores, RankedLogprobs
from jaxllm.requests.sampling import LOGPROBS_MODES, MAX_LOGPROBS, SamplingDefaults, SamplingParams
from jaxllm.requests.steering import AdapterUse, Patching, Steering

if TYPE_CHECKING:
    import jax


PauseMode = Literal["keep", "wait"]
"""The fate of running requests: they stop where they are, or run to their ends."""


class Pause(msgspec.Struct, tag=True, frozen=True):
    """Run no steps, until `Resume`. With "wait" no request begins any more, and it is done when none runs."""

    mode: PauseMode


class Resume(msgspec.Struct, tag=True, frozen=True):
    """Go on."""


class ResetPrefixCache(msgspec.Struct, tag=True, frozen=True):
    """Later requests find nothing that earlier ones have computed."""


class UpdateWeights(msgspec.Struct, tag=True, frozen=True):
    """Run with the weights of the model `source`, which are called `version` from then on."""

    source: str
    version: str


class NameWeights(msgspec.Struct, tag=True, frozen=True):
    """Call the weights that are there `version`."""

    version: str


class EndThinking(msgspec.Struct, tag=True, frozen=True):
    """End the reasoning of these requests now, of those that have a budget for it; others go on as they are."""

    request_ids: list[str]


Order = Pause | Resume | ResetPrefixCache | UpdateWeights | NameWeights | EndThinking

WeightSource = str | PathLike[str] | Mapping[str, Any]
"""A model's name, folder or file; or arrays by the names of the engine's checkpoint, or by those of `LLM.params`."""

NewWeights = dict[int, np.ndarray]
"""Arrays in host memory, as the devices keep them, by their place among those of the model's parameters."""


class ReadsWeights(Protocol):
    """Reads other weights for an engine, and exchanges them on its devices."""

    def read(self, source: WeightSource) -> NewWeights:
        """The weights of `source`, as the engine keeps them. Any thread may call this; the engine runs on meanwhile.

        Raises:
            ConfigError: this engine cannot exchange its weights.
            ModelNotFoundError, CheckpointError: `source` is not there, or is of another model.
        """

    def exchange(self, weights: list[jax.Array], new: NewWeights) -> tuple[jax.Array, ...]:
        """The devices' arrays with the new ones in their places; each old one leaves `weights` before."""


class PagesAt(msgspec.Struct, frozen=True):
    """The place where another server gives the pages of a prompt's beginning, and their count, if it has said."""

    host: str
    port: int
    count: int | None = None


class TransferInfo(msgspec.Struct, frozen=True):
    """An engine's exchange of pages with engines of other servers: see KVTransferConfig."""

    engine_id: str
    role: Literal["kv_producer", "kv_consumer", "kv_both"]
    host: str
    port: int
    """The port at which it gives pages."""
    peers: tuple[str, ...] = ()
    """From where it fetches some; from anywhere, where there are none."""


class SeenImage(msgspec.Struct, frozen=True):
    """An image as a model is given it.

    Attributes:
        digest: SHA-256 of all that its rows depend on.
        pixels: uint8, of its patches in order.
        tiles: the height and width of each of its tiles, in patches.
        cut: the rows and columns of tiles into which it was cut.
        num_rows: the tokens of a prompt that it takes the place of.
    """

    digest: bytes
    pixels: bytes
    tiles: tuple[tuple[int, int], ...]
    cut: tuple[int, int]
    num_rows: int


class PlacedImages(msgspec.Struct, frozen=True):
    """The images of a prompt of T tokens, and their places in it.

    Attributes:
        rows: int32 `[T]`, which row of all images' together takes a token's place; -1 is none.
        visible_until: int32 `[T]`, the last token that each one sees; None if that is itself.
        places: int32 `[3, T]`, time, height and width by which tokens are rotated; None if that is their position.
        delta: a later token's place is its position plus this.
    """

    images: tuple[SeenImage, ...]
    rows: bytes
    visible_until: bytes | None = None
    places: bytes | None = None
    delta: int = 0


class EngineRequest(msgspec.Struct, kw_only=True):
    """One sequence to generate, or with `pooling` one prompt to read values off; sampling parameters are then unused.

    A front door's streams split a request with n > 1 into n sequences, each a request with a `request_id` of its own.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams = SamplingParams(max_tokens=1)
    arrival_time: float = msgspec.field(default_factory=time.time)
    priority: int = 0
    cache_salt: str | None = None
    pooling: PoolingParams | None = None
    second_text: int = 0
    """The token at which the second of two texts begins, which an encoder tells from the first; 0 if there is one."""
    group: str = ""
    """The group that it belongs to, such as an API key: if several wait or run, each gets alike of the engine."""
    adapters: tuple[AdapterUse, ...] = ()
    """Adapters that are added to the model's weights for this request."""
    scores_from: int = 1
    """The first token of the prompt whose log-probability is wanted, where `prompt_logprobs` asks for any. The tokens
    before it may come from the prefix cache."""
    capture: CaptureParams | None = None
    """Activations that are wanted of it."""
    steering: Steering | None = None
    """Vectors that are added to its residual stream."""
    patching: Patching | None = None
    """Vectors that replace its residual stream, at single layers and tokens."""
    images: PlacedImages | None = None
    hands_on: bool = False
    """Another server goes on with it, and fetches the pages of its prompt from host memory."""
    pages_at: PagesAt | None = None
    """The place where the pages of its prompt may be fetched."""

    @property
    def samples(self) -> bool:
        """It is given tokens; else something is read of its prompt."""
        return self.pooling is None


class CapturedRows(msgspec.Struct):
    """Activations of some tokens of a request: float32, `[activations, positions, E]`."""

    positions: list[int]
    values: bytes


INITIAL_VERSION = "initial"
"""The name of the weights that an engine starts with."""


class TokenDelta(msgspec.Struct, kw_only=True):
    """One turn's addition to one request.

    `text` holds back anything that may still become a stop string or an unfinished character. `logprobs` has one
    entry a new token, each a list of (token id, Logprob) with the chosen token first; those of the whole vocabulary
    travel as `vocabulary`, float32 rows by token id, of which the front door makes `logprobs`. `prompt_logprobs` and
    `num_cached_tokens` arrive with the first delta. The delta with a `finish_reason` is the last, and has the
    `num_preemptions` and the `padding`: the request's share of the padding rows that its steps ran; and how many tokens
    were `num_drafted`, and `num_taken` of those. The last delta of a request that
    failed has the `error`, and is `invalid` if the request itself is to blame. `pooled` are float32 values,
    little-endian, of a request with pooling. `captured` are activations of tokens that were run since the last delta;
    those of a token may come again, and take the place of the earlier ones.
    """

    request_id: str
    token_ids: list[int] = []
    text: str = ""
    logprobs: list[RankedLogprobs] | None = None
    vocabulary: bytes | None = None
    prompt_logprobs: PromptScores | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    invalid: bool = False
    first_scheduled_time: float | None = None
    pooled: bytes | None = None
    captured: list[CapturedRows] = []
    num_preemptions: int = 0
    padding: float = 0.0
    num_drafted: int = 0
    num_taken: int = 0
    weight_version: str = ""
    """The name of the weights that made the tokens."""
    is_dead: bool = False
    """With an `error`: its engine has died, and others go on."""
    had_begun: bool = False
    """With `is_dead`: see `EngineClient.has_begun`."""


STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Steps are counted by how many tokens they ran: up to the first of these, the next …, and beyond the last."""


class EngineStats(msgspec.Struct, kw_only=True):
    """Counters and gauges of the loop since it started; times in seconds."""

    num_running: int = 0
    num_waiting: int = 0
    """For a place in a step."""
    num_preparing: int = 0
    """Waiting for what only they need: a grammar, a rare executable."""
    running_adapters: dict[str, int] = {}
    """Name of an adapter -> sequences in the running batch that use it."""
    waiting_adapters: dict[str, int] = {}
    """The same of those that wait for a place in a step."""
    num_preemptions: int = 0
    num_pages: int = 0
    num_free_pages: int = 0
    """Free pages, those that still hold reusable prefixes included."""
    page_size: int = 0
    prefix_cache_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_cache_hits: int = 0
    """Prompt tokens found there, on the devices or in host memory."""
    offload_queries: int = 0
    """Prompt tokens that were not on the devices and were looked up in host memory, where pages are kept there."""
    offload_hits: int = 0
    """Prompt tokens of those that were found."""
    num_host_pages: int = 0
    """KV pages and states of prefixes kept in host memory."""
    num_disk_pages: int = 0
    """KV pages and states of prefixes kept on disk."""
    resident_bytes: int = 0
    """Memory of the host that the engine's process holds."""
    num_pulls: int = 0
    """Requests whose pages were fetched from another server, or were to be."""
    num_failed_pulls: int = 0
    """Requests of those that did not get all."""
    pull_seconds: float = 0.0
    """Seconds that they waited for them."""
    num_pulled_pages: int = 0
    """KV pages and states that have come from other servers."""
    num_given_pages: int = 0
    """KV pages and states that other servers were sent."""
    num_images_encoded: int = 0
    num_images_found: int = 0
    """Images of requests whose rows were there already."""
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    """Prompt tokens that the prefix cache held."""
    generation_tokens: int = 0
    num_drafts: int = 0
    """The number of times that tokens were tried ahead with a sequence."""
    num_draft_tokens: int = 0
    accepted_by_position: list[int] = []
    """The number of times that the first of them was the model's choice, the first two, and so on."""
    num_steps: int = 0
    steps_by_tokens: list[int] = msgspec.field(default_factory=lambda: [0] * (len(STEP_TOKENS) + 1))
    """See STEP_TOKENS."""
    step_tokens: int = 0
    """Tokens run in all steps, prompts' and generated ones."""
    step_host_seconds: float = 0.0
    """CPU time of the loop's thread: everything but waiting for the device. Unlike wall time it means the same on a CPU
    host, where the device's threads share the cores with the loop."""
    step_device_wait_seconds: float = 0.0
    scheduled_tokens: dict[str, int] = {}
    """Bucket name -> real tokens run in it."""
    padded_tokens: dict[str, int] = {}
    """Bucket name -> padding rows run in it."""
    compiles_foreseen: int = 0
    compiles_unforeseen: int = 0
    compile_seconds: float = 0.0
    compiles_pending: int = 0
    ready: bool = False
    """A covering bucket of each phase is compiled: requests run without waiting for a compile."""


class EngineInfo(msgspec.Struct, kw_only=True):
    """The facts that the engine settled on at its start, for front doors."""

    model_name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: list[int]
    num_pages: int
    page_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_memory: int | None = None
    state_cache_memory: int | None = None
    """With these in its config another engine has as many pages and states, whatever memory is free then."""
    planned_memory: int = 0
    """Bytes of a device for weights, caches and a step's own; on a CPU the program itself comes on top."""
    hidden_size: int = 0
    num_layers: int = 0
    takes_vectors: bool = True
    """A prompt may be vectors: the model makes nothing but these of its tokens."""
    most_image_rows: int = 0
    """The most rows of images that a request may have; 0: the model sees none."""
    num_stages: int = 1
    """Into how many parts its layers are divided, each on devices of its own."""
    kv_heads: tuple[tuple[int, int] | None, ...] = ()
    """For each layer with keys and values of its own: the number of their heads, and a head's size."""
    num_parameters: int = 0
    tasks: ModelTasks = ModelTasks()
    """The tasks that the model is made for besides text, and its classes."""
    default_sampling: SamplingDefaults = SamplingDefaults()
    """The checkpoint's generation_config."""
    max_logprobs: int = MAX_LOGPROBS
    """Most that a request may ask for at a position; -1 for the whole vocabulary."""
    logprobs_mode: LogprobsMode = LOGPROBS_MODES[0]
    """What they are where a request does not say it."""
    platform: str = ""
    """The platform of its devices, as JAX calls it."""
    logits_processors: Declared = msgspec.field(default_factory=dict)
    """The processors that it was given, with the shapes and dtypes of their arguments."""
    transfer: TransferInfo | None = None
    """Its exchange of pages with other servers, if there is one."""

    @property
    def layer_shapes(self) -> LayerShapes:
        """The sizes of what its layers hold of each token."""
        return LayerShapes(self.hidden_size, self.kv_heads)


LookAt = Callable[[What, float], bytes]
"""Looks at a process, see jaxllm.looking. Raises EngineDeadError where it has ended."""


class EngineClient(Protocol):
    """A front door's hold on an engine loop. All methods may be called from any thread."""

    info: EngineInfo

    @property
    def last_turn(self) -> float:
        """When the loop last said what a step gave, on the monotonic clock."""

    def add(self, request: EngineRequest) -> None:
        """Queue a request; never waits. Raises EngineDeadError when the loop has stopped."""

    def abort(self, request_ids: list[str]) -> None:
        """Drop requests and free their pages within a step; never waits. Unknown ids are ignored."""

    def outputs(self, timeout: float) -> list[TokenDelta]:
        """The loop's deltas within `timeout` seconds; may be empty. Raises EngineDeadError when it died."""

    def stats(self) -> EngineStats:
        """The newest statistics."""

    def has_begun(self, request_id: str) -> bool:
        """The loop has computed something of an unfinished sequence, or died when it began to."""

    @property
    def processes(self) -> dict[str, LookAt]:
        """A function that looks at each process of its own, by its number among several; none where the loop is a
        thread.
        """

    def order(self, order: Order) -> None:
        """Have something done between two steps; waits until it is.

        Raises:
            JaxLLMError: why it could not be done; EngineDeadError where the loop has ended.
        """

    def keep_weights(self) -> None:
        """Stop the loop and release the device, leaving the weights for the next engine; blocks until it is done.

        Raises:
            ConfigError: its loop runs in a thread, which does not release its device.
            EngineDeadError: it ended before it had left them.
        """

    def shutdown(self) -> None:
        """Stop the loop and release the device; idempotent."""


def _at_once(nbytes: int | None) -> None:
    """Room is there already."""


@dataclass(frozen=True)
class MemoryRoom:
    """The room that an engine started beside others is given.

    Attributes:
        budget: bytes that it may plan with, of each device or of the host; None: as without others.
        ask: called once with the bytes that it will take, or None where only its devices could tell, before it touches
            those; returns when they are free, and raises what keeps it from starting.
    """

    budget: int | None = None
    ask: Callable[[int | None], None] = _at_once

    @property
    def taken(self) -> MemoryRoom:
        """The same place for another start of the same engine, which need not ask."""
        return replace(self, ask=_at_once)
