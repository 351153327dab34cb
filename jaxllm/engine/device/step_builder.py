"""What every function that is compiled is made of: a model on a mesh, its parameters, and what lives on the devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from jaxllm.engine.device.device_state import StateShapes, state_specs
from jaxllm.engine.device.drafts.draft_model import AbstractDraft
from jaxllm.engine.device.drafts.drafter import Drafter
from jaxllm.engine.device.drafts.source import DraftSource
from jaxllm.engine.device.keys import Key
from jaxllm.engine.device.processing import ProcessLogits, Processors
from jaxllm.engine.device.sizes import StepSizes
from jaxllm.engine.device.step_weights import StepWeights, WeightPacking, with_parts
from jaxllm.engine.orders import NewWeights
from jaxllm.models.abstract import AdaptedModel
from jaxllm.models.decoder import Decoder
from jaxllm.models.encoder import Encoder
from jaxllm.models.layers.steering import Steered
from jaxllm.sharding.mesh import data_size, gather_over_data, own_rows
from jaxllm.weights.loader import ParamSpec, Value

GRAPHED = ("gpu", "cuda")
"""Platforms where a step is one CUDA graph, whose arguments cost little."""


class StepBuilder:
    """One model on one mesh, of which steps are jitted."""

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

        `output` says how what follows for the host lies on the mesh; by default every device has all of it. Where
        several batches run side by side, it is a tuple of what each of them gives.
        """
        uses, state = key.uses, self.state.abstract()
        if self.state.num_batches > 1:
            step, sent = partial(_for_each_batch, step, len(sent), uses.output), tuple(map(self.state.to_all, sent))
        parts = {"weights": self._weights, **state._asdict(), **self.state.on_demand()}
        specs = {name: state_specs(part) for name, part in parts.items()}
        inputs = (*(specs[name] for name in uses.takes), *(a.sharding.spec for a in sent))
        outputs = (*(specs[name] for name in uses.gives), *([output or P()] if uses.output else []))
        donated = tuple(index for index, name in enumerate(uses.takes) if name in uses.gives)
        if key.variant.adapted or key.variant.steered or key.variant.processed:
            step = with_parts(step, [name for name in uses.takes if name in StepWeights._fields])
        return self.state.jit(step, inputs, outputs, donated), (*(parts[name] for name in uses.takes), *sent)


def _for_each_batch(step: Callable[..., Any], num_sent: int, has_output: bool, *given: Any) -> Any:
    """`step`, where every device is sent the vectors of all batches, and gives what all of them give."""
    own, sent = given[: len(given) - num_sent], given[len(given) - num_sent :]
    found = step(*own, *map(own_rows, sent))
    if not has_output:
        return found
    *kept, output = found
    gathered = gather_over_data(output)
    return *kept, tuple(jax.tree.map(itemgetter(batch), gathered) for batch in range(data_size()))
