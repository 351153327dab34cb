"""The LoRA adapters of one model: which there are, which a request uses, and whether the engine can use one."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from jaxllm.config.parts import LoRAModule
from jaxllm.engine.messages import EngineRequest
from jaxllm.errors import EngineDeadError, Field, InvalidRequestError, JaxLLMError
from jaxllm.requests.outputs import PoolingParams
from jaxllm.requests.sampling import SamplingParams
from jaxllm.requests.steering import AdapterUse

if TYPE_CHECKING:
    from jaxllm.engine.doors.async_llm import AsyncLLM  # imports JAX, for which a wrong command line need not wait

_ids = itertools.count(1)


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter that requests may choose.

    Attributes:
        path: a folder, file or hub id, as it was given.
        id: its name in engines; a new one at each load, so that nothing computed with the old adapter is used.
        number: its name for llama.cpp's clients, from 0; no other adapter of the model gets it.
        parent: the name of its model in listings.
        scale: the strength of its effect where it is chosen by name.
        source: its place on this machine; empty before it is looked for.
    """

    name: str
    path: str
    id: int
    number: int
    parent: str
    scale: float = 1.0
    source: str = ""

    def use(self, scale: float) -> AdapterUse:
        return AdapterUse(id=self.id, name=self.name, path=self.source or self.path, scale=scale)


class ModelAdapters:
    """The adapters of one model, by name; `changing` is held while one is loaded or unloaded."""

    def __init__(self, parent: str, modules: Iterable[LoRAModule] = ()):
        self.changing = asyncio.Lock()
        self._by_name: dict[str, LoadedAdapter] = {}
        self._default_scales: dict[int, float] = {}
        self._next_number = 0
        for module in modules:
            self.keep(self.new(module.name, module.path, module.base_model_name or parent, module.scale))

    def __iter__(self) -> Iterator[LoadedAdapter]:
        return iter(list(self._by_name.values()))

    def get(self, name: str) -> LoadedAdapter | None:
        return self._by_name.get(name)

    def new(self, name: str, path: str, parent: str, scale: float = 1.0, source: str = "") -> LoadedAdapter:
        """An adapter with a number of its own, which can be chosen after `keep`."""
        adapter = LoadedAdapter(name, path, next(_ids), self._next_number, parent, scale, source)
        self._next_number += 1
        return adapter

    def keep(self, adapter: LoadedAdapter) -> None:
        """Requests may choose it from now on, instead of an older one of its name."""
        self.remove(adapter.name)
        self._by_name[adapter.name] = adapter

    def found_at(self, adapter: LoadedAdapter, source: str) -> LoadedAdapter:
        """The same adapter, now that its place on this machine is known."""
        found = self._by_name[adapter.name] = replace(adapter, source=source)
        return found

    def remove(self, name: str) -> None:
        """Requests that come from now on cannot choose it; those that run go on with it."""
        old = self._by_name.pop(name, None)
        if old is not None:
            self._default_scales.pop(old.number, None)

    def default_scale(self, adapter: LoadedAdapter) -> float:
        """Its scale in requests that choose no adapter; 0 is not at all."""
        return self._default_scales.get(adapter.number, 0.0)

    def set_default_scales(self, scales: Mapping[int, float]) -> None:
        """Set those of requests that choose no adapter, by number. Raises InvalidRequestError for an unknown one."""
        self._check(scales)
        self._default_scales = dict(scales)

    def uses(self, scales: Mapping[int, float] | None) -> tuple[AdapterUse, ...]:
        """The adapters of `scales`, by number, or the default ones. Raises InvalidRequestError for an unknown one."""
        if scales is not None:
            self._check(scales)
        chosen = self._default_scales if scales is None else scales
        return tuple(a.use(chosen[a.number]) for a in self if chosen.get(a.number, 0.0) != 0.0)

    def _check(self, scales: Mapping[int, float]) -> None:
        numbers = {adapter.number for adapter in self}
        for at, number in enumerate(scales):
            if number not in numbers:
                known = ", ".join(map(str, sorted(numbers))) or "none: the model has no adapters"
                raise InvalidRequestError([Field("lora", at, "id"), f" is {number}; GET /lora-adapters lists {known}"])


async def check_adapter(engine: AsyncLLM, adapter: LoadedAdapter) -> None:
    """Have the engine compute a token with the adapter. Raises InvalidRequestError if the model cannot use it."""
    writes = engine.info.tasks.why_no_text is None
    request = EngineRequest(
        request_id=f"adapter-{uuid.uuid4().hex}",
        prompt_token_ids=[0],
        sampling_params=SamplingParams(max_tokens=1, temperature=0, detokenize=False),
        pooling=None if writes else PoolingParams(),
        adapters=(adapter.use(1.0),),
    )
    with engine.run([request]) as stream:
        async for gains in stream.arrivals():
            for _, delta in gains:
                if delta.error is not None:
                    kind = EngineDeadError if delta.is_dead else InvalidRequestError if delta.invalid else JaxLLMError
                    reason = delta.error.removeprefix(f"adapter {adapter.name!r}: ")  # the engine's own errors begin so
                    raise kind(f"adapter {adapter.name!r} cannot be used: {reason}")
