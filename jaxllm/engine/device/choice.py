"""The end of every step that samples: tokens for rows of hidden states, and where the next step finds them."""

from __future__ import annotations

from typing import NamedTuple

import jax
from jaxtyping import Array, Int

from jaxllm.engine.device.batch import Fields
from jaxllm.engine.device.keys import Variant
from jaxllm.engine.device.processing import ProcessLogits
from jaxllm.engine.device.sampler import Logprobs, SamplingRows, greedy, sample
from jaxllm.engine.device.slots import Slots, settings
from jaxllm.models.predictor import Head


class Settled(NamedTuple):
    """What has become of the tokens that a step tried ahead with each of its sequences."""

    drafted: Int[Array, "S"]
    """How many were tried."""
    taken: Int[Array, "S"]
    """How many of them, from the first on, were what the model chose."""


class Sampled(NamedTuple):
    """What a step hands to the host. `logprobs` is None in the argmax variant, `settled` where no drafts are tried."""

    tokens: jax.Array
    logprobs: Logprobs | None
    settled: Settled | None = None


def choose(
    model: Head, hidden: jax.Array, x: Fields, slots: Slots, variant: Variant, process: ProcessLogits | None = None
) -> tuple[Slots, Sampled]:
    """Sample a token behind each row of `hidden` [R, E], and leave it where the next step will look for it.

    `x` has the slot and the position of each row, and a mask where a grammar has a say. Logits pass `process` first.
    """
    if variant.sampled:
        asked = settings(slots, x["slot"]) | {"slot": x["slot"], "position": x["position"]}
        rows = SamplingRows(**{name: asked[name] for name in SamplingRows._fields})
        tokens, logprobs = sample(model.logits(hidden), rows, slots, x.get("mask"), model.kernels.sums, process)
    else:
        found, logprobs = model.most_likely(hidden), None
        tokens = greedy(model.logits(hidden)) if found is None else found
    history = slots.history.at[x["slot"], x["position"] + 1].set(tokens)
    return slots._replace(history=history), Sampled(tokens, logprobs)
