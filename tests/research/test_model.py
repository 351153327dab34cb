"""The engine's model as a function: its logits are the sampler's, its derivative is what torch finds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import LLM, ConfigError, EngineDeadError, InvalidRequestError, SamplingParams
from tests.reference.inside import DIFFERENTIATED, LOSS_TOKENS, load_inside
from tests.reference.tiny import tiny_config, tiny_prompt, write_checkpoint
from tests.support.sizes import FIELDS
from tests.support.tiny_engine import tiny_engine


@pytest.fixture(scope="module", params=DIFFERENTIATED)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def test_the_model_finds_what_the_sampler_said_likely(llm: LLM, name: str) -> None:
    prompt = tiny_prompt(name)[:40]
    params = SamplingParams(temperature=1, seed=3, max_tokens=12, ignore_eos=True, logprobs=1, prompt_logprobs=0)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    completion = output.outputs[0]
    tokens = [*prompt, *completion.token_ids]
    steps = [*(output.prompt_logprobs or ())[1:], *(completion.logprobs or ())]
    said = [step[token].logprob for token, step in zip(tokens[1:], steps, strict=True)]
    found = jax.nn.log_softmax(llm.model_fn(llm.params, tokens))
    np.testing.assert_allclose(found[jnp.arange(len(said)), jnp.array(tokens[1:])], said, atol=1e-5)


def test_the_derivative_is_what_torch_finds(llm: LLM, name: str) -> None:
    golden, prompt = load_inside(name), tiny_prompt(name)[:LOSS_TOKENS]

    def loss(params: dict[str, jax.Array]) -> jax.Array:
        found = jax.nn.log_softmax(llm.model_fn(params, prompt))
        return -found[jnp.arange(len(prompt) - 1), jnp.array(prompt[1:])].mean()

    value, gradient = jax.jit(jax.value_and_grad(loss))(llm.params)
    np.testing.assert_allclose(value, golden.loss, atol=1e-5)
    found = gradient["embed.weight"][jnp.array(prompt)]
    np.testing.assert_allclose(found, golden.gradient, atol=5e-5, rtol=1e-3)
    for path, array in gradient.items():
        assert np.isfinite(array).all() and (np.any(array) or "norm" not in path), path


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with tiny_engine("llama_gqa", tmp_path_factory.mktemp("llama")) as llm:
        yield llm


def test_several_sequences_are_each_by_itself(llama: LLM) -> None:
    rows = np.array([tiny_prompt("llama_gqa")[:16], tiny_prompt("llama_gqa")[16:32]])
    together = llama.model_fn(llama.params, rows)
    assert together.shape == (2, 16, llama.info.vocab_size) and together.dtype == jnp.float32
    for row, found in zip(rows, together, strict=True):
        np.testing.assert_allclose(found, llama.model_fn(llama.params, row), atol=1e-5)


def test_the_module_and_the_parameters_are_the_engines_own(llama: LLM) -> None:
    module, params = llama.module, llama.params
    assert module.layers[1].mlp.down.weight.get_value().array is params["layers.1.mlp.down.weight"]
    config = tiny_config("llama_gqa")
    assert params["layers.0.mlp.down.weight"].shape == (config["hidden_size"], config["intermediate_size"])
    assert params["layers.0.mlp.down.weight"] is llama.params["layers.0.mlp.down.weight"], "it is not copied"


def test_weights_in_tiles_are_expanded(tmp_path: Path) -> None:
    """In bfloat16 a CPU's kernels have them in tiles: they are the same numbers."""
    path = write_checkpoint("llama_mha8", tmp_path)
    prompt = tiny_prompt("llama_mha8")[:20]
    with LLM(path, **FIELDS) as exact:
        whole, expected = exact.params, exact.model_fn(exact.params, prompt)
    with LLM(path, **FIELDS | {"dtype": "bfloat16"}) as llm:
        rounded = llm.params
        found = llm.model_fn(rounded, prompt)
    assert rounded.keys() == whole.keys()
    for key, array in rounded.items():
        assert array.dtype == (jnp.float32 if whole[key].ndim == 1 else jnp.bfloat16)
        np.testing.assert_array_equal(array, whole[key].astype(array.dtype), err_msg=key)
    np.testing.assert_allclose(found, expected, atol=0.3)


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ([[[1, 2]]], r"tokens is int32\[1, 1, 2\]; it must be integers, \[T\] or \[B, T\]"),
        ([1.5], r"tokens is float32\[1\]; it must be integers"),
        ([], r"tokens is float32\[0\]; it must be integers"),
    ],
)
def test_what_is_no_sequence_is_refused(llama: LLM, tokens: Any, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        llama.model_fn(llama.params, tokens)


def test_embeddings_take_the_place_of_tokens(llama: LLM) -> None:
    params, prompt = llama.params, jnp.array(tiny_prompt("llama_gqa")[:10])
    rows = params["embed.weight"][prompt]
    other = jnp.zeros_like(prompt)
    expected = llama.model_fn(params, prompt)
    np.testing.assert_allclose(llama.model_fn(params, other, rows), expected, atol=1e-5)
    np.testing.assert_allclose(llama.model_fn(params, other[None], rows[None])[0], expected, atol=1e-5)
    step = 1e-2 * jax.random.normal(jax.random.key(0), rows.shape)

    def last(rows: jax.Array) -> jax.Array:
        return jax.nn.log_softmax(llama.model_fn(params, other, rows)[-1])[5]

    slope = jnp.vdot(jax.grad(last)(rows), step)
    np.testing.assert_allclose(slope, (last(rows + step / 2) - last(rows - step / 2)), rtol=2e-2)
    with pytest.raises(InvalidRequestError, match=r"embeddings is \[9, \d+\]; it must be \[10, \d+\]"):
        llama.model_fn(params, prompt, rows[1:])


def test_other_parameters_are_refused(llama: LLM) -> None:
    params = llama.params
    del params["norm.weight"]
    with pytest.raises(InvalidRequestError, match=r"params differs from llm\.params in norm\.weight"):
        llama.model_fn(params, [1, 2])


def test_what_a_question_raises_is_its_askers(tmp_path: Path) -> None:
    with tiny_engine("llama_gqa", tmp_path) as llm:
        with pytest.raises(ZeroDivisionError):
            llm._ask(lambda core: 1 // 0)
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        (output,) = llm.generate([[1, 2]], params, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 2
        found = llm.params
    assert found["norm.weight"].shape == (llm.info.hidden_size,), "what was given stays"
    with pytest.raises(EngineDeadError, match="the engine was shut down"):
        _ = llm.params


def test_an_engine_in_another_process_is_closed(tmp_path: Path) -> None:
    with (
        tiny_engine("llama_gqa", tmp_path, engine_process=True) as llm,
        pytest.raises(ConfigError, match="engine_process is True"),
    ):
        _ = llm.params
