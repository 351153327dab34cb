"""Steps that read hidden states which a backbone has left: scores of tokens, sums, logits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.engine.device.keys import Key, Kind
from jaxllm.engine.device.packing import (
    logits_packing,
    pool_packing,
    score_packing,
)
from jaxllm.engine.device.sampler import token_logprobs
from jaxllm.engine.device.step_builder import StepBuilder
from jaxllm.requests.pooling import MAX_TOKEN_IDS


class ReadoutSteps(StepBuilder):
    """They change nothing on the devices."""

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
            return (model.logits(jnp.where(normed[0], states, model.norm(states))),)

        return self._build(Key("unembed", rows), step, self.state.hidden(rows), self.state.ints(1))

    def _scoring(self, kind: Kind, rows: int, score: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        packing = score_packing(rows)

        def step(weights: Any, hidden: jax.Array, ints: jax.Array) -> Any:
            x = packing.unpack(ints)
            model = self._model(weights)
            return (score(model.logits(hidden[x["hidden_row"]]), x["target"], model.kernels.sums),)

        return self._build(Key(kind, rows), step, self.state.ints(packing.size))
