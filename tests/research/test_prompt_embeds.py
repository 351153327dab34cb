"""A prompt of vectors is answered as the tokens are that these vectors belong to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxllm import LLM, InvalidRequestError, SamplingParams
from tests.reference.tiny import tiny_config, tiny_prompt, write_checkpoint
from tests.support.sizes import FIELDS, few_pages

PARAMS = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)


@pytest.fixture(scope="module", params=["llama_gqa", "gemma3_linear_rope"])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def path(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(name, tmp_path_factory.mktemp(name))


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(path, **FIELDS) as llm:
        yield llm


@pytest.fixture(scope="module")
def table(name: str, path: Path) -> np.ndarray:
    """The vector of each token, as transformers' get_input_embeddings gives it."""
    [rows] = [rows for key, rows in load_file(path / "model.safetensors").items() if "embed_tokens" in key]
    return rows.astype(np.float32) * (tiny_config(name)["hidden_size"] ** 0.5 if "gemma" in name else 1)


def tokens(llm: LLM, prompts: list[object]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, PARAMS, use_tqdm=False)]  # type: ignore[arg-type]


def test_vectors_are_answered_as_their_tokens_beside_prompts_of_these(llm: LLM, name: str, table: np.ndarray) -> None:
    """Of two prompts of the same length, which come in chunks; later times their prefixes are in the cache."""
    first, second = tiny_prompt(name)[:50], tiny_prompt(name)[10:60]
    expected = tokens(llm, [first, second])
    assert expected[0] != expected[1]
    asked = [{"prompt_embeds": table[first]}, {"prompt_embeds": table[second][None]}, first, second]
    for _ in range(2):
        assert tokens(llm, asked) == expected * 2
        assert tokens(llm, asked[::-1]) == expected[::-1] * 2
    assert tokens(llm, [{"prompt_embeds": table[first] + 0.5}]) != expected[:1]


def test_preemption_begins_with_the_vectors_again(name: str, path: Path, llm: LLM, table: np.ndarray) -> None:
    prompts = [tiny_prompt(name)[at : at + 20] for at in range(12)]
    expected = tokens(llm, prompts)
    with few_pages(14), LLM(path, **FIELDS) as other:
        assert tokens(other, [{"prompt_embeds": table[prompt]} for prompt in prompts]) == expected
        assert other.stats().num_preemptions > 0


@pytest.mark.parametrize(
    ("shape", "said"),
    [((5,), r"\[5\]; it must be \[tokens,"), ((0, 64), "it must be"), ((3, 2), r"\[3, 2\]"),
     ((2, 3, 64), "it must be"), ((128, 64), "of 1 to 127 tokens")],
)  # fmt: skip
def test_what_is_no_prompt_is_refused(llm: LLM, shape: tuple[int, ...], said: str) -> None:
    width = llm.info.hidden_size
    given = np.zeros([width if size == 64 else size for size in shape])
    with pytest.raises(InvalidRequestError, match=f"prompt_embeds .*{said}") as error:
        llm.generate([{"prompt_embeds": given}], PARAMS)
    assert error.value.param == "prompt_embeds"
    with pytest.raises(InvalidRequestError, match="is no array of numbers"):
        llm.generate([{"prompt_embeds": [[1, 2], [3]]}], PARAMS)
    with pytest.raises(InvalidRequestError, match="not finite"):
        llm.generate([{"prompt_embeds": np.full((3, width), np.nan)}], PARAMS)
    with pytest.raises(InvalidRequestError, match="patch is set for a prompt of vectors"):
        llm.generate([{"prompt_embeds": np.zeros((3, width))}], PARAMS, patch={(0, 0): np.zeros(width)})
    with pytest.raises(InvalidRequestError, match="it must have 'prompt' or 'prompt_token_ids'"):
        llm.logits([{"prompt_embeds": given}])
