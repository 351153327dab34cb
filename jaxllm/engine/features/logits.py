"""What changes logits before a token is chosen: a request's own rules, and a caller's own functions.

A request's rules are penalties, logit_bias, min_tokens, bad_words and allowed_token_ids. A slot keeps what it was told
after its request has ended; its `uses` say whose turn it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxllm.engine.core.feature import Feature, Fields, Plan, Traced, TracedStep
from jaxllm.engine.core.keys import Key
from jaxllm.engine.core.packing import Packing
from jaxllm.engine.core.registry import Features
from jaxllm.engine.core.request import Request
from jaxllm.engine.core.sampler import ALL, NEGATIVE, SamplingRows, apply_mask, mask_of, mask_words
from jaxllm.engine.core.sizes import StepSizes
from jaxllm.engine.core.slots import Slots
from jaxllm.engine.messages import EngineRequest
from jaxllm.errors import ConfigError, one_line
from jaxllm.requests.logits_processors import Chosen, Declared, LogitsProcessor, LogitsState, argument
from jaxllm.requests.sampling import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from jaxllm.text.spellings import MAX_SPELLING_LENGTH, MAX_SPELLINGS, spellings

MAX_BLOCKED = MAX_STOP_TOKEN_IDS + 32
"""Stop token ids plus the model's own end-of-sequence ids."""

AdjustmentRows = dict[str, np.ndarray]
"""What one slot is told, by the names of `AdjustmentsFeature.slot`."""


class AdjustmentsFeature(Feature):
    """Its rows: `bias_ids` [B] and `bias_values` [B], padded with the vocabulary's size, which nothing matches;
    `blocked_ids` [M] that min_tokens holds back while the new token's position is below `blocked_until`; `allowed`
    [V/32] with one bit a token; `bad_words` [W, 16], token sequences that end at the last column, -1 before them;
    `window`, how many of the last tokens the `penalties` (presence, frequency, repetition) look at.
    """

    name = "adjustments"
    on = ("decode", "verify", "head")
    in_sampler = True
    reads_history = True
    asked_by = ("adjusts_logits",)

    def plan(self, buckets: Any) -> Plan:
        return Plan() if buckets.encodes else Plan(soon=[Key("put", 0, frozenset({self.name}))])

    def slot(self, sizes: StepSizes) -> dict[str, tuple[tuple[int, ...], Any]]:
        return {
            "bias_ids": ((MAX_LOGIT_BIAS,), jnp.int32),
            "bias_values": ((MAX_LOGIT_BIAS,), jnp.float32),
            "blocked_ids": ((MAX_BLOCKED,), jnp.int32),
            "blocked_until": ((1,), jnp.int32),
            "allowed": ((mask_words(sizes.vocab_size),), jnp.int32),
            "bad_words": ((MAX_SPELLINGS, MAX_SPELLING_LENGTH), jnp.int32),
            "window": ((1,), jnp.int32),
            "penalties": ((3,), jnp.float32),
        }

    def prepare(self, request: Request, asked: EngineRequest) -> AdjustmentRows:
        p, around = request.params, self.around
        words = () if around.tokenizer is None or not p.bad_words else spellings(around.tokenizer, p.bad_words)
        vocab_size = around.sizes.vocab_size
        rows: AdjustmentRows = {
            name: np.zeros(shape, dtype) for name, (shape, dtype) in self.slot(around.sizes).items()
        }
        rows["bias_ids"][:], count = vocab_size, len(p.logit_bias)
        rows["bias_ids"][:count], rows["bias_values"][:count] = list(p.logit_bias), list(p.logit_bias.values())
        stops = [*p.stop_token_ids, *(() if p.ignore_eos else around.eos_token_ids)]
        rows["blocked_ids"][:] = vocab_size
        rows["blocked_ids"][: len(stops)] = stops
        rows["blocked_until"][...] = request.num_prompt + p.min_tokens
        allowed = p.allowed_token_ids
        rows["allowed"][:] = ALL if allowed is None else mask_of(allowed, vocab_size)
        rows["bad_words"][:] = -1
        rows["bad_words"][:, -1] = vocab_size
        for row, tokens in zip(rows["bad_words"], words, strict=False):
            row[-len(tokens) :] = tokens
        rows["window"][...] = 2**30 if p.repeat_last_n is None else p.repeat_last_n
        rows["penalties"][:] = p.presence_penalty, p.frequency_penalty, p.repetition_penalty
        return rows

    def seat(self, request: Request, extra: AdjustmentRows) -> None:
        values = jax.tree.leaves(extra)
        self.around.device.run(Key("put", 0, frozenset({self.name})), np.array([request.slot], np.int32), *values)

    def traced(self, step: TracedStep) -> Traced:
        return _Adjusting(self.name, self.bit)


class _Adjusting(Traced):
    of_sampler = True

    def __init__(self, name: str, bit: int):
        self._name, self._bit = name, bit

    def logits(self, logits: jax.Array, rows: SamplingRows, slots: Slots, x: Fields) -> jax.Array:
        used = rows.uses & self._bit > 0
        own = slots.of[self._name]
        return lax.cond(jnp.any(used), adjust_logits, lambda found, *_: found, logits, used, rows, slots.history, own)


def adjust_logits(
    logits: Float[Array, "R V"],
    used: Any,
    rows: SamplingRows,
    slot_history: Int[Array, "slots L"],
    own: dict[str, jax.Array],
) -> Float[Array, "R V"]:
    """Penalties, logit_bias, min_tokens, bad_words and allowed_token_ids, in the rows that are `used`."""
    raw, x = logits, {name: kept[rows.slot] for name, kept in own.items()}
    index = jnp.arange(logits.shape[0])[:, None]
    history = slot_history[rows.slot]
    at = jnp.arange(history.shape[1])
    known = (at <= rows.position[:, None]) & (at > rows.position[:, None] - x["window"])
    generated = known & (at >= rows.prompt_len[:, None])

    def count(mask: jax.Array) -> jax.Array:
        return jnp.zeros_like(logits).at[index, history].add(mask.astype(logits.dtype), mode="drop")

    out_counts = count(generated)
    repeated = (count(known & ~generated) > 0) | (out_counts > 0)
    presence, frequency, penalty = x["penalties"].T[:, :, None]
    logits = jnp.where(repeated, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
    logits = logits - frequency * out_counts - presence * (out_counts > 0)
    logits = logits.at[index, x["bias_ids"]].add(x["bias_values"], mode="drop")
    held_back = rows.position[:, None] + 1 < x["blocked_until"]
    blocked = jnp.where(held_back, x["blocked_ids"], logits.shape[1])
    logits = logits.at[index, blocked].set(NEGATIVE, mode="drop")
    bad = _bad_tokens(rows, history, x["bad_words"], logits.shape[1])
    logits = logits.at[index, bad].set(NEGATIVE, mode="drop")
    logits = apply_mask(logits, x["allowed"])
    return jnp.where(used[:, None], logits, raw)


def _bad_tokens(
    rows: SamplingRows, history: Int[Array, "R L"], words: Int[Array, "R W 16"], vocab: int
) -> Int[Array, "R W"]:
    length = words.shape[2]
    at = rows.position[:, None] - jnp.arange(length - 2, -1, -1)
    generated = at >= rows.prompt_len[:, None]
    before = jnp.where(generated, jnp.take_along_axis(history, jnp.maximum(at, 0), axis=1), vocab)
    spelled = (words[:, :, :-1] == before[:, None]) | (words[:, :, :-1] < 0)
    return jnp.where(spelled.all(-1), words[:, :, -1], vocab)


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

    def __init__(self, processors: Sequence[LogitsProcessor] = ()):
        self._processors = tuple(processors)
        shapes = {
            f"{processor.name}.{key}": value.shape
            for processor in self._processors
            for key, value in processor.defaults.items()
        }
        self._packing = Packing(used=(len(self._processors),), **shapes)
        self.width = self._packing.size

    @property
    def declared(self) -> Declared:
        return {
            processor.name: {key: (value.shape, value.dtype.name) for key, value in processor.defaults.items()}
            for processor in self._processors
        }

    def trace(self, vocab_size: int, longest: int) -> None:
        """Trace each of them. Raises ConfigError: JAX cannot trace one, or it gives something other than logits."""
        number = jax.ShapeDtypeStruct((), jnp.int32)
        state = LogitsState(jax.ShapeDtypeStruct((longest,), jnp.int32), number, number)  # type: ignore[arg-type]
        logits = jax.ShapeDtypeStruct((vocab_size,), jnp.float32)
        for processor in self._processors:
            arguments = {key: jax.ShapeDtypeStruct(v.shape, v.dtype) for key, v in processor.defaults.items()}
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
        return _Processing(self._processors, self._packing, step.parts[self.name]["rows"], self.bit)

    def row(self, chosen: Chosen) -> np.ndarray:
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


@dataclass(frozen=True)
class _Processing(Traced):
    processors: Sequence[LogitsProcessor]
    packing: Packing
    table: Int[Array, "slots n"]
    bit: int

    def logits(self, logits: jax.Array, rows: SamplingRows, slots: Slots, x: Fields) -> jax.Array:
        """The logits that the processors of each row's request make of its own, one after another."""
        fields = self.packing.unpack(jnp.where((rows.uses & self.bit > 0)[:, None], self.table[rows.slot], 0))
        history = slots.history[rows.slot, :-1]
        known = jnp.arange(history.shape[1]) <= rows.position[:, None]
        state = LogitsState(jnp.where(known, history, -1), rows.position + 1, rows.prompt_len)
        for index, processor in enumerate(self.processors):
            run = partial(_run, processor, fields, state, fields["used"][:, index] > 0)
            logits = lax.cond(jnp.any(fields["used"][:, index] > 0), run, lambda x: x, logits)
        return logits


def _run(
    processor: LogitsProcessor, fields: dict[str, Any], state: LogitsState, used: jax.Array, logits: jax.Array
) -> jax.Array:
    given = processor.defaults.items()
    arguments = {key: _value(fields[f"{processor.name}.{key}"], default.dtype) for key, default in given}
    found = jax.vmap(lambda row, told, given: processor.function(row, told, **given))(logits, state, arguments)
    return jnp.where(used[:, None], found.astype(logits.dtype), logits)


def _value(bits: jax.Array, dtype: np.dtype) -> jax.Array:
    return bits != 0 if dtype.kind == "b" else lax.bitcast_convert_type(bits, dtype)


def processors_of(features: Features) -> ProcessorsFeature:
    found = features[ProcessorsFeature.name]
    assert isinstance(found, ProcessorsFeature)
    return found
