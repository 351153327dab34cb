"""Which tokens of a prompt a prediction depends on, by the derivative of the model: `python examples/gradients.py`."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxllm import LLM

with LLM("smollm2-135m", dtype="float32") as llm:
    tokenizer = llm.get_tokenizer()
    tokens = jnp.array(tokenizer.encode("The Eiffel Tower stands in the city of"))
    (paris,) = tokenizer.encode(" Paris")
    params = llm.params

    # The parameters are an argument: XLA would take those of an enclosing scope for constants, and compile for minutes.
    def score(rows: jax.Array, params: dict[str, Any], tokens: jax.Array) -> jax.Array:
        """The log-probability of " Paris" next, after these rows of the embedding table."""
        return jax.nn.log_softmax(llm.model_fn(params, tokens, rows)[-1])[paris]

    rows = params["embed.weight"][tokens]
    value, gradient = jax.jit(jax.value_and_grad(score))(rows, params, tokens)
    print(f"log-probability of ' Paris': {float(value):.2f}")
    # Gradient times input: how much of the prediction, to first order, is each token's.
    influence = jnp.abs((gradient * rows).sum(axis=-1))
    for token, share in zip(tokens.tolist(), (influence / influence.sum()).tolist(), strict=True):
        print(f"{tokenizer.decode([token])!r:>12} {share:4.0%} {'#' * round(60 * share)}")
