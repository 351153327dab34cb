"""The seam: what one ability of the engine may say, and when the core asks.

The core knows requests, pages, slots, steps and tokens. Everything else is a `Feature`, which says in one place what a
request brings for it, what its slot is told, what a step is sent, what is traced into it, and what is made of what the
step gives. Features meet only through the core, and a request that uses none pays for none.

A request's way past them, in order:

    prepare   the request is added: what it brings, checked; or None, and the feature is asked nothing more of it
    job       what has to be made ready for it on a thread, before it is scheduled
    fits      whether it can begin now
    extend    what is known of its prefix
    place     it begins: it has its slot and its pages
    seat      what its slot is told goes to the device before its first step
    pack      it has tokens in a step that is compiled with the feature: what that is sent
    traced    what the feature does inside that step
    read      after a backbone: further device work on its hidden states
    follow    a step gave it tokens
    said      its caller is told of these
    release   it stops running: preempted or finished
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
    """Returns deltas of requests that end with this."""


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
        """What layers are told of the step."""
        return meta

    def ran(self, ran: RanModel, caches: Any, before: Slots, slots: Slots) -> tuple[Any, Slots]:
        """Caches and slots after the model has run; `slots` are as the step leaves them, and were `before`."""
        return caches, slots

    def hand(self, meta: StepMetadata) -> Hand | None:
        """What it does between layers."""
        return None

    def logits(self, logits: jax.Array, rows: SamplingRows, slots: Slots, x: Fields) -> jax.Array:
        """[R, V], before a token is chosen; `x` has what the host sent of each row."""
        return logits

    def out(self) -> Any:
        """What the host gets besides the tokens; None for nothing."""
        return None


class RanModel(NamedTuple):
    """What a step has run: its tokens, what the feature reads of the model at them, and where they are."""

    tokens: Int[Array, "T"]
    read: Float[Array, "T n"]
    meta: StepMetadata


@dataclass
class Surroundings:
    """What a feature's host half works with."""

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
    """Such steps are compiled, and its part of the device's state is made, when a request first asks for it."""
    rooms: tuple[int, ...] = ()
    """How much of it a step may have room for, where it is not all or nothing."""
    samples = False
    """It has a say in what is sampled: its steps are "sampled" too."""
    in_sampler = False
    """It is part of everything that "sampled" means, and no word of its own."""
    late = False
    """What it fills in depends on the tokens of the step before: such a step goes in two halves."""
    reads_history = False
    """It needs the whole text of its requests in their slots."""
    is_saved = True
    """Whether another start finds steps with it under the same name."""
    has_part = False
    """Its state on the devices is a part of its own, which only steps that have it take; else it is in the slots."""
    words: tuple[str, ...] = ()
    """What it calls its own steps, where they are not called by its name, and kinds of steps that it builds."""
    gives = False
    """Its steps give something besides tokens."""
    always = False
    """It has a hand in every step of its kinds, without a word for it."""
    bit = 0
    """What a slot's `uses` has set where its request uses the feature."""
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

    def first_read(self, request: Request, extra: Any) -> int:
        """The first token whose hidden state it needs: only those before it may come from the prefix cache."""
        return EVERYTHING

    def fits(self, request: Request, extra: Any) -> bool:
        """Whether the request can begin now."""
        return True

    def extend(self, request: Request, extra: Any, found: FoundPrefix) -> bool:
        """Shorten or lengthen what was `found` of its prefix; False where it had better wait for a step under way."""
        return True

    def place(self, request: Request, extra: Any, found: FoundPrefix) -> None:
        """The request begins with the prefix that was `found`: it has its slot and its pages."""

    def release(self, request: Request, extra: Any) -> None:
        """It runs no longer: preempted or finished."""

    def ended(self, request: Request, extra: Any, delta: TokenDelta) -> None:
        """It has all its tokens, and still holds its pages; `delta` is the last that its caller is told."""

    def forget(self, request: Request, extra: Any) -> None:
        """It is over, in whatever way."""

    def begin_step(self) -> None:
        """A step is about to be scheduled."""

    def ahead(self, requests: Sequence[Request], running: int) -> int:
        """How many tokens a step may try ahead with each of these requests, with so many running in all."""
        return 0

    def depth(self, request: Request, extra: Any, most: int) -> int:
        """How many of `most` tokens to try ahead with this request."""
        return 0

    def cut(self, request: Request, extra: Any, start: int, length: int) -> int:
        """How many of `length` tokens from `start` on a chunk had better have."""
        return length

    def scheduled(self, chunk: Chunk, extra: Any, further: int, tries: bool) -> None:
        """A chunk of a request that uses it is in the step; `further` tokens are run after it, or tried."""

    def registered(self, request: Request, extra: Any) -> None:
        """One more page of the request is full, and can be found by its prefix: `num_registered` of them."""

    def settled(self, request: Request, extra: Any, result: Result) -> None:
        """A step that tried tokens ahead with the request has been read."""

    @property
    def has_idle_work(self) -> bool:
        """Whether there is something to do while no request waits for anything."""
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
        """How much of it a step of these chunks needs, some of which use it; asked where it has `rooms`."""
        return 1

    def apart(self, request: Request, extra: Any, tokens: range) -> bool:
        """Whether these tokens need a backbone by itself: more is done with them than choosing the next token."""
        return False

    def certain(self, request: Request, extra: Any) -> int:
        """How many tokens more may be sampled before it must see them."""
        return EVERYTHING

    def course(self, request: Request, extra: Any) -> Course | None:
        """What the tokens that it fills in late follow; None where it goes by no text."""

    def fill_courses(self, courses: Sequence[Course | None], mask: np.ndarray) -> None:
        """Set row i of `mask` [R, V/32] to the tokens that may follow at the place i; None allows all."""

    def before_step(self) -> None:
        """A step is about to be dispatched: what has to reach the devices before slots are told anything."""

    def seat(self, request: Request, extra: Any) -> None:
        """The request has taken its slot: tell the device."""

    def fill_ahead(self, requests: Sequence[Request], x: Fields) -> None:
        """Choose what is tried ahead with requests whose text has a course, and fill in what is late of it."""

    def fields(self, key: Key, sizes: StepSizes) -> dict[str, tuple[int, ...]]:
        """What a step that has it is sent besides, as int32."""
        return {}

    def sent(self, key: Key, state: StateShapes) -> tuple[Any, ...]:
        """What it is sent besides that is no int32, abstract."""
        return ()

    def padding(self, key: Key, x: Fields) -> None:
        """Fill its fields for a step that concerns none of its requests."""

    def pack(self, key: Key, x: Fields, chunks: Sequence[Chunk]) -> tuple[np.ndarray, ...]:
        """Fill its fields, where the tokens of `chunks` follow one another; returns what `sent` describes."""
        return ()

    def fill(self, requests: Sequence[Request], x: Fields) -> None:
        """Fill in what is late; row i is of request i."""

    def read(self, ran: Ran) -> Iterable[Reading]:
        """Device work on the hidden states that a backbone leaves, before others overwrite them."""
        return ()

    def follow(self, request: Request, extra: Any, delta: TokenDelta) -> Followed:
        """A step gave the request the tokens in `delta`."""
        return Followed()

    def said(self, request: Request, extra: Any, delta: TokenDelta) -> None:
        """`delta` is what its caller is told: add to it."""

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
