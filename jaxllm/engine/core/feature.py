"""The seam: what one ability of the engine may say, and when the core asks.

The core knows requests, pages, slots, steps and tokens. Everything else is a `Feature`, which says in one place what a
request brings for it, what its slot is told, what a step is sent, what is traced into it, and what is made of what the
step gives. Features meet only through the core. Only hooks that a feature overrides are called (those that describe its
steps apart), and after `prepare` only for its own requests.

The hooks in the order of a request's way, with the modules that call them:

    prepare, salt, needs, job         it is added (loop.py, runner.py): what it brings, and what must be ready for it
    fits, first_read, keys, extend    it may begin (scheduler.py, pages.py): how much of its prefix is known
    place                             it has its slot and its pages (scheduler.py)
    ahead, depth, cut, scheduled      its tokens are chosen (scheduler.py), in each step
    before_step, seat, pack           the step is dispatched (runner.py): its slot is told, its fields are filled
    read                              a backbone is enqueued: more work on its hidden states (runner.py)
    settled, said, follow, registered the step is read (loop.py, results.py), while the next one runs
    fill                              late fields of the next step are filled, which is sampled after that (runner.py)
    hurried                           its caller wants what a feature bounds of it to end (loop.py)
    ended, forget, release            it has all its tokens; it is over; it runs no longer, also if preempted

`plan`, `slot`, `part`, `uses`, `build`, `fields`, `sent` and `traced` describe the steps that the engine compiles with
the feature (executables.py, step.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, runtime_checkable

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from jaxllm.engine.core.keys import Key, Kind, Uses, Variant
from jaxllm.models.layers.hands import Hand
from jaxllm.pallas_kernels import StepMetadata

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from jaxllm.engine.core.device import Device
    from jaxllm.engine.core.device_state import StateShapes
    from jaxllm.engine.core.handle import Result, SampledRow
    from jaxllm.engine.core.jobs import Jobs
    from jaxllm.engine.core.loop import EngineCore
    from jaxllm.engine.core.pages import FoundPrefix, PagePool, PrefixNode
    from jaxllm.engine.core.request import Chunk, Request
    from jaxllm.engine.core.sampler import SamplingRows
    from jaxllm.engine.core.sizes import Buckets, StepSizes
    from jaxllm.engine.core.slots import Slots
    from jaxllm.engine.core.step import StepFunctions
    from jaxllm.engine.messages import EngineRequest, EngineStats, TokenDelta

Fields = dict[str, Any]
"""A step's input, unpacked; see packing.py."""
EVERYTHING = 2**30
"""More tokens than any context has."""


class Plan(NamedTuple):
    """Executables compiled ahead: no request can run without the `first`, and some not without those of `soon`."""

    first: Sequence[Key] = ()
    soon: Sequence[Key] = ()
    late: Sequence[Key] = ()


class Errand(NamedTuple):
    """What a request waits for before it is scheduled."""

    run: Callable[[], None]
    """Called on a thread; what it raises ends the request, and no other."""
    jobs: Jobs | None = None
    """Whose threads run it, if not the core's own."""


class Ran(NamedTuple):
    """A backbone that has been enqueued: its chunks, each of which begins at a row, and the rows that sample."""

    chunks: Sequence[tuple[Chunk, int]]
    sampled: Sequence[SampledRow]
    found: Mapping[str, Any]
    """What the step gives besides, by feature."""


class Reading(NamedTuple):
    """Values under way to the host, and what becomes of them once they are there."""

    arrays: Any
    deliver: Callable[[], Iterable[TokenDelta]]
    """Returns deltas of requests that end with this; requests that have ended meanwhile have none."""


@dataclass
class TracedStep:
    """One step as features see it while it is traced."""

    kind: Kind
    variant: Variant
    sizes: StepSizes
    x: Fields
    """What the host sent: the core's fields, and those of each feature."""
    parts: Mapping[str, Any]
    """What the step takes of what lives on the devices."""
    maker: StepFunctions
    """What the step's functions are built by."""
    sent: Sequence[jax.Array] = ()
    """What else the host sent, as `Feature.sent` says, of one feature at most."""


class Traced:
    """A feature's hands inside one step. A step that does not have the feature never calls it."""

    of_sampler = False
    """Drafts are chosen with it too."""

    def model(self, model: Any, parameters: Any) -> Any:
        """The model that runs, in place of `model`, which was made of `parameters`."""
        return model

    reads: tuple[int, ...] | None = None
    """In front of which layers it reads the model's states: () is the last hidden states, None is none at all."""

    def metadata(self, meta: StepMetadata, slots: Slots) -> StepMetadata:
        """The metadata that layers get of the step."""
        return meta

    def ran(self, ran: RanModel, caches: Any, before: Slots, slots: Slots) -> tuple[Any, Slots]:
        """Caches and slots after the model has run; `slots` are as the step leaves them, and were `before`."""
        return caches, slots

    def hand(self, meta: StepMetadata) -> Hand | None:
        """Its hand between layers."""
        return None

    def logits(self, logits: jax.Array, rows: SamplingRows, slots: Slots, x: Fields) -> jax.Array:
        """`[R, V]`, the whole vocabulary, before temperature and truncation; `x` has the fields of the head or decode.

        It is given the logits of the features before it.
        """
        return logits

    def out(self) -> Any:
        """Results for the host besides the tokens; None for nothing."""
        return None


class RanModel(NamedTuple):
    """What a step has run: its tokens, what the feature reads of the model at them, and where they are."""

    tokens: Int[Array, "T"]
    read: Float[Array, "T n"]
    meta: StepMetadata


@dataclass
class Surroundings:
    """The parts of an engine that a feature's host half works with."""

    device: Device
    sizes: StepSizes
    pool: PagePool
    tokenizer: Tokenizer | None
    eos_token_ids: Sequence[int]
    core: EngineCore = field(init=False)
    """A weak reference to the core, which is there once requests come."""


class Built(NamedTuple):
    """A step function, and the abstract arguments that the host sends."""

    step: Callable[..., tuple[Any, ...]]
    """`(parts, *sent)`, where `parts` live on the devices; returns those that it changed, then its output."""
    sent: Sequence[Any] = ()
    output: Any = None
    """How its output lies on the mesh; None: every device has all of it."""


class Feature:
    """Everything that one ability of the engine needs. Each method has a default that does nothing.

    An instance is made with an engine's plan. `attached` gives one of its own to each core, which has the host half.
    """

    name: str
    """Its part of `request.extras`, of the slots, of a step's fields and outputs, and its word in a variant."""
    asked_by: tuple[str, ...] = ()
    """Fields of an EngineRequest or of its sampling parameters; only requests that set one concern it. None: all do."""
    on: tuple[Kind, ...] = ()
    """Kinds of steps that may be compiled with it."""
    rare = False
    """Such steps are compiled, and its part of the device's state is made, when a request first asks for it: for what
    costs much where it is compiled in. What costs little is `in_sampler`, and skipped at run time."""
    rooms: tuple[int, ...] = ()
    """How much of it a step may have room for, where it is not all or nothing."""
    samples = False
    """It has a say in what is sampled: its steps are "sampled" too."""
    in_sampler = False
    """It is in every "sampled" step, without a word of its own, and skipped at run time if no row uses it."""
    late = False
    """What it fills in depends on the tokens of the step before: such a step goes in two halves."""
    after_first: Mapping[str, int] = {}
    """Values of its fields in a decode of several tokens, for the tokens after the first."""
    reads_history = False
    """It needs the whole text of its requests in their slots."""
    is_saved = True
    """Another start finds steps with it under the same name."""
    has_part = False
    """Its state on the devices is a part of its own, which only steps that have it take; else it is in the slots."""
    words: tuple[str, ...] = ()
    """What it calls its own steps, where they are not called by its name, and kinds of steps that it builds."""
    gives = False
    """Its steps give something besides tokens."""
    always = False
    """It has a hand in every step of its kinds, without a word for it."""
    bit = 0
    """The bit of a slot's `uses` that is set if its request uses the feature."""
    around: Surroundings
    """What its host half works with, once it is attached to a core."""

    def plan(self, buckets: Buckets) -> Plan:
        """Executables that are compiled ahead besides those that every engine has."""
        return Plan()

    def slot(self, sizes: StepSizes) -> dict[str, tuple[tuple[int, ...], Any]]:
        """What each slot keeps on the device: shapes and dtypes of a row. What the default `build` puts has an axis."""
        return {}

    def part(self, state: StateShapes) -> Any:
        """Its own part of what lives on the devices, abstract; see `has_part`."""

    def uses(self, key: Key, uses: Uses) -> Uses:
        """What a step that has it, or that it builds, has to do with what lives on the devices."""
        if not self.has_part:
            return uses
        if key.kind == "put":
            return Uses((self.name,), (self.name,), output=False)
        return uses._replace(takes=(uses.takes[0], self.name, *uses.takes[1:]))

    def build(self, key: Key, maker: StepFunctions) -> Built:
        """A "put", "read", "copy_out" or "copy_in" with its name: by default what puts a row into its state."""
        rows, tree = jax.tree.flatten(maker.own_state(self))

        def step(parts: dict[str, Any], slot: jax.Array, *values: jax.Array) -> tuple[Any, ...]:
            own = parts[self.name] if self.rare else parts["slots"].of[self.name]
            put = [old.at[slot[0]].set(value) for old, value in zip(jax.tree.leaves(own), values, strict=True)]
            changed = jax.tree.unflatten(tree, put)
            if self.rare:
                return (changed,)
            return (parts["slots"]._replace(of=parts["slots"].of | {self.name: changed}),)

        return Built(step, [maker.state.ints(1), *(maker.state.row_of(array) for array in rows)])

    def begun(self, own: dict[str, jax.Array], slot: jax.Array, position: jax.Array) -> dict[str, jax.Array]:
        """Traced: its rows of the slots when a request takes `slot` and goes on from `position`."""
        return own

    def attached(self, around: Surroundings) -> Self:
        """The feature of one core."""
        found = copy.copy(self)
        found.around = around
        found.attach()
        return found

    def attach(self) -> None:
        """Get ready for the requests of one core."""

    def prepare(self, request: Request, asked: EngineRequest) -> Any:
        """What a request brings for it, checked; None if it is not used after all. Raises InvalidRequestError."""

    def needs(self, request: Request, extra: Any) -> Iterable[Key]:
        """Executables of its own, "put", "read" and the like, that this request needs and not every request does."""
        return ()

    def amount(self, extra: Any) -> int:
        """The most of it that a step may need for this request."""
        return 1

    def job(self, request: Request, extra: Any) -> Errand | None:
        """What has to be made ready for it before it is scheduled."""

    def salt(self, extra: Any) -> Any:
        """Requests share cached prefixes only with those that have the same; None changes nothing."""

    def keys(self, request: Request, extra: Any, start: int, stop: int) -> list[int]:
        """The numbers that stand for its tokens from `start` to `stop` where prefixes are compared; of one feature."""
        return request.token_ids[start:stop]

    def first_read(self, request: Request, extra: Any) -> int:
        """The first token whose hidden state it needs: only those before it may come from the prefix cache."""
        return EVERYTHING

    def fits(self, request: Request, extra: Any) -> bool:
        """The request can begin now."""
        return True

    def extend(self, request: Request, extra: Any, found: FoundPrefix) -> bool:
        """Shorten or lengthen what was `found` of its prefix; False where it had better wait for a step under way."""
        return True

    def place(self, request: Request, extra: Any, found: FoundPrefix) -> None:
        """The request begins with the prefix that was `found`: it has its slot and its pages."""

    def release(self, request: Request, extra: Any) -> None:
        """It runs no longer: preempted or finished."""

    def ended(self, request: Request, extra: Any, delta: TokenDelta) -> None:
        """It has all its tokens; `delta` is the last that its caller is told. It holds its pages unless it was
        preempted.
        """

    def hurried(self, request: Request, extra: Any) -> None:
        """What it bounds of the request is to end now, as its caller says."""

    def forget(self, request: Request, extra: Any) -> None:
        """It is over, in whatever way."""

    def begin_step(self) -> None:
        """A step is about to be scheduled."""

    def ahead(self, requests: Sequence[Request], running: int) -> int:
        """The number of tokens that a step may try ahead with each of these requests, with `running` in all."""
        return 0

    def depth(self, request: Request, extra: Any, most: int) -> int:
        """The number of tokens to try ahead with this request, `most` at most."""
        return 0

    def cut(self, request: Request, extra: Any, start: int, length: int, most: int) -> int:
        """The number of tokens from `start` on that a chunk had better have: `length` at most, which is its group's
        share of the step, or up to `most` if these cannot be parted. 0: the request waits for the next step.
        """
        return length

    def scheduled(self, chunk: Chunk, extra: Any, further: int, tries: bool) -> None:
        """A chunk of a request that uses it is in the step; `further` tokens are run after it, or tried."""

    def registered(self, request: Request, extra: Any) -> None:
        """One more page of the request is full, and can be found by its prefix: `num_registered` of them."""

    def settled(self, request: Request, extra: Any, result: Result) -> None:
        """A step that tried tokens ahead with the request has been read."""

    @property
    def has_idle_work(self) -> bool:
        """There is something to do while no request waits for anything."""
        return False

    def idle(self) -> None:
        """Do some of it: one step's time at most, as a request may come."""

    def turned(self) -> None:
        """A turn of the loop is over."""

    def reset(self, root: PrefixNode) -> None:
        """Requests that come from now on share no prefix with earlier ones: theirs begin at `root`."""

    def check(self) -> None:
        """No request is left. Raises AssertionError: the feature still holds something."""

    def close(self) -> None:
        """End what it has started. Any thread may call this."""

    def stats(self, stats: EngineStats, running: Iterable[Request], waiting: Iterable[Request]) -> None:
        """Fill in what it counts."""

    def needed(self, chunks: Sequence[Chunk]) -> int:
        """The room for it that a step of these chunks needs, some of which use it; asked if it has `rooms`."""
        return 1

    def apart(self, request: Request, extra: Any, tokens: range) -> bool:
        """These tokens need a backbone by itself: more is done with them than choosing the next token."""
        return False

    def certain(self, request: Request, extra: Any) -> int:
        """The number of tokens that may still be sampled before it must see them. A `course` says the same of each
        token.
        """
        return EVERYTHING

    def course(self, request: Request, extra: Any) -> Course | None:
        """The text that the request's tokens must follow, as a grammar lets them; None if it goes by no text."""

    def fill_courses(self, courses: Sequence[Course | None], mask: np.ndarray) -> None:
        """Set row i of `mask` [R, V/32] to the tokens that may follow at the place i; None allows all."""

    def before_step(self) -> None:
        """A step is about to be dispatched: what has to reach the devices before slots are told anything."""

    def seat(self, request: Request, extra: Any) -> None:
        """The request has taken its slot: tell the device."""

    def fill_ahead(self, requests: Sequence[Request], x: Fields) -> None:
        """Choose the tokens to try ahead with requests that have a `course`, and the masks of each place, which another
        feature's `fill_courses` fills."""

    def fields(self, key: Key, sizes: StepSizes) -> dict[str, tuple[int, ...]]:
        """Further int32 fields of a step that has it. A head gets none of `pack`: what each row needs there is in
        `slot`.
        """
        return {}

    def sent(self, key: Key, state: StateShapes) -> tuple[Any, ...]:
        """Inputs of a backbone that has it which are no int32, abstract."""
        return ()

    def padding(self, key: Key, x: Fields) -> None:
        """Fill its fields for a step that concerns none of its requests."""

    def pack(self, key: Key, x: Fields, chunks: Sequence[Chunk]) -> tuple[np.ndarray, ...]:
        """Fill its fields, where the tokens of `chunks` follow one another; returns what `sent` describes."""
        return ()

    def fill(self, requests: Sequence[Request], x: Fields) -> None:
        """Fill in late fields of the rows of a head, now that the step before has been read; row i is of request i."""

    def read(self, ran: Ran) -> Iterable[Reading]:
        """Device work on the hidden states that a backbone leaves, before others overwrite them."""
        return ()

    def follow(self, request: Request, extra: Any, delta: TokenDelta) -> Followed:
        """A step gave the request the tokens in `delta`."""
        return Followed()

    def said(self, request: Request, extra: Any, delta: TokenDelta) -> None:
        """`delta` has what a step gave the request, without what must follow: add to what its caller is told."""

    def traced(self, step: TracedStep) -> Traced:
        """What it does to the step that is being traced."""
        return Traced()


@runtime_checkable
class Course(Protocol):
    """A text that tokens must follow, at one of its places."""

    def forced(self) -> list[int]:
        """Tokens that must come next: there is no choice."""

    def after(self, token: int) -> Course | None:
        """The place that `token` would lead to, while this one stays; None where it cannot, or nothing can follow."""


class Followed(NamedTuple):
    """Tokens that must follow those that a request was given, unsampled; if it is `complete`, nothing can."""

    forced: Sequence[int] = ()
    complete: bool = False
