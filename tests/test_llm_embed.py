"""LLM.embed and LLM.pool against the hidden states that transformers' logits give away."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from jaxllm import LLM
from jaxllm.errors import InvalidRequestError
from jaxllm.requests.outputs import PoolingParams
from tests.reference import load_golden
from tests.reference.tiny import tiny_weights, write_checkpoint
from tests.support.sizes import FIELDS

NAME = "qwen3_embedding"
IDS = load_golden(NAME).prompt_token_ids
POOLED = {"last": lambda x: x[-1], "cls": lambda x: x[0], "mean": lambda x: x.mean(axis=0)}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = write_checkpoint(NAME, tmp_path_factory.mktemp("tiny"))
    with LLM(str(path), **FIELDS | {"max_model_len": None, "max_num_batched_tokens": 16}) as llm:
        yield llm


def hidden(length: int) -> np.ndarray:
    """Word logits are products with the embeddings, of which there are more than channels: so they can be solved."""
    table = tiny_weights(NAME)["embed_tokens.weight"].astype(np.float64)
    return np.linalg.lstsq(table, load_golden(NAME).logits[:length].T.astype(np.float64), rcond=None)[0].T


def test_embed(llm: LLM) -> None:
    outputs = llm.embed([IDS, IDS[:5], IDS[:40]], use_tqdm=False)
    for output, length in zip(outputs, (len(IDS), 5, 40), strict=True):
        expected = hidden(length)[-1] / np.linalg.norm(hidden(length)[-1])
        np.testing.assert_allclose(output.outputs.embedding, expected, atol=1e-4)
        assert output.prompt_token_ids == IDS[:length] and output.finished


def test_a_prompt_may_fill_the_context(llm: LLM) -> None:
    longest = llm.info.max_model_len
    (full,) = llm.embed([[5] * longest], use_tqdm=False)
    assert np.isfinite(full.outputs.embedding).all() and len(full.prompt_token_ids) == longest
    with pytest.raises(InvalidRequestError, match=f"has {longest + 1} tokens; it must fit the context of {longest}"):
        llm.embed([[5] * (longest + 1)], use_tqdm=False)


@pytest.mark.parametrize("kind", POOLED)
def test_pool(llm: LLM, kind: str) -> None:
    lengths = (40, 1, len(IDS))
    outputs = llm.pool([IDS[:n] for n in lengths], PoolingParams(kind=kind), use_tqdm=False)  # type: ignore[arg-type]
    for output, length in zip(outputs, lengths, strict=True):
        np.testing.assert_allclose(output.values, POOLED[kind](hidden(length)), atol=2e-4)


def test_logits_of_some_tokens_and_of_all(llm: LLM) -> None:
    (some,) = llm.pool(IDS, PoolingParams(kind="logits", token_ids=(9, 3)), use_tqdm=False)
    np.testing.assert_allclose(some.values, load_golden(NAME).logits[-1, [9, 3]], atol=1e-4)
    (every,) = llm.pool(IDS, PoolingParams(kind="logits"), use_tqdm=False)
    np.testing.assert_allclose(every.values, load_golden(NAME).logits[-1], atol=1e-4)


def test_nothing_runs_when_one_prompt_is_refused(llm: LLM) -> None:
    before = llm.stats().num_steps
    with pytest.raises(InvalidRequestError, match="token id 999"):
        llm.embed([IDS, [999]], use_tqdm=False)
    assert llm.stats().num_steps == before
