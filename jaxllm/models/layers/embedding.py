"""Token embeddings and the output head, both divided over the tensor axis by vocabulary."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxllm.models.layers.params import param, weight
from jaxllm.models.options import BuildOptions
from jaxllm.sharding.mesh import TENSOR, gather_over_tensor, padded_rows, sum_over_tensor, tensor_rank, tensor_size


class VocabEmbedding(nnx.Module):
    """A `[V, E]` table, padded with zero rows so that every device holds the same number."""

    def __init__(self, vocab_size: int, size: int, options: BuildOptions, bias: bool = False):
        layout = padded_rows(vocab_size, options.tp)
        self.weight = weight((layout.rows, size), options.dtype, (TENSOR, None), layout)
        self.bias = param((layout.rows,), jnp.float32, (TENSOR,), layout) if bias else None
        self.kernels = options.kernels
        self.vocab_size = vocab_size

    def __call__(self, tokens: Int[Array, "T"]) -> Float[Array, "T E"]:
        """The embeddings of `tokens`."""
        table = self.weight.get_value()
        if tensor_size() == 1:
            return table.rows(tokens)
        count = table.shape[0]
        local = tokens - tensor_rank() * count
        mine = (local >= 0) & (local < count)
        rows = table.rows(jnp.where(mine, local, 0))
        return sum_over_tensor(jnp.where(mine[:, None], rows, 0))

    def most_likely(self, hidden: Float[Array, "R E"]) -> Int[Array, "R"] | None:
        """The token with the highest score, where the kernels find it without the scores."""
        if self.bias is not None or tensor_size() > 1:
            return None
        return self.kernels.most_likely(hidden, self.weight.get_value(), self.vocab_size)

    def logits(self, hidden: Float[Array, "R E"]) -> Float[Array, "R V"]:
        """float32 scores of every token of the vocabulary, whole on every device."""
        logits = self.kernels.linear(hidden, self.weight.get_value())
        if self.bias is not None:
            logits = logits + self.bias[...]
        return gather_over_tensor(logits)[:, : self.vocab_size]
