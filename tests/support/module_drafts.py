"""What tests of modules that draft from the model's states have in common: MTP modules, and EAGLE-3 heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.engine.core.scheduler import Scheduler
from jaxllm.engine.features.drafts.rules import DraftRecord
from tests.support.sizes import FIELDS
from tests.test_drafts import FEW, assert_equal, told
from tests.test_drafts_on_states import requests_of

SCHEDULES: tuple[dict[str, Any], ...] = (
    {}, {"max_num_batched_tokens": 16, "prefill_buckets": (16,)}, {"decode_steps": 3},
)  # fmt: skip
"""In which drafts are compared with their definition: as always, prompts in chunks, several tokens a dispatch."""


class Definition(Protocol):
    """A module in float64 NumPy."""

    def state(self, embeddings: np.ndarray, hidden: np.ndarray) -> np.ndarray:
        """`[n, E]` behind tokens with these embeddings, which come after those with these states."""

    def scores(self, state: np.ndarray) -> np.ndarray:
        """`[n, V]` of all tokens; where there are none, minus infinity."""


@dataclass
class Oracle:
    """What a module would draft of a text, by its definition, from states that the engine captures."""

    module: Definition
    text: list[int]
    hidden: np.ndarray
    """What the module makes of the model's states of the text."""
    table: np.ndarray
    """The embeddings that it reads."""

    def drafts(self, last: int, count: int) -> list[int]:
        """`count` tokens after the one at place `last` of the text, greedy and among FEW."""
        hidden, tokens = self.hidden[:last], self.text[1 : last + 1]
        found: list[int] = []
        for _ in range(count):
            state = self.module.state(self.table[tokens], hidden)[-1:]
            found.append(FEW[int(self.module.scores(state)[0, FEW].argmax())])
            hidden, tokens = np.concatenate([hidden, state]), [*tokens, found[-1]]
        return found


def captured(llm: LLM, text: list[int], taps: dict[str, Any]) -> list[np.ndarray]:
    """The activations of a text at each place of the one point that `taps` names."""
    one = SamplingParams(temperature=0, max_tokens=1)
    (output,) = llm.generate([text], one, use_tqdm=False, capture=taps, positions="prompt")
    (found,) = output.outputs[0].captures.values()
    return [np.asarray(found[place], np.float64) for place in sorted(found)]


def check_definition(
    directory: str, config: dict[str, Any], differently: dict[str, Any], oracle_of: Callable[[list[int]], Oracle],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """By what each step took of them: tries follow each other but for pauses, in prompts whole and in chunks."""
    steps: list[tuple[int, int, list[int]]] = []
    settle = Scheduler.settle

    def noted(scheduler: Scheduler, result: Any) -> None:
        steps.append((len(result.request.token_ids), result.num_drafted, list(result.tokens)))
        settle(scheduler, result)

    monkeypatch.setattr(Scheduler, "settle", noted)
    if not differently:
        monkeypatch.setattr(DraftRecord, "depth", lambda record, most: most)
    prompt = np.random.default_rng(4).choice([*FEW, 8, 9], 37).tolist()
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, allowed_token_ids=FEW)
    with LLM(directory, **FIELDS | differently, speculative_config=config) as llm:
        for _ in range(2):
            (output,) = llm.generate([prompt], params, use_tqdm=False)
    text = prompt + output.outputs[0].token_ids
    oracle, tried, taken = oracle_of(text), 0, 0
    for known, num_drafted, tokens in steps:
        if num_drafted:
            drafts, right = oracle.drafts(known - 1, num_drafted), text[known : known + num_drafted]
            agreed = next((i for i, (a, b) in enumerate(zip(drafts, right, strict=False)) if a != b), len(right))
            assert len(tokens) - 1 == min(agreed, num_drafted), f"at token {known}"
            tried, taken = tried + num_drafted, taken + len(tokens) - 1
    assert tried > 30 and 0 < taken < tried


def check_answers(plain: LLM, drafting: LLM, alone: int) -> None:
    """Those without drafts, whatever a request asks for: of all together, and of the first `alone` by themselves."""
    prompts, params = requests_of(8, 7)
    expected = told(plain.generate(prompts, params, use_tqdm=False))
    for _ in range(2):  # the second time many a prompt's pages are cached, or the state that it goes on from
        assert_equal(told(drafting.generate(prompts, params, use_tqdm=False)), expected)
    each = zip(prompts[:alone], params, strict=False)
    assert_equal([told(drafting.generate([p], q, use_tqdm=False))[0] for p, q in each], expected[:alone])
    stats = drafting.stats()
    assert 0 < sum(stats.accepted_by_position) < stats.num_draft_tokens


def check_bits(directory: str, config: dict[str, Any]) -> None:
    """At the default dtype no bit of an answer changes."""
    prompts = [[8, 9, 5, 7] * length for length in (1, 4, 9)]
    params = SamplingParams(temperature=1, seed=4, max_tokens=30, ignore_eos=True, allowed_token_ids=FEW, logprobs=2)
    fields = FIELDS | {"dtype": "bfloat16", "decode_buckets": (4,)}
    with LLM(directory, **fields, decode_steps=1) as plain, LLM(directory, **fields, speculative_config=config) as llm:
        assert told(llm.generate(prompts, params, use_tqdm=False)) == told(
            plain.generate(prompts, params, use_tqdm=False)
        )
        assert 0 < sum(llm.stats().accepted_by_position) < llm.stats().num_draft_tokens
