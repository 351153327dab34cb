"""Which adapters a request asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike, fspath

import msgspec

from jaxllm.errors import InvalidRequestError


class AdapterUse(msgspec.Struct, frozen=True):
    """One adapter, and how much of it is added.

    `id` says which version of the adapter it is: what is read from `path` under one id is kept, and so are the prefixes
    that were computed with it. Whoever changes the file takes another id.
    """

    id: int
    name: str
    path: str
    scale: float = 1.0


@dataclass(frozen=True)
class LoRARequest:
    """An adapter for a request, in vLLM's words: `LoRARequest("sql", 1, "adapters/sql")`.

    Attributes:
        lora_name: what people call it.
        lora_int_id: its number, from 1; another adapter, or another version of it, needs another number.
        lora_path: a folder as PEFT saves it, or a GGUF file as llama.cpp's converter makes it.
        scale: how much of it is added; 1 is as it was trained.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str | PathLike[str]
    scale: float = 1.0

    @property
    def use(self) -> AdapterUse:
        """The same as the engine is told it."""
        return AdapterUse(self.lora_int_id, self.lora_name, fspath(self.lora_path), self.scale)


LoRA = LoRARequest | Sequence[LoRARequest]
"""One adapter, or several that are added together."""


def adapter_uses(given: LoRA | None) -> tuple[AdapterUse, ...]:
    """What the engine is told of the adapters of one request."""
    if given is None:
        return ()
    requests = [given] if isinstance(given, LoRARequest) else list(given)
    for request in requests:
        if not isinstance(request, LoRARequest):
            raise InvalidRequestError(
                f"lora_request holds {request!r}; accepted are LoRARequests", param="lora_request"
            )
        if isinstance(request.scale, bool) or not isinstance(request.scale, (int, float)) or abs(request.scale) > 1e6:
            raise InvalidRequestError(
                f"the scale of adapter {request.lora_name!r} is {request.scale!r}; accepted are numbers up to 1e6",
                param="lora_request",
            )
    return tuple(request.use for request in requests)
