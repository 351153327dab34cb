"""A step is a small message: a Device that is sent the same ones as another comes to hold the same, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm import LLM, LoRARequest, SamplingParams, Steer
from jaxllm.engine.core.device import Device
from jaxllm.engine.core.executables import Executables
from jaxllm.engine.core.keys import SAMPLED, USES, Key
from jaxllm.engine.features import features_of
from jaxllm.engine.features.drafts.feature import DraftsFeature
from jaxllm.engine.features.drafts.rules import DraftDepth, NgramDrafts
from jaxllm.models.registry import AdaptedModel
from tests.engine.step_sizes import step_sizes
from tests.reference.adapters import write_adapter
from tests.reference.tiny import write_checkpoint
from tests.support.sizes import FIELDS

Message = tuple[Key, tuple[Any, ...]]


def device_of(llm: LLM) -> Device:
    return llm._streams.client._loop._core._runner.device  # type: ignore[attr-defined]


def halved(logits: Any, state: Any) -> Any:
    return logits / 2


def held(device: Device) -> list[np.ndarray]:
    """Copies of all that lives on the device between steps."""
    return [np.array(a) for a in jax.tree.leaves({k: v for k, v in device._parts.items() if k != "weights"})]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama_gqa")
    write_checkpoint("llama_gqa", path)
    return path


DRAFTS: dict[str, Any] = {"speculative_config": {"method": "suffix", "num_speculative_tokens": 2}}
ADAPTERS: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 4}


EVERY_ENGINES = {
    "decode", "backbone", "head", "score", "score_given", "score_all", "sums", "unembed", "admit", "adjustments",
    "history", "steering", "processors",
}  # fmt: skip
"""Kinds of steps, and what is put and read by its word."""


@pytest.mark.parametrize(
    ("more", "kinds"),
    [
        ({}, set()),
        (DRAFTS, {"verify", "recall"}),
        (ADAPTERS, {"adapters", "scales"}),
        (DRAFTS | ADAPTERS, {"verify", "recall", "adapters", "scales"}),
    ],
)
def test_a_device_that_is_sent_the_same_messages_holds_the_same(
    directory: Path, tmp_path: Path, more: dict[str, Any], kinds: set[str]
) -> None:
    messages: list[Message] = []
    given: list[Any] = []
    adapter = LoRARequest("one", 1, write_adapter(tmp_path, directory, ["q_proj", "down_proj"]))
    more = more | {"logits_processors": [halved]}
    with LLM(directory, **FIELDS, **more) as leader, LLM(directory, **FIELDS, **more) as follower:
        device = device_of(leader)
        run = device.run

        def record(key: Key, *vectors: Any) -> Any:
            messages.append((key, jax.tree.map(np.array, vectors)))
            given.append(run(key, *vectors))
            return given[-1]

        device.run = record  # type: ignore[method-assign]
        prompts = [[5, 6, 7], list(range(3, 40)), [9] * 17]
        leader.generate(prompts, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True), use_tqdm=False)
        sampled = SamplingParams(
            temperature=0.9, seed=3, max_tokens=9, ignore_eos=True, presence_penalty=0.4, logit_bias={4: 2.0}
        )
        leader.generate(prompts, sampled, use_tqdm=False)
        leader.generate(prompts, SamplingParams(max_tokens=2, prompt_logprobs=3), use_tqdm=False)
        leader.generate(prompts, SamplingParams(max_tokens=2, prompt_logprobs=-1), use_tqdm=False)
        leader.score(prompts, [[4]] * 3, use_tqdm=False)
        leader.capture(prompts, {"residual": 1, "final": True}, use_tqdm=False)
        leader.generate(prompts, sampled, use_tqdm=False, steer=Steer(0, np.ones(leader.info.hidden_size)))
        leader.generate(prompts, SamplingParams(max_tokens=3, logits_processors=["halved"]), use_tqdm=False)
        leader.unembed(np.ones((2, leader.info.hidden_size)))
        leader.embed(prompts)
        if "adapters" in kinds:
            leader.generate(prompts, sampled, use_tqdm=False, lora_request=[adapter, None, adapter])
        expected = jax.tree.leaves(jax.tree.map(np.array, [a for a in given if a is not None]))

        other = device_of(follower)
        got = [other.run(key, *vectors) for key, vectors in messages]
        found = jax.tree.leaves(jax.tree.map(np.array, [a for a in got if a is not None]))
        for ours, theirs in zip([*found, *held(other)], [*expected, *held(device)], strict=True):
            np.testing.assert_array_equal(ours, theirs)
    every = {
        name for key, _ in messages for name in ([key.kind] if key.kind not in ("put", "read") else [*key.variant])
    }
    assert every >= EVERY_ENGINES | kinds
    adapted = any("adapters" in key.variant for key, _ in messages if key.kind not in ("put", "read"))
    assert ("adapters" in kinds) == adapted
    assert all(isinstance(a, np.ndarray) for _, vectors in messages for a in jax.tree.leaves(vectors))


RULE = NgramDrafts(3, 1, 2, remembered=64)
FEATURES = features_of(
    step_sizes(), widest_activation=16, adapted=AdaptedModel(None, None, ()), adapter_places=2,
    drafts=DraftsFeature(RULE, DraftDepth(3)), offloads=True,
)  # fmt: skip


class Echo(Executables):
    """Stands in for Executables: each step gives back the names of what it was to give."""

    most_rows = 4
    features = FEATURES

    def __init__(self) -> None:
        pass

    def new_part(self, name: str) -> str:
        return name

    def get(self, key: Key) -> Callable[..., tuple[str, ...]]:
        uses = FEATURES.uses(key)

        def step(*arguments: str) -> tuple[str, ...]:
            assert arguments == (*uses.takes, "sent")
            return (*uses.gives, *["output"] * uses.output)

        return step


def test_what_a_step_gives_back_takes_the_place_of_what_it_took() -> None:
    names = ("weights", "caches", "slots", "hidden", "adapters", "drafts")
    device = Device(Echo(), (), {name: name for name in names if name != "weights"})
    device._parts["weights"] = "weights"
    puts = ("admit", "history", "adjustments", "recall", "adapters", "scales", "steering", "processors")
    reads = ("score", "score_given", "score_all", "sums", "token_logits", "unembed")
    keys = [Key("put", 0, frozenset({word})) for word in puts] + [Key("read", 1, frozenset({word})) for word in reads]
    keys += [Key(kind, 1, frozenset({word})) for kind in ("copy_in", "copy_out") for word in ("page", "state")]
    for wanted in (frozenset(), SAMPLED, frozenset({"steering"}), frozenset({"captures2", "patching4"})):
        steps = ("decode", "verify", "backbone", "head")
        keys += [Key(kind, 1, variant) for kind in steps for variant in FEATURES.variants(kind, wanted)]
    keys += [Key("took", 1), *(Key("layers", 1, frozenset({of})) for of in ("decode", "backbone"))]
    for key in keys:
        uses = FEATURES.uses(key)
        assert set(uses.gives) <= set(uses.takes)
        assert device.run(key, "sent") == ("output" if uses.output else None)
    assert {key.kind for key in keys} == set(USES) - {"encode"}
    assert device._parts == {name: name for name in (*names, "steering", "processors")}
