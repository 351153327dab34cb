"""What a checkpoint is made for besides text, as its own files say: front doors take their defaults from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Pooling = Literal["last", "mean", "cls"]
Activation = Literal["softmax", "sigmoid", "identity"]


@dataclass(frozen=True, kw_only=True)
class ModelTasks:
    """How to embed, classify and compare with one model.

    Attributes:
        pooling: which hidden states stand for a text: the last token's, the mean of all, or the first token's.
        normalize: whether its embeddings are of unit length unless asked otherwise.
        labels: names of the classes whose scores the output head gives; empty where it gives the vocabulary's, so that
            the model generates text.
        activation: what turns those scores into probabilities.
        judges_pairs: it was trained to judge a query and a document in the prompt of Qwen3-Reranker.
    """

    pooling: Pooling = "last"
    normalize: bool = True
    labels: tuple[str, ...] = ()
    activation: Activation = "softmax"
    judges_pairs: bool = False
