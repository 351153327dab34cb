"""Tokens that a step tries ahead, as the core knows them: how many, where they come from, and what came of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxllm.engine.core.device_state import StateShapes
from jaxllm.engine.core.feature import Built, Feature, Fields, Plan, RanModel, Traced, TracedStep
from jaxllm.engine.core.handle import Result
from jaxllm.engine.core.keys import Key, Uses
from jaxllm.engine.core.request import Chunk, Request
from jaxllm.engine.core.sizes import Buckets, StepSizes
from jaxllm.engine.core.slots import Slots
from jaxllm.engine.core.step import StepFunctions
from jaxllm.engine.features.drafts.models import AbstractDraft, ModelDrafter, ModuleDrafter
from jaxllm.engine.features.drafts.ngrams import RECALL_PACKING, Guesses, NgramDrafter, RememberedTexts
from jaxllm.engine.features.drafts.rules import (
    DraftDepth,
    DraftRecord,
    DraftRule,
    ModelDrafts,
    ModuleDrafts,
    NgramDrafts,
)
from jaxllm.engine.features.drafts.verify import Drafter, verify
from jaxllm.engine.messages import EngineRequest, EngineStats, TokenDelta

RECALL = Key("put", 0, frozenset({"recall"}))


@dataclass
class _DraftState:
    record: DraftRecord
    is_shared: bool
    """It shares prefixes with requests of others: it brought no salt."""
    num_drafted: int = 0
    num_taken: int = 0


class DraftsFeature(Feature):
    """A slot has the number of its tokens that a draft model has run (`drafted`), and the model's state of the last
    token (`hidden`) with the number of tokens that it comes after (`hidden_after`; 0 for none, as after a cached
    prefix). Texts that drafts are looked for in are a part of their own: a ring of tokens, each plus one, a 0 after
    each text.
    """

    name = "drafts"
    on = ("decode", "verify", "backbone")
    words = ("verify", "recall")
    always = has_part = reads_history = True
    asked_by = ("samples",)

    def __init__(self, rule: DraftRule, depth: DraftDepth, draft: AbstractDraft | None = None):
        """`rule` says how they are found, `depth` how many are tried; `draft` is a model or module that makes them."""
        self._rule, self._depth = rule, depth
        self._remembered_size = rule.remembered if isinstance(rule, NgramDrafts) else 0
        self._graph: Any = None
        if draft is not None:
            self._graph, state = nnx.split(draft.model)
            leaves, self._tree = jax.tree.flatten(state)
            self._num_leaves = len(leaves)

    def plan(self, buckets: Buckets) -> Plan:
        recalls = [RECALL] if self._remembered_size else []
        return Plan(first=[Key("put", 0, frozenset({"history"})), *recalls])

    def slot(self, sizes: StepSizes) -> dict[str, tuple[tuple[int, ...], Any]]:
        size = self._rule.size if isinstance(self._rule, ModuleDrafts) else 0
        return {"drafted": ((), jnp.int32), "hidden": ((size,), jnp.float32), "hidden_after": ((), jnp.int32)}

    def part(self, state: StateShapes) -> Any:
        return {"remembered": state.ints(self._remembered_size)}

    def uses(self, key: Key, uses: Uses) -> Uses:
        return super().uses(key, uses) if key.kind in ("put", "verify") else uses

    def begun(self, own: dict[str, jax.Array], slot: jax.Array, position: jax.Array) -> dict[str, jax.Array]:
        return own | {
            "drafted": own["drafted"].at[slot].set(position),
            "hidden_after": own["hidden_after"].at[slot].set(0),
        }

    def build(self, key: Key, maker: StepFunctions) -> Built:
        """`(parts, ints) -> (remembered,)`: a part of a text, laid out by RECALL_PACKING, replaces the oldest; or
        `(parts, ints) -> (caches, slots, Sampled)`: a token for each row, and right drafts.
        """
        verifies = key.kind == "verify"
        packing = maker.features.packing(key, maker.sizes) if verifies else RECALL_PACKING

        def recall(parts: dict[str, Any], ints: Any) -> tuple[Any, ...]:
            ring, x = parts[self.name]["remembered"], packing.unpack(ints)
            at, size = jnp.arange(x["tokens"].shape[0]), ring.shape[0]
            places = jnp.where(at < x["count"], (x["place"] + at) % size, size)
            return ({"remembered": ring.at[places].set(x["tokens"], mode="drop")},)

        def step(parts: dict[str, Any], ints: jax.Array) -> Any:
            seen = TracedStep(key.kind, key.variant, maker.sizes, packing.unpack(ints), parts, maker)
            drafter, hands = self.drafter(seen, key.size), maker.hands(seen)
            return verify(lambda: maker.model(parts, hands), seen, drafter=drafter, hands=hands)

        return Built(step if verifies else recall, [maker.state.ints(packing.size)])

    def drafter(self, step: TracedStep, rows: int) -> Drafter:
        rule, count = self._rule.with_rows(rows), len(step.sizes.caches)
        parts, maker = dict(step.parts), step.maker

        model = partial(maker.model, parts)

        def drafting() -> Any:
            return nnx.merge(self._graph, jax.tree.unflatten(self._tree, maker.further(parts)[: self._num_leaves]))

        if isinstance(rule, ModuleDrafts):
            return ModuleDrafter(drafting, model, rule.num_tokens, count, step.sizes.page_size, rule.layers)
        if isinstance(rule, ModelDrafts):
            return ModelDrafter(drafting, rule.num_tokens, count, step.sizes.vocab_size, step.sizes.page_size)
        assert isinstance(rule, NgramDrafts)
        texts = step.parts[self.name]["remembered"] if self.name in step.parts else jnp.zeros(0, jnp.int32)
        return NgramDrafter(rule.num_tokens, rule, texts)

    def traced(self, step: TracedStep) -> Traced:
        return _Following(self.drafter(step, 1), step.kind)

    def attach(self) -> None:
        self._remembered = RememberedTexts(self._remembered_size)
        self._guesses = Guesses(self._rule, self._remembered, self.around)
        self._num_drafts = self._num_draft_tokens = 0
        self._accepted = [0] * self._depth.most

    def prepare(self, request: Request, asked: EngineRequest) -> _DraftState:
        return _DraftState(DraftRecord(self._depth.most), asked.cache_salt is None)

    def seat(self, request: Request, extra: _DraftState) -> None:
        if not request.num_preemptions:
            self._recall(extra, request.params.predicted_token_ids)

    def ended(self, request: Request, extra: _DraftState, delta: TokenDelta) -> None:
        """Drafts of later requests may come from the answer of this one, where those are looked through."""
        delta.num_drafted, delta.num_taken = extra.num_drafted, extra.num_taken
        if isinstance(self._rule, NgramDrafts) and self._rule.remembers_answers:
            self._recall(extra, request.token_ids[request.num_prompt :])

    def _recall(self, extra: _DraftState, text: Sequence[int]) -> None:
        """Remember a text, unless its request keeps its prefixes to itself: right drafts can be seen in a clock."""
        if extra.is_shared:
            for ints in self._remembered.add(text):
                self.around.device.run(RECALL, ints)

    def ahead(self, requests: Sequence[Request], running: int) -> int:
        most = self._depth.with_running(running)
        wanted = most and any(r.extras[self.name].record.depth(most) for r in requests if self.name in r.extras)
        return most if wanted else 0

    def depth(self, request: Request, extra: _DraftState, most: int) -> int:
        return extra.record.depth(most)

    def scheduled(self, chunk: Chunk, extra: _DraftState, further: int, tries: bool) -> None:
        if not further and chunk.num_sampled:
            extra.record.passed()

    def settled(self, request: Request, extra: _DraftState, result: Result) -> None:
        taken = len(result.tokens) - 1
        if result.num_drafted or self.around.core.features.course(request) is None:
            extra.record.settle(taken)
        self._num_drafts += result.num_drafted > 0
        self._num_draft_tokens += result.num_drafted
        extra.num_drafted += result.num_drafted
        if result.num_drafted:
            extra.num_taken += taken
            for place in range(taken):
                self._accepted[place] += 1

    def fill_ahead(self, requests: Sequence[Request], x: Fields) -> None:
        self._guesses.fill(requests, x)

    def stats(self, stats: EngineStats, running: Iterable[Request], waiting: Iterable[Request]) -> None:
        stats.num_drafts, stats.num_draft_tokens = self._num_drafts, self._num_draft_tokens
        stats.accepted_by_position = list(self._accepted)


class _Following(Traced):
    def __init__(self, drafter: Drafter, kind: str):
        self._drafter = drafter
        self.reads = drafter.reads if kind == "backbone" or drafter.follows_decodes else None

    def ran(self, ran: RanModel, caches: Any, before: Slots, slots: Slots) -> tuple[Any, Slots]:
        found: tuple[Any, Slots] = self._drafter.follow(ran, caches, before, slots)
        return found
