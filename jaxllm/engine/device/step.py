"""The functions that are compiled: everything a step does on the device.

A decode-only step is one of them, `decode`. A step with prefill in it is `backbone`, which leaves the hidden states in
a buffer of fixed size, and then `head` for the rows that sample; so there are as many shapes as decode, prefill and
head buckets together, not their product. Decode and head come in variants; a mask, which a grammar fills, is an input
of the head, or of a `verify` that tries drafts.

Where a model is parted into stages, those before the last have `decode_layers` and `backbone_layers`, which hand the
hidden states on; what a stage is handed is the last thing that such a step is sent.

Every one of them returns a tuple: what it changed of the device's own, as `Key.uses` says, then its output, if any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from jaxllm.engine.device.batch import Fields, decode_batch, mixed_batch, whole_texts
from jaxllm.engine.device.choice import choose
from jaxllm.engine.device.device_state import StateShapes, state_specs
from jaxllm.engine.device.drafts.draft_model import AbstractDraft
from jaxllm.engine.device.drafts.drafter import Drafter, Ran
from jaxllm.engine.device.drafts.source import DraftSource
from jaxllm.engine.device.drafts.verify import verify
from jaxllm.engine.device.forward import forward, forward_read
from jaxllm.engine.device.keys import PLAIN, USES, Key, Kind, Variant
from jaxllm.engine.device.packing import (
    SETTING_FLOATS,
    Packing,
    admit_packing,
    backbone_packing,
    decode_packing,
    encode_packing,
    head_packing,
    logits_packing,
    pool_packing,
    recall_packing,
    score_packing,
    verify_packing,
)
from jaxllm.engine.device.processing import ProcessLogits, Processors
from jaxllm.engine.device.sampler import token_logprobs
from jaxllm.engine.device.sizes import StepSizes
from jaxllm.engine.device.slots import Slots, adjust, admit, recall, remember, took
from jaxllm.engine.device.step_weights import StepWeights, WeightPacking, with_parts
from jaxllm.engine.masks import mask_words
from jaxllm.engine.orders import NewWeights
from jaxllm.engine.settings import Adjustments
from jaxllm.models.abstract import AdaptedModel
from jaxllm.models.decoder import Decoder
from jaxllm.models.encoder import Encoder
from jaxllm.models.layers.patching import StepPatches, patching
from jaxllm.models.layers.steering import Steered
from jaxllm.models.layers.taps import Recorder, recording
from jaxllm.requests.pooling import MAX_TOKEN_IDS
from jaxllm.weights.loader import ParamSpec, Value

_AFTER_FIRST = {"tokens": -1, "new_page": 0, "state_read": 0}
"""What a decode of several tokens is told for those after the first: each is in the history, in a page that is known,
and goes on from the state in its slot."""

GRAPHED = ("gpu", "cuda")
"""Platforms where a step is one CUDA graph, whose arguments cost little."""


class StepFunctions:
    """Builds the jitted step functions of one model on one mesh, with the abstract arguments to compile them for."""

    def __init__(
        self,
        model: Decoder | Encoder,
        specs: Sequence[ParamSpec],
        mesh: Mesh | AbstractMesh,
        sizes: StepSizes,
        adapted: AdaptedModel | None = None,
        draft: AbstractDraft | None = None,
        processors: Processors | None = None,
    ):
        """`model` is abstract (see `abstract_model`); `specs` are its parameters in `nnx.split` order.

        `adapted` is the same model with tables of adapters. A `draft` model's parameters come behind the model's.
        """
        self._adapted = adapted
        self.processors = processors or Processors()
        self._graph, state = nnx.split(model)
        leaves, self._treedef = jax.tree.flatten(state)
        self._num_leaves = len(leaves)
        self._drafts = DraftSource(sizes, draft)
        specs = specs if draft is None else [*specs, *draft.params]
        self._mesh = mesh
        self._sizes = sizes
        # The C++ kernels give float32, which a decode does not round on its way to the head, and so nobody does. An
        # encoder's are not rounded either: they may be vectors already.
        hidden_dtype = jnp.float32 if model.kernels.native or not sizes.num_slots else sizes.dtype
        tables = adapted.tables if adapted is not None else ()
        self.state = StateShapes(mesh, sizes, hidden_dtype, tables, self.processors.width)
        self._packing = WeightPacking(specs, joins=self.platform not in GRAPHED)
        self._weights = self._packing.abstract(mesh)
        self._weight_specs = tuple(a.sharding.spec for a in self._weights)

    @property
    def platform(self) -> str:
        """Of the devices that steps are compiled for: this host's, or others that are only described."""
        if isinstance(self._mesh, AbstractMesh):
            return self._mesh.abstract_device.platform
        return self._mesh.devices.flat[0].platform

    @property
    def packed_weights(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and shardings of what `pack_weights` makes."""
        return self._weights

    def pack_weights(self, parameters: Sequence[Value]) -> tuple[jax.Array, ...]:
        """The model's parameters as every step takes them."""
        assert isinstance(self._mesh, Mesh), "only devices that are there hold weights"
        return self._packing.pack(parameters, self._mesh)

    def replace_weights(self, weights: list[jax.Array], changed: NewWeights) -> tuple[jax.Array, ...]:
        """`weights` with other numbers in some of the model's arrays, by their places in `unpack_weights`."""
        assert isinstance(self._mesh, Mesh), "only devices that are there hold weights"
        return self._packing.replace(weights, changed, self._mesh)

    def unpack_weights(self, weights: Sequence[jax.Array]) -> list[jax.Array]:
        """Every array of the model's parameters, of what `pack_weights` made; those of a draft model are left out."""
        return self._packing.unpack(weights)[: self._num_leaves]

    def step(self, key: Key) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The jitted function that a key names, and the abstract arguments to compile it for; nothing is traced yet."""
        varied: dict[str, Callable[..., Any]] = {
            "decode": self.decode,
            "verify": self.verify,
            "backbone": self.backbone,
            "head": self.head,
        }
        if key.kind in varied:
            return varied[key.kind](key.size, key.variant)
        sized: dict[str, Callable[..., Any]] = {
            "score": self.score,
            "score_given": self.score_given,
            "score_all": self.score_all,
            "token_logits": self.token_logits,
            "unembed": self.unembed,
            "encode": self.encode,
            "read_pages": self.read_pages,
            "write_pages": self.write_pages,
            "decode_layers": self.decode_layers,
            "backbone_layers": self.backbone_layers,
            "took": self.took,
        }
        unsized: dict[str, Callable[..., Any]] = {
            "pool": self.pool,
            "admit": self.admit,
            "adjust": self.adjust,
            "remember": self.remember,
            "recall": self.recall,
            "adapt": self.adapt,
            "steer": partial(self.put_row, "steer"),
            "process": partial(self.put_row, "process"),
        }
        return sized[key.kind](key.size) if key.kind in sized else unsized[key.kind]()

    def decode(self, rows: int, variant: Variant) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """`(weights, caches, slots, ints) -> (caches, slots, Sampled)`: up to `decode_steps` tokens for each of `rows`.

        What is sampled has `decode_steps` rows for each sequence in turn, of which the first `num_steps` are filled.
        """
        packing = decode_packing(rows, self._sizes.has_states)
        page_size, most = self._sizes.page_size, self._sizes.decode_steps

        def one(weights: Any, caches: Any, slots: Slots, x: Fields, *handed: jax.Array) -> Any:
            model, drafter, before = self._model(weights), self._drafter(weights), slots
            tokens, meta, slots = decode_batch(x, slots, page_size, variant.adapted)
            reads = drafter.reads if drafter is not None else ()
            hidden, states, caches = forward_read(model, tokens, caches, meta, reads, handed)
            if drafter is not None and drafter.follows_decodes:
                caches, slots = drafter.follow(Ran(tokens, states, meta), caches, before, slots)
            slots, out = choose(model, hidden, x | {"position": meta.positions}, slots, variant, self._process(weights))
            return caches, slots, out

        def step(weights: Any, caches: Any, slots: Slots, ints: jax.Array, *handed: jax.Array) -> Any:
            x = packing.unpack(ints)
            if most == 1:
                return one(weights, caches, slots, x, *handed)
            further = x | {name: jnp.full_like(x[name], value) for name, value in _AFTER_FIRST.items() if name in x}

            def body(index: jax.Array, carry: Any) -> Any:
                caches, slots, sampled = carry
                fields = jax.tree.map(partial(jnp.where, index == 0), x, further)
                caches, slots, out = one(weights, caches, slots, fields)
                return caches, slots, jax.tree.map(lambda all, new: all.at[:, index].set(new), sampled, out)

            shapes = jax.eval_shape(one, weights, caches, slots, x)[2]
            nothing = jax.tree.map(lambda a: jnp.zeros((rows, most, *a.shape[1:]), a.dtype), shapes)
            caches, slots, sampled = lax.fori_loop(0, x["num_steps"], body, (caches, slots, nothing))
            return caches, slots, jax.tree.map(lambda a: a.reshape(rows * most, *a.shape[2:]), sampled)

        return self._build(Key("decode", rows, variant), step, self.state.ints(packing.size), *self._handed(rows))

    def verify(self, rows: int, variant: Variant) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """`(weights, caches, slots, ints) -> (caches, slots, Sampled)`: a token for each row, and right drafts."""
        sizes = self._sizes
        words = mask_words(sizes.vocab_size) if variant.masked else 0
        packing = verify_packing(rows, sizes.has_states, sizes.num_drafts(rows), words)
        rules: dict[str, Any] = {"variant": variant, "page_size": sizes.page_size}

        def step(weights: Any, caches: Any, slots: Slots, ints: jax.Array) -> Any:
            drafter = self._drafter(weights, rows)
            assert drafter is not None, "only an engine that tries drafts verifies any"
            parts = {"process": self._process(weights), **rules}
            return verify(partial(self._model, weights), caches, slots, packing.unpack(ints), drafter=drafter, **parts)

        return self._build(Key("verify", rows, variant), step, self.state.ints(packing.size))

    def backbone(self, tokens: int, variant: Variant = PLAIN) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """`(weights, caches, slots, hidden, ints) -> (caches, slots, hidden)`: `tokens` tokens up to the last norm.

        One that records gives the activations too, `[variant.recorded, T, W]`. One that is patched takes the patches
        too, float32 `[variant.patched, E]`.
        """
        sizes, count = self._sizes, variant.recorded
        taps, recorder = sizes.taps if count else (), partial(Recorder, count=count, width=sizes.widest_activation)
        limits = sizes.max_num_seqs, sizes.page_size, sizes.has_states
        packing = backbone_packing(tokens, *limits, taps, variant.patched)
        sent, patched = [self.state.ints(packing.size), *self._handed(tokens)], variant.patched > 0
        if patched:
            sent.append(self.state.replicated((variant.patched, sizes.hidden_size), jnp.float32))

        def step(
            weights: Any, caches: Any, slots: Slots, buffer: jax.Array, ints: jax.Array, *others: jax.Array
        ) -> Any:
            before, drafter = slots, self._drafter(weights)
            x = packing.unpack(ints)
            ids, meta, slots = mixed_batch(x, slots, variant.adapted)
            patches = StepPatches(x["patch_layers"], x["patch_rows"], *others) if patched else None
            handed = () if patched else others
            with patching(patches), recording(recorder(x["taps"]) if count else None) as records:
                reads = drafter.reads if drafter is not None else ()
                hidden, states, caches = forward_read(self._model(weights), ids, caches, meta, reads, handed)
            if drafter is not None:
                caches, slots = drafter.follow(Ran(ids, states, meta), caches, before, slots)
            taken = () if records is None else (records.taken,)
            return caches, slots, lax.dynamic_update_slice(buffer, hidden.astype(buffer.dtype), (0, 0)), *taken

        return self._build(Key("backbone", tokens, variant), step, *sent)

    def decode_layers(self, rows: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """`(weights, caches, slots, ints) -> (caches, slots, [S, E])`: a decode up to the end of this stage."""
        packing = decode_packing(rows, self._sizes.has_states)
        return self._layers(
            Key("decode_layers", rows), packing, lambda x, slots: decode_batch(x, slots, self._sizes.page_size)
        )

    def backbone_layers(self, tokens: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """`(weights, caches, slots, ints) -> (caches, slots, [T, E])`: a backbone up to the end of this stage."""
        sizes = self._sizes
        packing = backbone_packing(tokens, sizes.max_num_seqs, sizes.page_size, sizes.has_states)
        return self._layers(Key("backbone_layers", tokens), packing, mixed_batch)

    def _layers(
        self, key: Key, packing: Packing, batch: Callable[..., Any]
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        def step(weights: Any, caches: Any, slots: Slots, ints: jax.Array, *handed: jax.Array) -> Any:
            tokens, meta, slots = batch(packing.unpack(ints), slots)
            hidden, caches = forward(self._model(weights), tokens, caches, meta, handed=handed)
            return caches, slots, hidden.astype(self.state.hidden_dtype)

        return self._build(key, step, self.state.ints(packing.size), *self._handed(key.size))

    def _handed(self, rows: int) -> list[Any]:
        """What the stage before hands on to this one, if there is one before."""
        stage = self._sizes.stage
        return [] if stage is None or stage.first else [self.state.hidden(rows)]

    def took(self, rows: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """`(slots, slot, tokens) -> (slots,)`: what the last stage has sampled, for the first one to run next."""
        return self._build(Key("took", rows), lambda *x: (took(*x),), self.state.ints(rows), self.state.ints(rows))

    def encode(self, tokens: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """`(weights, hidden, ints) -> (hidden,)`: `tokens` tokens of whole texts through an encoder."""
        packing = encode_packing(tokens, self._sizes.max_num_seqs)

        def step(weights: Any, buffer: jax.Array, ints: jax.Array) -> Any:
            ids, meta = whole_texts(packing.unpack(ints))
            hidden, _ = self._model(weights)(ids, (), meta)
            return (lax.dynamic_update_slice(buffer, hidden.astype(buffer.dtype), (0, 0)),)

        return self._build(Key("encode", tokens), step, self.state.ints(packing.size))

    def head(self, rows: int, variant: Variant) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """`(weights, slots, hidden, ints) -> (slots, Sampled)`: a token for each of `rows` hidden states."""
        packing = head_packing(rows, mask_words(self._sizes.vocab_size) if variant.masked else 0)

        def step(weights: Any, slots: Slots, hidden: jax.Array, ints: jax.Array) -> Any:
            x = packing.unpack(ints)
            x |= {"position": slots.position[x["slot"]] - 1}
            return choose(self._model(weights), hidden[x["hidden_row"]], x, slots, variant, self._process(weights))

        return self._build(Key("head", rows, variant), step, self.state.ints(packing.size))

    def score(self, rows: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """`(weights, hidden, ints) -> (Logprobs,)` of given tokens."""
        return self._scoring("score", rows, token_logprobs)

    def score_given(self, rows: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The same without those of the most likely ones, which would have to be searched for."""
        return self._scoring("score_given", rows, partial(token_logprobs, count=0))

    def score_all(self, rows: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """`(weights, hidden, ints) -> ([R, V],)`: log-probabilities of the whole vocabulary."""
        return self._scoring("score_all", rows, lambda logits, _, sums: logits - sums.log_sum_exp(logits)[:, None])

    def pool(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """`(hidden, ints) -> ([max_num_seqs, E],)` float32: the sums of the hidden states that belong together."""
        sizes = self._sizes
        packing = pool_packing(sizes.max_num_batched_tokens)

        def step(hidden: jax.Array, ints: jax.Array) -> Any:
            owner = packing.unpack(ints)["owner"]
            return (jax.ops.segment_sum(hidden.astype(jnp.float32), owner, sizes.max_num_seqs + 1)[:-1],)

        return self._build(Key("pool"), step, self.state.ints(packing.size))

    def token_logits(self, rows: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """`(weights, hidden, ints) -> ([R, n],)`: the logits of given tokens, float32."""
        packing = logits_packing(rows, MAX_TOKEN_IDS)

        def step(weights: Any, hidden: jax.Array, ints: jax.Array) -> Any:
            x = packing.unpack(ints)
            logits = self._model(weights).logits(hidden[x["hidden_row"]])
            return (jnp.take_along_axis(logits, x["token_ids"], axis=1),)

        return self._build(Key("token_logits", rows), step, self.state.ints(packing.size))

    def unembed(self, rows: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """`(weights, activations, normed) -> ([R, V],)`: the logits of states that the host sends, float32.

        Those that are not `normed` pass the last norm first.
        """

        def step(weights: Any, states: jax.Array, normed: jax.Array) -> Any:
            model = self._model(weights)
            return (model.logits(jnp.where(normed, states, model.norm(states))),)

        return self._build(Key("unembed", rows), step, self.state.hidden(rows), self.state.ints())

    def admit(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """`(slots, ints, floats) -> (slots,)`: a request takes its slot."""
        packing = admit_packing(self._sizes.pages_per_seq)
        floats = self.state.replicated((SETTING_FLOATS.size + self._sizes.adapter_places,), jnp.float32)
        return self._build(Key("admit"), lambda *x: (admit(*x),), self.state.ints(packing.size), floats)

    def adjust(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """`(slots, *Adjustments) -> (slots,)`."""
        slots = self.state.abstract().slots
        names = [name for name in Adjustments._fields if name != "slot"]
        rows = [self.state.replicated(getattr(slots, name).shape[1:], getattr(slots, name).dtype) for name in names]

        def step(slots: Slots, *fields: jax.Array) -> tuple[Slots]:
            return (adjust(slots, Adjustments(*fields)),)

        return self._build(Key("adjust"), step, self.state.ints(), *rows)

    def remember(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """`(slots, slot, history) -> (slots,)`: the tokens that a request has when it takes its slot."""
        length = self.state.abstract().slots.history.shape[1]
        return self._build(Key("remember"), lambda *x: (remember(*x),), self.state.ints(), self.state.ints(length))

    def recall(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """`(slots, ints) -> (slots,)`: a part of a text that drafts are looked for in."""
        return self._build(Key("recall"), lambda *x: (recall(*x),), self.state.ints(recall_packing().size))

    def adapt(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """`(adapters, place, *rows) -> (adapters,)`: an adapter takes its place, a row of each table."""
        tables = self._adapted.tables if self._adapted is not None else ()

        def step(adapters: Any, place: jax.Array, *rows: jax.Array) -> tuple[Any]:
            return (tuple(t.at[place].set(row) for t, row in zip(adapters, rows, strict=True)),)

        rows = [self.state.sharded(t.shape[1:], t.dtype, t.axes[1:]) for t in tables]
        return self._build(Key("adapt"), step, self.state.ints(), *rows)

    def put_row(self, kind: Kind) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """`(part, slot, *row) -> (part,)`: what the request that took a slot is steered by, or is processed with."""
        parts, tree = jax.tree.flatten(self.state.on_demand()[USES[kind].takes[0]])

        def step(state: Any, slot: jax.Array, *rows: jax.Array) -> tuple[Any]:
            pairs = zip(jax.tree.leaves(state), rows, strict=True)
            return (jax.tree.unflatten(tree, [part.at[slot].set(row) for part, row in pairs]),)

        rows = [self.state.replicated(part.shape[1:], part.dtype) for part in parts]
        return self._build(Key(kind), step, self.state.ints(), *rows)

    def read_pages(self, count: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """`(caches, pages) -> (rows,)`: of each buffer that has pages `count` of them."""
        is_paged = self._sizes.is_paged

        def step(caches: Any, pages: jax.Array) -> tuple[tuple[jax.Array, ...]]:
            buffers = zip(jax.tree.leaves(caches), is_paged, strict=True)
            return (tuple(buffer[pages] for buffer, paged in buffers if paged),)

        specs = tuple(P(*buffer.axes) for buffer in self._sizes.paged_buffers)
        return self._build(Key("read_pages", count), step, self.state.ints(count), output=specs)

    def write_pages(self, count: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """`(caches, pages, *rows) -> (caches,)`: `count` pages are filled with what `read_pages` gave."""
        sizes = self._sizes

        def step(caches: Any, pages: jax.Array, *rows: jax.Array) -> tuple[Any]:
            buffers, tree = jax.tree.flatten(caches)
            given = iter(rows)
            written = [
                buffer.at[pages].set(next(given)) if paged else buffer
                for buffer, paged in zip(buffers, sizes.is_paged, strict=True)
            ]
            return (jax.tree.unflatten(tree, written),)

        shapes = [self.state.sharded((count, *b.shape[1:]), b.dtype, b.axes) for b in sizes.paged_buffers]
        return self._build(Key("write_pages", count), step, self.state.ints(count), *shapes)

    def _scoring(self, kind: Kind, rows: int, score: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        packing = score_packing(rows)

        def step(weights: Any, hidden: jax.Array, ints: jax.Array) -> Any:
            x = packing.unpack(ints)
            model = self._model(weights)
            return (score(model.logits(hidden[x["hidden_row"]]), x["target"], model.kernels.sums),)

        return self._build(Key(kind, rows), step, self.state.ints(packing.size))

    def _model(self, weights: StepWeights | tuple[jax.Array, ...]) -> Any:
        """The Decoder or Encoder, which steps of its own kind run; with adapters, or steered, where these are given."""
        given = weights if isinstance(weights, StepWeights) else StepWeights(weights)
        parameters = self._parameters(given.weights)
        if given.adapters is None:
            model = nnx.merge(self._graph, parameters)
        else:
            assert self._adapted is not None, "only an engine with adapters runs adapted steps"
            model = self._adapted.merged(parameters, given.adapters)
        return model if given.steering is None else Steered(model, given.steering)

    def _process(self, weights: StepWeights | tuple[jax.Array, ...]) -> ProcessLogits | None:
        """What logits pass in a step whose key says so."""
        table = weights.processing if isinstance(weights, StepWeights) else None
        return None if table is None else partial(self.processors.process, table)

    def _parameters(self, weights: tuple[jax.Array, ...]) -> Any:
        return jax.tree.unflatten(self._treedef, self.unpack_weights(weights))

    def _drafter(self, weights: StepWeights | tuple[jax.Array, ...], rows: int = 1) -> Drafter | None:
        """Where drafts for `rows` sequences come from; None where none are tried."""
        arrays = weights.weights if isinstance(weights, StepWeights) else weights

        def model() -> Decoder:
            found = nnx.merge(self._graph, self._parameters(arrays))
            assert isinstance(found, Decoder), "an encoder tries no drafts"
            return found

        return self._drafts.drafter(rows, model, lambda: self._packing.unpack(arrays)[self._num_leaves :])

    def _build(
        self, key: Key, step: Callable[..., Any], *sent: jax.ShapeDtypeStruct, output: Any = None
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """`step` jitted, and its abstract arguments: what it takes of the device's, then what the host sends.

        `output` says how what follows for the host lies on the mesh; by default every device has all of it.
        """
        uses, state = key.uses, self.state.abstract()
        parts = {"weights": self._weights, **state._asdict()}
        specs = {"weights": self._weight_specs, "caches": state_specs(state.caches), "slots": P(), "hidden": P()}
        specs |= {"adapters": state_specs(state.adapters), "steering": P(), "processing": P()}
        parts |= self.state.on_demand()
        inputs = (*(specs[name] for name in uses.takes), *(a.sharding.spec for a in sent))
        outputs = (*(specs[name] for name in uses.gives), *([output or P()] if uses.output else []))
        donated = tuple(index for index, name in enumerate(uses.takes) if name in uses.gives)
        if key.variant.adapted or key.variant.steered or key.variant.processed:
            step = with_parts(step, [name for name in uses.takes if name in StepWeights._fields])
        return self.state.jit(step, inputs, outputs, donated), (*(parts[name] for name in uses.takes), *sent)
