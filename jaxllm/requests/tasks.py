"""What a model can be asked for besides text: vectors, classes, the likelihood of given tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from jaxllm.errors import InvalidRequestError

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
        encodes: it is an encoder, which generates nothing, whatever its head gives.
        projects: products follow pooling, so that no other pooling makes its vectors.
        longest_text: tokens of the longest text that it is to be given, where its files say so.
        prompts: what may be put before a text, by name.
        default_prompt: what is put before a text where no name is asked for.
    """

    pooling: Pooling = "last"
    normalize: bool = True
    labels: tuple[str, ...] = ()
    activation: Activation = "softmax"
    judges_pairs: bool = False
    encodes: bool = False
    projects: bool = False
    longest_text: int | None = None
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str = ""

    def prompt(self, name: str | None) -> str:
        """What is put before a text: the default, or what has this name. Raises InvalidRequestError: none has it."""
        if name is None:
            return self.default_prompt
        if name not in self.prompts:
            known = ", ".join(self.prompts) or "none, for this model has no prompts"
            raise InvalidRequestError(f"prompt_name is {name[:60]!r}; accepted are {known}", param="prompt_name")
        return self.prompts[name]

    @property
    def why_no_text(self) -> str | None:
        """Why the model cannot be asked to write, and what it can be asked for; None where it writes."""
        if self.labels:
            classes = ", ".join(self.labels[:5]) + (", …" if len(self.labels) > 5 else "")
            use = "/classify, /score and /rerank" if len(self.labels) == 1 else "/classify"
            kind = "is an encoder, which generates no text;" if self.encodes else "generates no text,"
            return f"this model {kind} it classifies (as {classes}); use {use}"
        if self.encodes:
            return "this model is an encoder, which generates no text; use /v1/embeddings, /score and /rerank"
        return None


MAX_TOKEN_IDS = 64


@dataclass(frozen=True, kw_only=True)
class PoolingParams:
    """What is read off the hidden states of one prompt; nothing is generated.

    Attributes:
        kind: "last" and "cls" are the last and the first token's hidden state behind the final norm, "mean" the mean
            of all of them, each float32 and not normalised; "logits" the last token's logits of `token_ids`.
        token_ids: whose logits; only with kind "logits", where an empty tuple means all of them.

    Raises:
        InvalidRequestError: `token_ids` does not go with `kind`; `param` names the field.
    """

    kind: Literal["last", "cls", "mean", "logits"] = "last"
    token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", tuple(self.token_ids))
        if self.kind not in ("last", "cls", "mean", "logits"):
            raise InvalidRequestError(f"kind is {self.kind!r}; it must be last, cls, mean or logits", param="kind")
        if self.token_ids and self.kind != "logits":
            raise InvalidRequestError(f"token_ids needs kind 'logits', not {self.kind!r}", param="token_ids")
        if len(self.token_ids) > MAX_TOKEN_IDS:
            raise InvalidRequestError(
                f"token_ids has {len(self.token_ids)} ids; it may have {MAX_TOKEN_IDS}", param="token_ids"
            )
