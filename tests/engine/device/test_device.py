"""A step is a small message: a Device that is sent the same ones as another comes to hold the same, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.engine.device.device import Device
from jaxllm.engine.device.executables import Executables
from jaxllm.engine.device.keys import USES, Key
from jaxllm.engine.device.step import DeviceState
from tests.reference.tiny import write_checkpoint

FIELDS = {
    "dtype": "float32", "skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 96, "max_num_seqs": 4,
    "max_num_batched_tokens": 32, "kv_cache_memory": "16MiB", "block_size": 8,
    "decode_buckets": (), "prefill_buckets": (),
}  # fmt: skip

Message = tuple[Key, tuple[Any, ...]]


def device_of(llm: LLM) -> Device:
    return llm._streams.client._loop._core._runner._device  # type: ignore[attr-defined]


def held(device: Device) -> list[np.ndarray]:
    """Copies of all that lives on the device between steps."""
    return [np.array(a) for a in jax.tree.leaves({k: v for k, v in device._parts.items() if k != "weights"})]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama_gqa")
    write_checkpoint("llama_gqa", path)
    return path


@pytest.mark.parametrize("decode", ["decode", "verify"])
def test_a_device_that_is_sent_the_same_messages_holds_the_same(directory: Path, decode: str) -> None:
    drafts = {"speculative_config": {"num_speculative_tokens": 2}} if decode == "verify" else {}
    messages: list[Message] = []
    given: list[Any] = []
    with LLM(directory, **FIELDS, **drafts) as leader, LLM(directory, **FIELDS, **drafts) as follower:
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
        leader.embed(prompts)
        expected = jax.tree.leaves(jax.tree.map(np.array, [a for a in given if a is not None]))

        other = device_of(follower)
        got = [other.run(key, *vectors) for key, vectors in messages]
        found = jax.tree.leaves(jax.tree.map(np.array, [a for a in got if a is not None]))
        for ours, theirs in zip([*found, *held(other)], [*expected, *held(device)], strict=True):
            np.testing.assert_array_equal(ours, theirs)
    kinds = {key.kind for key, _ in messages}
    assert kinds >= set(USES) - {"token_logits", "decode", "verify"} | {decode}
    assert all(isinstance(a, np.ndarray) for _, vectors in messages for a in jax.tree.leaves(vectors))


class Echo(Executables):
    """Stands in for Executables: each step gives back the names of what it was to give."""

    most_rows = 4

    def __init__(self) -> None:
        pass

    def get(self, key: Key) -> Callable[..., tuple[str, ...]]:
        uses = USES[key.kind]

        def step(*arguments: str) -> tuple[str, ...]:
            assert arguments == (*uses.takes, "sent")
            return (*uses.gives, *["output"] * uses.output)

        return step


def test_what_a_step_gives_back_takes_the_place_of_what_it_took() -> None:
    names = ("weights", "caches", "slots", "hidden")
    device = Device(Echo(), (), DeviceState("caches", "slots", "hidden"))  # type: ignore[arg-type]
    device._parts["weights"] = "weights"
    for kind, uses in USES.items():
        assert set(uses.gives) <= set(uses.takes)
        assert device.run(Key(kind), "sent") == ("output" if uses.output else None)
    assert device._parts == {name: name for name in names}
