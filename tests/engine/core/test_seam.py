"""An ability that the engine does not have, in one class, without a word about it anywhere else."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import EngineConfig, SamplingParams
from jaxllm.engine.core.device import Device
from jaxllm.engine.core.feature import Feature, Fields, Traced, TracedStep
from jaxllm.engine.core.keys import Key
from jaxllm.engine.core.registry import Features
from jaxllm.engine.core.request import Request
from jaxllm.engine.core.sampler import SamplingRows
from jaxllm.engine.core.sizes import StepSizes
from jaxllm.engine.core.slots import Slots
from jaxllm.engine.features import features_of
from jaxllm.engine.messages import EngineRequest
from jaxllm.engine.scale.data_parallel import Core
from jaxllm.engine.start import plan, prepared
from jaxllm.engine.start.build import build_core
from tests.reference.tiny import write_checkpoint
from tests.support.sizes import FIELDS


class Warmed(EngineRequest):
    """A request whose temperature is `warmth` times as high with each token."""

    warmth: float


class Warming(Feature, Traced):
    """A slot has the warmth of its request, which the device raises to the number of tokens so far."""

    name = "warming"
    on = ("decode", "head")
    rare = samples = has_part = True
    asked_by = ("warmth",)
    put = Key("put", 0, frozenset({name}))
    _warmth: jax.Array

    def slot(self, sizes: StepSizes) -> dict[str, tuple[tuple[int, ...], Any]]:
        return {"warmth": ((), jnp.float32)}

    def prepare(self, request: Request, asked: EngineRequest) -> float | None:
        return asked.warmth if isinstance(asked, Warmed) else None

    def needs(self, request: Request, extra: float) -> Iterable[Key]:
        return [self.put]

    def seat(self, request: Request, extra: float) -> None:
        self.around.device.run(self.put, np.array([request.slot], np.int32), np.float32(extra))

    def traced(self, step: TracedStep) -> Traced:
        found = copy.copy(self)
        found._warmth = step.parts[self.name]["warmth"]
        return found

    def logits(self, logits: jax.Array, rows: SamplingRows, slots: Slots, x: Fields) -> jax.Array:
        warmth = jnp.where(rows.uses & self.bit > 0, self._warmth[rows.slot], 1)
        return logits / (warmth ** (rows.position + 1 - rows.prompt_len))[:, None]


PROMPT = [5, 6, 7, 8]
COLD, WARMTH, COUNT = 0.1, 1.5, 8


class Engine:
    """One with the feature, which notes what runs."""

    def __init__(self, core: Core, ran: list[Key]):
        self._core, self.ran = core, ran

    def answers(self, *requests: EngineRequest) -> list[list[int]]:
        """The tokens of each, all of which come at once; `ran` are the steps that it took."""
        self.ran.clear()
        found: dict[str, list[int]] = {request.request_id: [] for request in requests}
        for request in requests:
            self._core.add(request)
        while self._core.has_work:
            for delta in self._core.turn():
                assert delta.error is None
                found[delta.request_id] += delta.token_ids
        return list(found.values())


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    model, ran, run = write_checkpoint("llama_gqa", tmp_path_factory.mktemp("tiny")), list[Key](), Device.run

    def noted(device: Device, key: Key, *vectors: Any) -> Any:
        ran.append(key)
        return run(device, key, *vectors)

    def with_warming(*given: Any, **more: Any) -> Features:
        return Features([*features_of(*given, **more), Warming()])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "features_of", with_warming)
        patch.setattr(prepared, "saved_executables", lambda *given: None)  # other tests' steps are none of these
        patch.setattr(Device, "run", noted)
        core, _ = build_core(EngineConfig(model=str(model), **FIELDS))
        yield Engine(core, ran)
        core.close()


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": COLD, "seed": 7, "max_tokens": COUNT, "ignore_eos": True} | fields)


def plain(name: str = "plain", prompt: list[int] = PROMPT, **fields: Any) -> EngineRequest:
    return EngineRequest(request_id=name, prompt_token_ids=prompt, sampling_params=params(**fields))


def warmed(name: str = "warmed") -> EngineRequest:
    return Warmed(request_id=name, prompt_token_ids=PROMPT, sampling_params=params(), warmth=WARMTH)


def warms(key: Key) -> bool:
    return Warming.name in key.variant


def test_it_does_what_it_is_for(engine: Engine) -> None:
    """Each token is the one that a request at that temperature, whose prompt is all that came before, would draw."""
    (tokens,) = engine.answers(warmed())
    steps = [plain(str(n), [*PROMPT, *tokens[:n]], temperature=COLD * WARMTH**n, max_tokens=1) for n in range(COUNT)]
    assert [tokens] == [[token for answer in engine.answers(*steps) for token in answer]]
    assert engine.answers(plain()) != [tokens]


def test_a_request_without_it_runs_steps_that_do_not_have_it(engine: Engine) -> None:
    engine.answers(warmed())
    assert {key.kind for key in engine.ran if warms(key)} == {"put", "head", "decode"}
    engine.answers(plain(), plain("greedy", temperature=0))
    assert {"backbone", "head", "decode"} <= {key.kind for key in engine.ran}
    assert not any(map(warms, engine.ran))


def test_requests_with_and_without_it_share_their_steps(engine: Engine) -> None:
    requests = [warmed(), plain(), plain("greedy", temperature=0)]
    apart = [engine.answers(request)[0] for request in requests]
    alone = [key.kind for key in engine.ran if key.kind != "put"]
    assert engine.answers(*requests) == apart
    assert [key.kind for key in engine.ran if key.kind != "put"] == alone
    assert all(warms(key) for key in engine.ran if key.kind in Warming.on)
