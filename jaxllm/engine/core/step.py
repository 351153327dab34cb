"""The functions that are compiled: everything a step does on the device.

A decode-only step is one of them, `decode`. A step with prefill in it is `backbone`, which leaves the hidden states in
a buffer of fixed size, and then `head` for the rows that sample; so there are as many shapes as decode, prefill and
head buckets together, not their product. All come in variants: features have hands in them.

If a model is parted into stages, those before the last have `layers`, which hand the hidden states on; what a stage
is handed is the last thing that such a step is sent.

Every one of them returns a tuple: what it changed of the device's own, as `Features.uses` says, then its output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from inspect import Parameter, Signature
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from jaxllm.engine.core.batch import decode_batch, forward, mixed_batch, run, told, whole_texts
from jaxllm.engine.core.device_state import StateShapes, WeightPacking, state_specs
from jaxllm.engine.core.feature import Built, Feature, Fields, Traced, TracedStep
from jaxllm.engine.core.keys import Key
from jaxllm.engine.core.packing import SETTING_FLOATS, admit_packing
from jaxllm.engine.core.registry import Features
from jaxllm.engine.core.sampler import choose
from jaxllm.engine.core.sizes import StepSizes
from jaxllm.engine.core.slots import Slots, admit, put_history, took
from jaxllm.engine.messages import NewWeights
from jaxllm.models.decoder import Decoder
from jaxllm.models.encoder import Encoder
from jaxllm.sharding.mesh import data_size, gather_over_data, own_rows
from jaxllm.weights.loader import ParamSpec, Value

GRAPHED = ("gpu", "cuda")
"""Platforms where a step is one CUDA graph, whose arguments cost little."""

DeviceParts = dict[str, Any]
"""The parts of the state that a step takes, by name."""


class StepBuilder:
    """One model on one mesh, of which steps are jitted."""

    def __init__(
        self,
        model: Decoder | Encoder,
        specs: Sequence[ParamSpec],
        mesh: Mesh | AbstractMesh,
        sizes: StepSizes,
        features: Features | None = None,
        further: Sequence[ParamSpec] = (),
    ):
        """`model` is abstract (see `abstract_model`); `specs` are its parameters in `nnx.split` order. `further` ones,
        of another model that features run, come after these.
        """
        self.features = features if features is not None else Features()
        self._graph, state = nnx.split(model)
        leaves, self._treedef = jax.tree.flatten(state)
        self._num_leaves = len(leaves)
        self._mesh = mesh
        self.sizes = sizes
        # The C++ kernels give float32, which a decode does not round on its way to the head, and so no step does. An
        # encoder's are not rounded either: they may be vectors already.
        hidden_dtype = jnp.float32 if model.kernels.native or not sizes.num_slots else sizes.dtype
        self.state = StateShapes(mesh, sizes, hidden_dtype, self.features)
        self._packing = WeightPacking([*specs, *further], joins=self.platform not in GRAPHED)
        self._weights = self._packing.abstract(mesh)

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
        """Every array of the model's parameters, of what `pack_weights` made; `further` ones are left out."""
        return self._packing.unpack(weights)[: self._num_leaves]

    def model(self, parts: DeviceParts, hands: Sequence[Traced] = ()) -> Any:
        """The Decoder or Encoder, which steps of its own kind run, as the features of a step want it."""
        parameters = self._parameters(parts["weights"])
        model = nnx.merge(self._graph, parameters)
        for hand in hands:
            model = hand.model(model, parameters)
        return model

    def hands(self, step: TracedStep) -> list[Traced]:
        """The features' parts in a step that is traced."""
        return [feature.traced(step) for feature in self.features.inside(step.kind, step.variant)]

    def own_state(self, feature: Feature) -> Any:
        """A feature's part of what lives on the devices, abstract."""
        return self.state.part(feature) if feature.rare else self.state.abstract()["slots"].of[feature.name]

    def _parameters(self, weights: tuple[jax.Array, ...]) -> Any:
        return jax.tree.unflatten(self._treedef, self.unpack_weights(weights))

    def further(self, parts: DeviceParts) -> list[jax.Array]:
        """Every array of the parameters that come after the model's."""
        return self._packing.unpack(parts["weights"])[self._num_leaves :]

    def jitted(self, key: Key, built: Built) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """A step jitted, and its abstract arguments: what it takes of the device's, then what the host sends.

        If several batches run side by side, its output is a tuple of what each of them gives.
        """
        uses, parts, sent = self.features.uses(key), self.state.abstract() | {"weights": self._weights}, built.sent
        parts |= {name: self.state.part(self.features[name]) for name in uses.takes if name not in parts}

        def step(*given: Any) -> tuple[Any, ...]:
            own = dict(zip(uses.takes, given, strict=False))
            return built.step(own, *given[len(uses.takes) :])

        traced: Callable[..., Any] = step
        if self.state.num_batches > 1:
            traced = partial(_for_each_batch, step, len(sent), uses.output)
            sent = tuple(map(self.state.to_all, sent))
        names = [Parameter(name, Parameter.POSITIONAL_ONLY) for name in uses.takes]
        signature = Signature([*names, Parameter("sent", Parameter.VAR_POSITIONAL)])
        traced.__signature__ = signature  # type: ignore[attr-defined]  # programs call their arguments by these names
        specs = {name: state_specs(parts[name]) for name in {*uses.takes, *uses.gives}}
        inputs = (*(specs[name] for name in uses.takes), *(a.sharding.spec for a in sent))
        output = P() if built.output is None else built.output
        outputs = (*(specs[name] for name in uses.gives), *([output] if uses.output else []))
        donated = tuple(index for index, name in enumerate(uses.takes) if name in uses.gives)
        return self.state.jit(traced, inputs, outputs, donated), (*(parts[name] for name in uses.takes), *sent)


def _for_each_batch(step: Callable[..., Any], num_sent: int, has_output: bool, *given: Any) -> Any:
    """`step`, where every device is sent the vectors of all batches, and gives what all of them give."""
    own, sent = given[: len(given) - num_sent], given[len(given) - num_sent :]
    found = step(*own, *map(own_rows, sent))
    if not has_output:
        return found
    *kept, output = found
    gathered = gather_over_data(output)
    return *kept, tuple(jax.tree.map(itemgetter(batch), gathered) for batch in range(data_size()))


_AFTER_FIRST = {"tokens": -1, "new_page": 0}
"""The fields of a decode of several tokens for those after the first: each is in the history, in a page that is known.
"""

Jitted = tuple[Callable[..., Any], tuple[Any, ...]]
"""A jitted function, and the abstract arguments to compile it for."""


class StepFunctions(StepBuilder):
    """Builds the jitted step functions of one model on one mesh, with the abstract arguments to compile them for."""

    def step(self, key: Key) -> Jitted:
        """The jitted function that a key names, and the abstract arguments to compile it for; nothing is traced yet."""
        core = {
            "decode": self._decode, "backbone": self._backbone, "head": self._head,
            "encode": self._encode, "layers": self._layers, "took": self._took,
        }  # fmt: skip
        (word,) = key.variant if key.kind in ("put", "read", "copy_out", "copy_in") else (key.kind,)
        if key.kind in core:
            built = core[key.kind](key)
        elif word in ("admit", "history"):
            built = self._admit() if word == "admit" else self._put_history()
        else:
            built = self.features.builder(word).build(key, self)
        return self.jitted(key, built)

    def _decode(self, key: Key) -> Built:
        """`(parts, ints) -> (caches, slots, Sampled)`: up to `decode_steps` tokens for each of `size` sequences.

        The sampled tokens have `decode_steps` rows for each sequence in turn, of which the first `num_steps` are
        filled.
        """
        rows, packing = key.size, self.features.packing(key, self.sizes)
        page_size, most = self.sizes.page_size, self.sizes.decode_steps

        def one(parts: DeviceParts, caches: Any, slots: Slots, x: Fields, *handed: jax.Array) -> Any:
            before, hands = slots, self.hands(TracedStep(*key[::2], self.sizes, x, parts, self))
            tokens, meta, slots = decode_batch(x, slots, page_size)
            meta = told(hands, meta, slots)
            model = self.model(parts, hands)
            hidden, caches, slots = run(model, tokens, caches, meta, hands, before, slots, handed)
            slots, out = choose(model, hidden, x | {"position": meta.positions}, slots, key.variant, hands)
            return caches, slots, out

        def step(parts: DeviceParts, ints: jax.Array, *handed: jax.Array) -> Any:
            x, caches, slots = packing.unpack(ints), parts["caches"], parts["slots"]
            if most == 1:
                return one(parts, caches, slots, x, *handed)
            after_first = _AFTER_FIRST | dict(pair for f in self.features for pair in f.after_first.items())
            further = x | {name: jnp.full_like(x[name], value) for name, value in after_first.items() if name in x}

            def body(index: jax.Array, carry: Any) -> Any:
                caches, slots, sampled = carry
                fields = jax.tree.map(partial(jnp.where, index == 0), x, further)
                caches, slots, out = one(parts, caches, slots, fields)
                return caches, slots, jax.tree.map(lambda all, new: all.at[:, index].set(new), sampled, out)

            shapes = jax.eval_shape(lambda *given: one(parts, *given)[2], caches, slots, x)
            nothing = jax.tree.map(lambda a: jnp.zeros((rows, most, *a.shape[1:]), a.dtype), shapes)
            caches, slots, sampled = lax.fori_loop(0, x["num_steps"], body, (caches, slots, nothing))
            return caches, slots, jax.tree.map(lambda a: a.reshape(rows * most, *a.shape[2:]), sampled)

        return Built(step, [self.state.ints(packing.size), *self._handed(rows)])

    def _backbone(self, key: Key) -> Built:
        """`(parts, ints) -> (caches, slots, hidden[, outputs])`: `size` tokens up to the last norm.

        The features' own results are a dict by their names.
        """
        sizes, tokens = self.sizes, key.size
        packing, handed = self.features.packing(key, sizes), self._handed(key.size)
        sent = [a for f in self.features.inside(*key[::2], Feature.sent) for a in f.sent(key, self.state)]

        def step(parts: DeviceParts, ints: jax.Array, *others: jax.Array) -> Any:
            x, before, buffer = packing.unpack(ints), parts["slots"], parts["hidden"]
            hands = self.hands(TracedStep(*key[::2], sizes, x, parts, self, others[: len(sent)]))
            ids, meta, slots = mixed_batch(x, before)
            meta, handed = told(hands, meta, slots), others[len(sent) :]
            model = self.model(parts, hands)
            hidden, caches, slots = run(model, ids, parts["caches"], meta, hands, before, slots, handed)
            hidden = hidden.astype(buffer.dtype)
            if self.state.num_batches > 1:  # one with nothing in this step may have yet to read what it left in another
                hidden = jnp.where(x["num_seqs"] > 0, hidden, buffer[:tokens])
            named = zip(self.features.inside(*key[::2]), hands, strict=True)
            gives = {feature.name: hand.out() for feature, hand in named if feature.gives}
            return caches, slots, lax.dynamic_update_slice(buffer, hidden, (0, 0)), *([gives] if gives else [])

        return Built(step, [self.state.ints(packing.size), *sent, *handed])

    def _head(self, key: Key) -> Built:
        """`(parts, ints) -> (slots, Sampled)`: a token for each of `size` hidden states."""
        packing = self.features.packing(key, self.sizes)

        def step(parts: DeviceParts, ints: jax.Array) -> Any:
            x, slots = packing.unpack(ints), parts["slots"]
            hands = self.hands(TracedStep(*key[::2], self.sizes, x, parts, self))
            x |= {"position": slots.position[x["slot"]] - 1}
            return choose(self.model(parts), parts["hidden"][x["hidden_row"]], x, slots, key.variant, hands)

        return Built(step, [self.state.ints(packing.size)])

    def _encode(self, key: Key) -> Built:
        """`(parts, ints) -> (hidden,)`: `size` tokens of whole texts through an encoder."""
        packing = self.features.packing(key, self.sizes)

        def step(parts: DeviceParts, ints: jax.Array) -> Any:
            x, buffer = packing.unpack(ints), parts["hidden"]
            hands = self.hands(TracedStep(*key[::2], self.sizes, x, parts, self))
            ids, meta = whole_texts(x)
            hidden, _ = self.model(parts, hands)(ids, (), told(hands, meta, parts["slots"]))
            return (lax.dynamic_update_slice(buffer, hidden.astype(buffer.dtype), (0, 0)),)

        return Built(step, [self.state.ints(packing.size)])

    def _layers(self, key: Key) -> Built:
        """`(parts, ints) -> (caches, slots, [T, E])`: a decode or a backbone up to the end of this stage."""
        (of,) = key.variant
        step_of = Key("decode" if of == "decode" else "backbone", key.size)
        packing = self.features.packing(step_of, self.sizes)
        batch = partial(decode_batch, page_size=self.sizes.page_size) if of == "decode" else mixed_batch

        def step(parts: DeviceParts, ints: jax.Array, *handed: jax.Array) -> Any:
            x = packing.unpack(ints)
            hands = self.hands(TracedStep(step_of.kind, step_of.variant, self.sizes, x, parts, self))
            tokens, meta, slots = batch(x, parts["slots"])
            meta = told(hands, meta, slots)
            hidden, caches = forward(self.model(parts), tokens, parts["caches"], meta, handed=handed)
            return caches, slots, hidden.astype(self.state.hidden_dtype)

        return Built(step, [self.state.ints(packing.size), *self._handed(key.size)])

    def _took(self, key: Key) -> Built:
        """`(parts, slot, tokens) -> (slots,)`: what the last stage has sampled, for the first one to run next."""
        return Built(lambda parts, *x: (took(parts["slots"], *x),), [self.state.ints(key.size)] * 2)

    def _admit(self) -> Built:
        """`(parts, ints, floats) -> (slots,)`: a request takes its slot."""
        ints = self.state.ints(admit_packing(self.sizes.pages_per_seq).size)
        floats = self.state.replicated((SETTING_FLOATS.size,), jnp.float32)
        return Built(lambda parts, *x: (admit(parts["slots"], x[0], x[1], self.features),), [ints, floats])

    def _put_history(self) -> Built:
        """`(parts, slot, history) -> (slots,)`: the tokens that a request has when it takes its slot."""
        sent = [self.state.ints(1), self.state.ints(self.sizes.max_model_len + 1)]
        return Built(lambda parts, *x: (put_history(parts["slots"], *x),), sent)

    def _handed(self, rows: int) -> list[Any]:
        """The hidden states that the stage before hands on to this one, if there is one before."""
        stage = self.sizes.stage
        return [] if stage is None or stage.first else [self.state.hidden(rows)]
