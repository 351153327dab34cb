"""A caller's own functions of logits, inside the steps that choose tokens for requests that use them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxllm.engine.core.feature import Feature, Fields, Traced, TracedStep
from jaxllm.engine.core.keys import Key
from jaxllm.engine.core.packing import Packing
from jaxllm.engine.core.registry import Features
from jaxllm.engine.core.request import Request
from jaxllm.engine.core.sampler import SamplingRows
from jaxllm.engine.core.sizes import StepSizes
from jaxllm.engine.core.slots import Slots
from jaxllm.engine.messages import EngineRequest
from jaxllm.errors import ConfigError, one_line
from jaxllm.requests.logits_processors import Chosen, Declared, LogitsProcessor, LogitsState, argument


class ProcessorsFeature(Feature):
    """Those of an engine. A row of int32 numbers says of each slot which of them its request uses, and with what.

    Worked example, of two processors, the second of which has an argument `factor`: `[0, 1, bits of 2.0]` says that the
    second is used, with `factor` 2.0. A row of zeros says that none is.
    """

    name = "processors"
    on = ("decode", "verify", "head")
    rare = samples = has_part = reads_history = True
    asked_by = ("processes_logits",)
    is_saved = False
    """A caller's own functions are in such a step, or their number."""

    def __init__(self, processors: Sequence[LogitsProcessor] = ()):
        self._processors = tuple(processors)
        shapes = {
            f"{processor.name}.{key}": value.shape
            for processor in self._processors
            for key, value in processor.defaults.items()
        }
        self._packing = Packing(used=(len(self._processors),), **shapes)
        self.width = self._packing.size
        """Of a row."""

    @property
    def declared(self) -> Declared:
        """What requests may ask of them."""
        return {
            processor.name: {key: (value.shape, value.dtype.name) for key, value in processor.defaults.items()}
            for processor in self._processors
        }

    def trace(self, vocab_size: int, longest: int) -> None:
        """Trace each of them.

        Raises:
            ConfigError: JAX cannot trace one, or it gives something other than logits.
        """
        number = jax.ShapeDtypeStruct((), jnp.int32)
        state = LogitsState(jax.ShapeDtypeStruct((longest,), jnp.int32), number, number)  # type: ignore[arg-type]
        logits = jax.ShapeDtypeStruct((vocab_size,), jnp.float32)
        for processor in self._processors:
            arguments = {
                key: jax.ShapeDtypeStruct(value.shape, value.dtype) for key, value in processor.defaults.items()
            }
            try:
                found = jax.eval_shape(processor.function, logits, state, **arguments)
            except Exception as error:
                raise ConfigError(
                    f"logits_processors: JAX cannot trace {processor.name}: {type(error).__name__}: {one_line(error)}"
                ) from error
            shape, dtype = getattr(found, "shape", None), getattr(found, "dtype", None)
            if shape != (vocab_size,) or dtype is None or not jnp.issubdtype(dtype, jnp.floating):
                said = type(found).__name__ if shape is None else f"{dtype}{list(shape)}"
                raise ConfigError(
                    f"logits_processors: {processor.name} gives {said}; it must give logits, float32[{vocab_size}]"
                )

    def slot(self, sizes: StepSizes) -> dict[str, tuple[tuple[int, ...], Any]]:
        return {"rows": ((self.width,), jnp.int32)}

    def prepare(self, request: Request, asked: EngineRequest) -> np.ndarray:
        return self.row(request.params.chosen_processors)

    def needs(self, request: Request, extra: np.ndarray) -> Iterable[Key]:
        return [Key("put", 0, frozenset({self.name}))]

    def seat(self, request: Request, extra: np.ndarray) -> None:
        self.around.device.run(Key("put", 0, frozenset({self.name})), np.array([request.slot], np.int32), extra)

    def traced(self, step: TracedStep) -> Traced:
        return _Processing(self, step.parts[self.name]["rows"])

    def row(self, chosen: Chosen) -> np.ndarray:
        """What the slot of a request is told that uses these."""
        row = np.zeros(self.width, np.int32)
        views = self._packing.views(row)
        for index, processor in enumerate(self._processors):
            if processor.name not in chosen:
                continue
            views["used"][index] = 1
            given = chosen[processor.name]
            for key, default in processor.defaults.items():
                value = default
                if key in given:
                    value = argument(processor.name, key, given[key], default.shape, default.dtype.name)
                bits = value.astype(np.int32) if value.dtype.kind == "b" else value.view(np.int32)
                views[f"{processor.name}.{key}"][...] = bits
        return row

    def process(
        self, table: Int[Array, "slots n"], logits: Float[Array, "R V"], rows: SamplingRows, slots: Slots
    ) -> Float[Array, "R V"]:
        """The logits that the processors of each row's request make of its own, one after another."""
        fields = self._packing.unpack(jnp.where((rows.uses & self.bit > 0)[:, None], table[rows.slot], 0))
        history = slots.history[rows.slot, :-1]
        known = jnp.arange(history.shape[1]) <= rows.position[:, None]
        state = LogitsState(jnp.where(known, history, -1), rows.position + 1, rows.prompt_len)
        for index, processor in enumerate(self._processors):
            run = partial(_run, processor, fields, state, fields["used"][:, index] > 0)
            logits = lax.cond(jnp.any(fields["used"][:, index] > 0), run, lambda x: x, logits)
        return logits


class _Processing(Traced):
    def __init__(self, processors: ProcessorsFeature, table: Int[Array, "slots n"]):
        self._processors, self._table = processors, table

    def logits(self, logits: jax.Array, rows: SamplingRows, slots: Slots, x: Fields) -> jax.Array:
        return self._processors.process(self._table, logits, rows, slots)


def _run(
    processor: LogitsProcessor, fields: dict[str, Any], state: LogitsState, used: jax.Array, logits: jax.Array
) -> jax.Array:
    """The logits of rows, those of rows that use the processor as it makes them."""
    arguments = {
        key: _value(fields[f"{processor.name}.{key}"], default.dtype) for key, default in processor.defaults.items()
    }
    found = jax.vmap(lambda row, told, given: processor.function(row, told, **given))(logits, state, arguments)
    return jnp.where(used[:, None], found.astype(logits.dtype), logits)


def _value(bits: jax.Array, dtype: np.dtype) -> jax.Array:
    return bits != 0 if dtype.kind == "b" else lax.bitcast_convert_type(bits, dtype)


def processors_of(features: Features) -> ProcessorsFeature:
    """Those of an engine that samples."""
    found = features[ProcessorsFeature.name]
    assert isinstance(found, ProcessorsFeature)
    return found
