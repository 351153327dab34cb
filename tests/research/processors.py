"""Logits processors, and the same in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm import LLM, LogitsState

PENALTY = 30.0


def fresh(logits: jax.Array, state: LogitsState) -> jax.Array:
    """No token of the prompt or the completion comes again."""
    return logits.at[state.tokens].add(jnp.where(state.tokens >= 0, -PENALTY, 0.0))


def nudge(
    logits: jax.Array, state: LogitsState, *, ids: Any = np.zeros(2, np.int32), by: Any = 4.0, late: Any = False
) -> jax.Array:
    """Two tokens are more likely; where it is late, only behind the second that is generated."""
    begun = state.length - state.prompt_length >= 2
    return logits.at[ids].add(jnp.where(begun | ~late, by, 0.0))


def stripes(logits: jax.Array, state: LogitsState) -> jax.Array:
    """Even tokens at even positions, odd ones at odd."""
    allowed = jnp.arange(logits.shape[0]) % 2 == state.length % 2
    return jnp.where(allowed, logits, -jnp.inf)


PROCESSORS = [fresh, nudge, stripes]


def _fresh(logits: np.ndarray, tokens: list[int], num_prompt: int) -> np.ndarray:
    found = logits.copy()
    np.add.at(found, tokens, -PENALTY)
    return found


def _nudge(
    logits: np.ndarray, tokens: list[int], num_prompt: int, ids: Any = (0, 0), by: float = 4.0, late: bool = False
) -> np.ndarray:
    found = logits.copy()
    if not late or len(tokens) - num_prompt >= 2:
        np.add.at(found, list(ids), by)
    return found


def _stripes(logits: np.ndarray, tokens: list[int], num_prompt: int) -> np.ndarray:
    return np.where(np.arange(len(logits)) % 2 == len(tokens) % 2, logits, -np.inf)


BY_HAND: dict[str, Callable[..., np.ndarray]] = {"fresh": _fresh, "nudge": _nudge, "stripes": _stripes}


def processed(chosen: dict[str, dict[str, Any]], logits: np.ndarray, tokens: list[int], num_prompt: int) -> np.ndarray:
    """What the processors that a request has chosen make of its logits, in the order of PROCESSORS."""
    for name, function in BY_HAND.items():
        if name in chosen:
            logits = function(logits, tokens, num_prompt, **chosen[name])
    return logits


def by_hand(
    llm: LLM,
    prompt: list[int],
    count: int,
    chosen: dict[str, dict[str, Any]],
    then: Callable[[np.ndarray, list[int]], np.ndarray] = lambda logits, tokens: logits,
) -> list[int]:
    """The greedy completion where each step's logits are changed in NumPy, by `then` after the processors."""
    tokens = list(prompt)
    for _ in range(count):
        (rows,) = llm.logits(tokens, "last", use_tqdm=False)
        logits = then(processed(chosen, rows[0], tokens, len(prompt)), tokens)
        first, second = np.sort(logits)[[-1, -2]]
        assert first - second > 1e-3, "two tokens are nearly tied"
        tokens.append(int(np.argmax(logits)))
    return tokens[len(prompt) :]
