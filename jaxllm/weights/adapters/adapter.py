"""What an adapter changes in a model, whatever its format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float, Shaped


@dataclass(frozen=True)
class LowRank:
    """What is added to the matrix of one linear layer, `[out, in]`: `weight + scale * b @ a`.

    With a magnitude it is DoRA (Liu et al. 2024, arXiv:2402.09353): each row of that sum is then scaled to have this
    length, `magnitude / norm(weight + scale * b @ a, axis=1)`.

    Attributes:
        a: `[r, in]`, as stored.
        b: `[out, r]`, as stored.
        scale: alpha / r, or alpha / sqrt(r) with rsLoRA.
        magnitude: `[out]`, the length of each row.
        transposed: whether the checkpoint has this matrix as `[in, out]`: so do GPT-2's layers, and an embedding, whose
            inputs are the vocabulary.
    """

    a: Shaped[np.ndarray, "r in"]
    b: Shaped[np.ndarray, "out r"]
    scale: float
    magnitude: Shaped[np.ndarray, " out"] | None = None
    transposed: bool = False

    @property
    def rank(self) -> int:
        """The number of rows of `a`."""
        return self.a.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """Of the checkpoint's tensor."""
        shape = (self.b.shape[0], self.a.shape[1])
        return shape[::-1] if self.transposed else shape

    def added_to(self, weight: Shaped[np.ndarray, "N M"], strength: float = 1.0) -> Float[np.ndarray, "N M"]:
        """The checkpoint's tensor with this in it, float32; `strength` multiplies `scale`."""
        whole = np.array(weight.T if self.transposed else weight, np.float32)
        whole += (self.scale * strength) * (self.b.astype(np.float32) @ self.a.astype(np.float32))
        if self.magnitude is not None:
            whole *= (self.magnitude.astype(np.float32) / np.linalg.norm(whole, axis=1))[:, None]
        return whole.T if self.transposed else whole


@dataclass(frozen=True)
class Adapter:
    """An adapter in memory.

    Attributes:
        format: "peft" or "gguf": whose tensor names are used. PEFT's are those of the language model alone
            (`model.layers.0.self_attn.q_proj.weight`), also where a multimodal model has it under another name.
        path: the folder or file.
        updates: what is added to which tensor of the model.
        replaced: tensors that take the place of the model's, before anything is added to them: those of PEFT's
            `modules_to_save`, and biases that were trained.
        base_model: what the adapter says of the model that it was trained on, to be shown to people.
    """

    format: str
    path: Path
    updates: dict[str, LowRank]
    replaced: dict[str, np.ndarray]
    base_model: str | None = None

    @property
    def rank(self) -> int:
        """The greatest of its matrices; 0 where it only replaces tensors."""
        return max((update.rank for update in self.updates.values()), default=0)
