"""What a caller may ask of the model besides text: a vector, or the likelihood of given tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxllm.errors import InvalidRequestError

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
