"""Completions are scored as transformers scores them, and what their prompts share is computed once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm import LLM, InvalidRequestError, SamplingParams
from jaxllm.engine.features.readout import Stretch, together
from jaxllm.research.scores import pairs
from tests.reference import load_golden
from tests.reference.tiny import tiny_prompt
from tests.support.tiny_engine import tiny_engine


@pytest.fixture(scope="module", params=["llama_gqa", "lfm2"])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def llm(name: str, tmp_path: Path) -> Iterator[LLM]:
    with tiny_engine(name, tmp_path) as llm:
        yield llm


def logprobs_of_transformers(name: str) -> np.ndarray:
    """`[T, V]`, after each token of the variant's prompt."""
    logits = load_golden(name).logits.astype(np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def test_scores_are_those_of_transformers(llm: LLM, name: str) -> None:
    ids, expected = tiny_prompt(name), logprobs_of_transformers(name)
    cuts = [(1, 3), (20, 21), (30, 64), (63, 64), (8, 24)]
    found = llm.score([ids[:a] for a, _ in cuts], [ids[a:b] for a, b in cuts], use_tqdm=False)
    for (a, b), score in zip(cuts, found, strict=True):
        of_tokens = expected[np.arange(a - 1, b - 1), ids[a:b]]
        assert score.prompt_token_ids == ids[:a] and score.token_ids == ids[a:b]
        np.testing.assert_allclose(score.logprobs, of_tokens, atol=1e-4)
        ranks = [1 + (row > row[token]).sum() for row, token in zip(expected[a - 1 : b - 1], ids[a:b], strict=True)]
        assert score.ranks.tolist() == ranks and score.is_greedy == (ranks == [1] * len(ranks))
        assert score.total == pytest.approx(of_tokens.sum(), abs=1e-3)


def test_a_shared_prompt_is_computed_once(llm: LLM, name: str) -> None:
    prompt = tiny_prompt(name)[:48]
    completions = [[token, 3, token] for token in range(5, 17)]
    together = llm.score([prompt] * 12, completions, use_tqdm=False)
    stats = llm.stats()
    assert stats.cached_prompt_tokens >= 10 * 40, "the whole pages before the last token of the prompt"
    assert [score.num_cached_tokens for score in together].count(0) == 1
    at_once = llm.score(prompt, completions, use_tqdm=False)
    with_cold_cache = llm.generate(
        [prompt + completion for completion in completions],
        SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0), use_tqdm=False,
    )  # fmt: skip
    for score, again, output, completion in zip(together, at_once, with_cold_cache, completions, strict=True):
        assert score.token_ids == again.token_ids == completion
        steps = (output.prompt_logprobs or [])[48:]
        alone = [step[token].logprob for step, token in zip(steps, completion, strict=True) if step is not None]
        np.testing.assert_allclose(score.logprobs, alone, atol=1e-4)
        np.testing.assert_allclose(again.logprobs, alone, atol=1e-4)


def test_scores_of_many_share_rows() -> None:
    request: Any = object()
    stretches = [Stretch(request, range(1, 4), 0), Stretch(request, range(5, 11), 40)]
    parts = list(together(stretches, 4))
    assert [[(s.positions, s.row) for s in part] for part in parts] == [
        [(range(1, 4), 0), (range(5, 6), 40)],
        [(range(6, 10), 41)],
        [(range(10, 11), 45)],
    ]


class Letters:
    """A tokenizer whose tokens are letters, but for "ab" together, behind one that begins every text."""

    def encode(self, text: str) -> list[int]:
        ids = [0]
        for letter in text:
            ids = [*ids[:-1], 100] if letter == "b" and ids[-1] == ord("a") else [*ids, ord(letter)]
        return ids


def test_texts_are_parted_where_their_tokens_part() -> None:
    tokenizer: Any = Letters()
    assert pairs("xa", ["b", "c"], tokenizer) == [([0, 120, 100], 2), ([0, 120, 97, 99], 3)]
    assert pairs(["x", "y"], ["a", "a"], tokenizer) == [([0, 120, 97], 2), ([0, 121, 97], 2)]
    assert pairs("", "c", tokenizer) == [([0, 99], 1)]
    assert pairs([[1, 2]], [[3]], None) == [([1, 2, 3], 2)]
    assert pairs([1, 2], [[3], [4]], None) == [([1, 2, 3], 2), ([1, 2, 4], 2)]


@pytest.mark.parametrize(
    ("prompts", "completions", "said"),
    [
        (["a", "b"], ["c"], "completions has 1 entries for 2 prompts; give one a prompt, or one prompt for all"),
        ("a", [""], r"completions\[0\] is empty; it must have a token"),
        ([[]], [[3]], r"prompts\[0\] is empty; it must have a token that the completion's first one follows"),
        (
            [[1], "a"],
            [[2], [3]],
            r"completions\[1\] is token ids and its prompt text; both must be text, or both token",
        ),
    ],
)
def test_what_cannot_be_scored_is_refused(prompts: Any, completions: Any, said: str) -> None:
    tokenizer: Any = Letters()
    with pytest.raises(InvalidRequestError, match=said):
        pairs(prompts, completions, tokenizer)
