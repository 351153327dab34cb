"""The functions that are compiled: everything a step does on the device.

A decode-only step is one of them, `decode`. A step with prefill in it is `backbone`, which leaves the hidden states in
a buffer of fixed size, and then `head` for the rows that sample; so there are as many shapes as decode, prefill and
head buckets together, not their product. Decode and head come in variants; a mask, which a grammar fills while the
backbone runs, is the head's alone.

Every one of them returns a tuple: what it changed of the device's own, as `keys.USES` says, then its output, if any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxllm.engine.device.batch import Fields, decode_batch, mixed_batch
from jaxllm.engine.device.choice import choose
from jaxllm.engine.device.keys import USES, Key, Kind, Variant
from jaxllm.engine.device.packing import (
    SETTING_FLOATS,
    admit_packing,
    backbone_packing,
    decode_packing,
    head_packing,
    logits_packing,
    pool_packing,
    score_packing,
    verify_packing,
)
from jaxllm.engine.device.sampler import token_logprobs
from jaxllm.engine.device.sizes import StepSizes
from jaxllm.engine.device.slots import Slots, adjust, admit, remember, slot_shapes
from jaxllm.engine.device.verify import verify
from jaxllm.engine.masks import mask_words
from jaxllm.engine.settings import Adjustments
from jaxllm.models.caches import Buffer, Cache
from jaxllm.models.decoder import Decoder
from jaxllm.requests.pooling import MAX_TOKEN_IDS
from jaxllm.weights.loader import ParamSpec, Value

_AFTER_FIRST = {"tokens": -1, "new_page": 0, "state_read": 0}
"""What a decode of several tokens is told for those after the first: each is in the history, in a page that is known,
and goes on from the state in its slot."""

GRAPHED = ("gpu", "cuda")
"""Platforms where a step is one CUDA graph, whose arguments cost little."""


class DeviceState(NamedTuple):
    """What lives on the devices between steps; all of it is donated to the step that changes it."""

    caches: tuple[Cache, ...]
    """What each layer keeps of earlier tokens, in pages or by slot."""
    slots: Slots
    hidden: Any
    """[max_num_batched_tokens, E]: the backbone's last output."""


class WeightPacking:
    """Fewer arguments, quicker dispatch: all small replicated vectors (norms, biases) travel as one.

    The packed tuple is that vector, then every other array of the parameters in its own order. Where kernels take norms
    (`joins` is False), each vector travels by itself: a part of a larger one would be copied out for them.
    """

    def __init__(self, specs: Sequence[ParamSpec], joins: bool = True):
        self._leaves = [leaf for spec in specs for leaf in spec.leaves()]
        self._small = [
            i
            for i, (a, axes) in enumerate(self._leaves)
            if joins and a.ndim == 1 and not any(axes) and a.dtype == np.float32
        ]
        self._large = [i for i in range(len(self._leaves)) if i not in set(self._small)]
        self._offsets = np.cumsum([0, *(self._leaves[i][0].shape[0] for i in self._small)]).tolist()

    def abstract(self, mesh: Mesh | AbstractMesh) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and shardings of the packed tuple."""
        vector = jax.ShapeDtypeStruct((self._offsets[-1],), jnp.float32, sharding=NamedSharding(mesh, P()))
        large = (self._leaves[i] for i in self._large)
        return (
            vector,
            *(jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, P(*axes))) for a, axes in large),
        )

    def pack(self, parameters: Sequence[Value]) -> tuple[jax.Array, ...]:
        """The model's parameters -> the packed tuple."""
        arrays = jax.tree.leaves(parameters)
        small = jnp.concatenate([arrays[i] for i in self._small]) if self._small else jnp.zeros(0)
        return (small, *(arrays[i] for i in self._large))

    def unpack(self, packed: Sequence[jax.Array]) -> list[jax.Array]:
        """The packed tuple -> every array of the parameters; inside a traced function."""
        vector, large = packed[0], dict(zip(self._large, packed[1:], strict=True))
        ends = zip(self._small, self._offsets, self._offsets[1:], strict=False)
        small = {index: vector[start:end] for index, start, end in ends}
        return [(small | large)[index] for index in range(len(self._leaves))]


class StepFunctions:
    """Builds the jitted step functions of one model on one mesh, with the abstract arguments to compile them for."""

    def __init__(self, model: Decoder, specs: Sequence[ParamSpec], mesh: Mesh | AbstractMesh, sizes: StepSizes):
        """`model` is abstract (see `abstract_model`); `specs` are its parameters in `nnx.split` order."""
        self._graph, state = nnx.split(model)
        _, self._treedef = jax.tree.flatten(state)
        self._mesh = mesh
        self._sizes = sizes
        # The C++ kernels give float32, which a decode does not round on its way to the head, and so nobody does.
        self._hidden_dtype = jnp.float32 if model.kernels.native else sizes.dtype
        self._packing = WeightPacking(specs, joins=self.platform not in GRAPHED)
        self._weights = self._packing.abstract(mesh)
        self._weight_specs = tuple(a.sharding.spec for a in self._weights)

    @property
    def platform(self) -> str:
        """Of the devices that steps are compiled for: this host's, or others that are only described."""
        if isinstance(self._mesh, AbstractMesh):
            return self._mesh.abstract_device.platform
        return self._mesh.devices.flat[0].platform

    def pack_weights(self, parameters: Sequence[Value]) -> tuple[jax.Array, ...]:
        """The model's parameters as every step takes them."""
        return self._packing.pack(parameters)

    def abstract_state(self) -> DeviceState:
        """Shapes and shardings of the device state."""
        s = self._sizes
        caches = tuple(tuple(self._cache(buffer) for buffer in layer) for layer in s.buffers)
        shapes = slot_shapes(s.max_num_seqs, s.max_model_len, s.pages_per_seq, s.vocab_size)
        slots = Slots(*(self._replicated(a.shape, a.dtype) for a in shapes))
        hidden = self._replicated((s.max_num_batched_tokens, s.hidden_size), self._hidden_dtype)
        return DeviceState(caches, slots, hidden)

    def new_state(self) -> DeviceState:
        """The device state of an engine that has no requests, on the devices."""
        state = self.abstract_state()

        def make() -> DeviceState:
            zeros = self._sizes.cache_layout.page_layout.zeros
            caches = jax.tree.map(lambda a: zeros(a.sharding.shard_shape(a.shape), a.dtype), state.caches)
            rest = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), state._replace(caches=()))
            return rest._replace(caches=caches)

        return self._jit(make, (), _specs(state), donate=())()

    def step(self, key: Key) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The jitted function that a key names, and the abstract arguments to compile it for; nothing is traced yet."""
        sampling = {"decode": self.decode, "verify": self.verify, "head": self.head}
        if key.kind in sampling:
            return sampling[key.kind](key.size, key.variant)
        sized = {"backbone": self.backbone, "score": self.score, "score_all": self.score_all}
        sized |= {"token_logits": self.token_logits}
        unsized = {"pool": self.pool, "admit": self.admit, "adjust": self.adjust, "remember": self.remember}
        return sized[key.kind](key.size) if key.kind in sized else unsized[key.kind]()

    def decode(self, rows: int, variant: Variant) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """`(weights, caches, slots, ints) -> (caches, slots, Sampled)`: up to `decode_steps` tokens for each of `rows`.

        What is sampled has `decode_steps` rows for each sequence in turn, of which the first `num_steps` are filled.
        """
        packing = decode_packing(rows, self._sizes.has_states)
        page_size, most = self._sizes.page_size, self._sizes.decode_steps

        def one(weights: Any, caches: Any, slots: Slots, x: Fields) -> Any:
            model = self._model(weights)
            tokens, meta, slots = decode_batch(x, slots, page_size)
            hidden, caches = model(tokens, caches, meta)
            slots, out = choose(model, hidden, x | {"position": meta.positions}, slots, variant)
            return caches, slots, out

        def step(weights: Any, caches: Any, slots: Slots, ints: jax.Array) -> Any:
            x = packing.unpack(ints)
            if most == 1:
                return one(weights, caches, slots, x)
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

        return self._build("decode", step, self._ints(packing.size))

    def verify(self, rows: int, variant: Variant) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """`(weights, caches, slots, ints) -> (caches, slots, Sampled)`: a token for each row, and right drafts."""
        packing, rule = verify_packing(rows), self._sizes.drafts
        assert rule is not None, "only an engine that tries drafts verifies any"
        rules: dict[str, Any] = {"rule": rule, "variant": variant, "page_size": self._sizes.page_size}

        def step(weights: Any, caches: Any, slots: Slots, ints: jax.Array) -> Any:
            return verify(partial(self._model, weights), caches, slots, packing.unpack(ints), **rules)

        return self._build("verify", step, self._ints(packing.size))

    def backbone(self, tokens: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """`(weights, caches, slots, hidden, ints) -> (caches, slots, hidden)`: `tokens` tokens up to the last norm."""
        sizes = self._sizes
        packing = backbone_packing(tokens, sizes.max_num_seqs, sizes.page_size, sizes.has_states)

        def step(weights: Any, caches: Any, slots: Slots, buffer: jax.Array, ints: jax.Array) -> Any:
            ids, meta, slots = mixed_batch(packing.unpack(ints), slots)
            hidden, caches = self._model(weights)(ids, caches, meta)
            return caches, slots, lax.dynamic_update_slice(buffer, hidden.astype(buffer.dtype), (0, 0))

        return self._build("backbone", step, self._ints(packing.size))

    def head(self, rows: int, variant: Variant) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """`(weights, slots, hidden, ints) -> (slots, Sampled)`: a token for each of `rows` hidden states."""
        packing = head_packing(rows, mask_words(self._sizes.vocab_size) if variant.masked else 0)

        def step(weights: Any, slots: Slots, hidden: jax.Array, ints: jax.Array) -> Any:
            x = packing.unpack(ints)
            x |= {"position": slots.position[x["slot"]] - 1}
            return choose(self._model(weights), hidden[x["hidden_row"]], x, slots, variant)

        return self._build("head", step, self._ints(packing.size))

    def score(self, rows: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """`(weights, hidden, ints) -> (Logprobs,)` of given tokens."""
        return self._scoring("score", rows, token_logprobs)

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

        return self._build("pool", step, self._ints(packing.size))

    def token_logits(self, rows: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """`(weights, hidden, ints) -> ([R, n],)`: the logits of given tokens, float32."""
        packing = logits_packing(rows, MAX_TOKEN_IDS)

        def step(weights: Any, hidden: jax.Array, ints: jax.Array) -> Any:
            x = packing.unpack(ints)
            logits = self._model(weights).logits(hidden[x["hidden_row"]])
            return (jnp.take_along_axis(logits, x["token_ids"], axis=1),)

        return self._build("token_logits", step, self._ints(packing.size))

    def admit(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """`(slots, ints, floats) -> (slots,)`: a request takes its slot."""
        packing = admit_packing(self._sizes.pages_per_seq)
        floats = self._replicated((SETTING_FLOATS.size,), jnp.float32)
        return self._build("admit", lambda *x: (admit(*x),), self._ints(packing.size), floats)

    def adjust(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """`(slots, *Adjustments) -> (slots,)`."""
        slots = self.abstract_state().slots
        names = [name for name in Adjustments._fields if name != "slot"]
        rows = [self._replicated(getattr(slots, name).shape[1:], getattr(slots, name).dtype) for name in names]

        def step(slots: Slots, *fields: jax.Array) -> tuple[Slots]:
            return (adjust(slots, Adjustments(*fields)),)

        return self._build("adjust", step, self._ints(), *rows)

    def remember(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """`(slots, slot, history) -> (slots,)`: the tokens that a request has when it takes its slot."""
        length = self.abstract_state().slots.history.shape[1]
        return self._build("remember", lambda *x: (remember(*x),), self._ints(), self._ints(length))

    def _scoring(self, kind: Kind, rows: int, score: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        packing = score_packing(rows)

        def step(weights: Any, hidden: jax.Array, ints: jax.Array) -> Any:
            x = packing.unpack(ints)
            model = self._model(weights)
            return (score(model.logits(hidden[x["hidden_row"]]), x["target"], model.kernels.sums),)

        return self._build(kind, step, self._ints(packing.size))

    def _model(self, weights: tuple[jax.Array, ...]) -> Decoder:
        return nnx.merge(self._graph, jax.tree.unflatten(self._treedef, self._packing.unpack(weights)))

    def _build(
        self, kind: Kind, step: Callable[..., Any], *sent: jax.ShapeDtypeStruct
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """`step` jitted, and its abstract arguments: what it takes of the device's, then what the host sends."""
        uses, state = USES[kind], self.abstract_state()
        parts = {"weights": self._weights, **state._asdict()}
        specs = {"weights": self._weight_specs, "caches": _specs(state.caches), "slots": P(), "hidden": P()}
        inputs = (*(specs[name] for name in uses.takes), *(P() for _ in sent))
        outputs = (*(specs[name] for name in uses.gives), *([P()] if uses.output else []))
        donated = tuple(index for index, name in enumerate(uses.takes) if name in uses.gives)
        return self._jit(step, inputs, outputs, donated), (*(parts[name] for name in uses.takes), *sent)

    def _cache(self, buffer: Buffer) -> Any:
        return jax.ShapeDtypeStruct(buffer.shape, buffer.dtype, sharding=NamedSharding(self._mesh, P(*buffer.axes)))

    def _ints(self, *shape: int) -> jax.ShapeDtypeStruct:
        return self._replicated(shape, jnp.int32)

    def _replicated(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self._mesh, P()))

    def _jit(self, step: Callable[..., Any], inputs: Any, outputs: Any, donate: tuple[int, ...]) -> Callable[..., Any]:
        mapped = jax.shard_map(step, mesh=self._mesh, in_specs=inputs, out_specs=outputs, check_vma=False)
        return jax.jit(mapped, donate_argnums=donate)


def _specs(state: Any) -> Any:
    """How each array of a part of the device state lies on the mesh."""
    return jax.tree.map(lambda a: a.sharding.spec, state)
