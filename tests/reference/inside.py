"""Activations and derivatives of tiny models as transformers computes them; `make_inside_goldens` needs torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tests.reference import GOLDENS

FOLDER = GOLDENS / "inside"
POSITIONS = [*range(0, 78, 7), 63, 64, 78]
"""Of the prompt and the greedy tokens after it, all but the last of which are run."""
LOSS_TOKENS = 24
"""Tokens of the prompt whose mean negative log-probability is differentiated."""


class Blocks(NamedTuple):
    """What transformers calls the modules of a layer whose outputs are added to the residual stream."""

    mixers: tuple[str, ...]
    mlp: str


HOOKED = {
    "llama_gqa": Blocks(("self_attn",), "mlp"),
    "lfm2": Blocks(("self_attn", "conv"), "feed_forward"),
    "lfm2_moe": Blocks(("self_attn", "conv"), "feed_forward"),
    "gemma2": Blocks(("post_attention_layernorm",), "post_feedforward_layernorm"),
}
"""Models whose activations are kept: dense, with convolutions, with experts, with norms on what is added."""
DIFFERENTIATED = (
    "llama_gqa", "lfm2", "qwen3_5", "gemma3_small", "mamba2", "deepseek_v2", "lfm2_moe", "gemma4", "gpt_oss",
)  # fmt: skip
"""Dense, convolutions, the gated delta rule, windows, state-space layers, latents, experts, shared keys, sinks."""


STEERED = ("llama_gqa", "lfm2")
STEERED_LAYER = 1
STEERED_POSITIONS = {"all": range(0, 96), "part": range(10, 40)}

PATCHED_PLACES = {"prompt": ((1, 12), (0, 30), (2, 31), (1, 31), (1, 63)), "generated": ((0, 12), (1, 66), (2, 68))}
"""(layer, position) of what is patched: in the prompt alone, and beside it in the greedy tokens after it."""
ATTENDED = ("llama_gqa", "gemma3_small", "lfm2")
ATTENDED_TOKENS = 40
"""Tokens of the prompt whose attention is kept."""


def patches(which: str, width: int) -> dict[tuple[int, int], np.ndarray]:
    """What takes the place of the stream as the layer ends: zeros at the first of the places."""
    drawn = np.random.default_rng(13).standard_normal((len(PATCHED_PLACES[which]), width)).astype(np.float32)
    drawn[0] = 0
    return dict(zip(PATCHED_PLACES[which], drawn, strict=True))


def steering_vector(width: int) -> np.ndarray:
    """What is added to the stream as STEERED_LAYER ends; it moves the logits by a lot."""
    return np.random.default_rng(11).standard_normal(width).astype(np.float32)


@dataclass(frozen=True)
class InsideGolden:
    """What transformers computes inside a model.

    Attributes:
        activations: `[len(POSITIONS), E]` by "point.layer", for models in HOOKED: the residual stream before and after
            each layer, what its blocks add, and "final.-1".
        loss: of the first LOSS_TOKENS tokens of the prompt, for models in DIFFERENTIATED.
        gradient: `[LOSS_TOKENS, E]`, the loss's derivative by the rows of the embedding table that these tokens have.
        steered: `[T, V]`, the prompt's logits by "all" and "part", where the stream is steered at STEERED_POSITIONS.
        steered_tokens: those that greedy decoding appends to the prompt then.
        patched, patched_tokens: the same where the stream is patched at PATCHED_PLACES.
        attention: of the first ATTENDED_TOKENS tokens of the prompt, for models in ATTENDED: by "weights.layer",
            `[H, T, T]`, and by "keys.layer" and "values.layer", `[T, K, D]`, as transformers' cache holds them.
    """

    activations: dict[str, np.ndarray]
    loss: float
    gradient: np.ndarray
    steered: dict[str, np.ndarray]
    steered_tokens: dict[str, list[int]]
    patched: dict[str, np.ndarray]
    patched_tokens: dict[str, list[int]]
    attention: dict[str, np.ndarray]


def load_inside(name: str) -> InsideGolden:
    """The golden of a model in HOOKED or DIFFERENTIATED."""
    with np.load(FOLDER / f"{name}.npz") as stored:
        arrays = dict(stored)
    loss, gradient = float(arrays.pop("loss", np.nan)), arrays.pop("gradient", np.zeros(0))
    steered = {which: arrays.pop(f"steered.{which}") for which in STEERED_POSITIONS if f"steered.{which}" in arrays}
    tokens = {which: arrays.pop(f"tokens.{which}").tolist() for which in steered}
    patched = {which: arrays.pop(f"patched.{which}") for which in PATCHED_PLACES if f"patched.{which}" in arrays}
    after = {which: arrays.pop(f"patched_tokens.{which}").tolist() for which in patched}
    attention = {key: arrays.pop(key) for key in list(arrays) if key.split(".")[0] in ("weights", "keys", "values")}
    return InsideGolden(arrays, loss, gradient, steered, tokens, patched, after, attention)
