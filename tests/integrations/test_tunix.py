"""tunix samples with an engine, finds its own log-probabilities in it, and gives it the weights that it trains; needs
`pip install google-tunix`."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import LLM, ConfigError, InvalidRequestError, SamplingParams
from tests.reference.tiny import tiny_config
from tests.serving.mixed_requests import VOCAB_SIZE, write_model

pytest.importorskip("tunix", reason="tunix is not installed: pip install google-tunix")

import optax
from flax import nnx
from transformers import PreTrainedTokenizerFast
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models.llama3 import model as llama
from tunix.models.llama3.params import create_model_from_safe_tensors
from tunix.rl import common
from tunix.rl import utils as rl_utils
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig

from jaxllm.integrations.tunix import JaxLLMRollout

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
"""Of tunix's, on newer Flax and JAX."""

FIELDS: dict[str, Any] = {
    "dtype": "float32", "enforce_eager": True, "max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 64,
    "kv_cache_memory": "16MiB", "block_size": 8,
}  # fmt: skip
ROPE_THETA = 1e6
"""The only one that tunix 0.1.7's Llama rotates by, whatever its config says."""
PROMPTS = ["The engine runs", "A page holds so many tokens", "The engine runs"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), rope_theta=ROPE_THETA)


@pytest.fixture(scope="module")
def mesh() -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))


@pytest.fixture
def model(folder: Path, mesh: jax.sharding.Mesh) -> llama.Llama3:
    """tunix's own, of the same checkpoint."""
    config = tiny_config("llama_gqa")
    return create_model_from_safe_tensors(
        str(folder),
        llama.ModelConfig(
            num_layers=config["num_hidden_layers"],
            vocab_size=VOCAB_SIZE,
            embed_dim=config["hidden_size"],
            hidden_dim=config["intermediate_size"],
            num_heads=config["num_attention_heads"],
            head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            rope_theta=int(ROPE_THETA),
            norm_eps=config["rms_norm_eps"],
        ),
        mesh,
        jnp.float32,
    )


def to_checkpoint(params: Any) -> Mapping[str, Any]:
    """tunix's Llama by the names of its checkpoint."""
    names = {
        "embedder.input_embedding": "model.embed_tokens.weight", "final_norm.w": "model.norm.weight",
        "lm_head.w": "lm_head.weight",
    }  # fmt: skip
    found = {}
    for path, array in rl_utils.to_flat_dict(params)[0].items():
        *where, module, kind = map(str, path)
        name = names.get(f"{module}.{kind}")
        if name is None:
            inner = "self_attn" if "attn" in where else "mlp" if "mlp" in where else None
            name = ".".join(["model", *where[:2], *([inner] if inner else []), module, "weight"])
        if module in ("q_proj", "k_proj", "v_proj"):
            array = array.reshape(array.shape[0], -1).T
        elif module == "o_proj":
            array = array.reshape(-1, array.shape[-1]).T
        elif kind == "kernel" or module == "lm_head":
            array = array.T
        found[name] = array
    return found


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, **FIELDS) as llm:
        yield llm


@pytest.fixture
def tokenizer(folder: Path) -> TokenizerAdapter:
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    return TokenizerAdapter(theirs)


@pytest.fixture
def rollout(llm: LLM, tokenizer: TokenizerAdapter) -> JaxLLMRollout:
    return JaxLLMRollout(llm, to_checkpoint, tokenizer=tokenizer)


def per_token_logps(model: llama.Llama3, prompts: np.ndarray, completions: np.ndarray) -> np.ndarray:
    """What tunix's trainer computes."""
    graph, state = nnx.split(model)
    found = common.compute_per_token_logps(
        graph, state, jnp.asarray(prompts), jnp.asarray(completions), pad_id=0, eos_id=2, return_logits=False
    )
    return np.asarray(found)


def padded(rows: list[np.ndarray], width: int) -> np.ndarray:
    return np.stack([np.pad(row, (0, width - len(row))) for row in rows])


def test_samples_and_their_log_probabilities_are_as_tunix_finds_them(
    rollout: JaxLLMRollout, model: llama.Llama3
) -> None:
    config = RolloutConfig(max_tokens_to_generate=9, temperature=1.0, max_prompt_length=24, return_logprobs=True)
    output = rollout.generate(PROMPTS, config)
    prompts, completions = output.left_padded_prompt_tokens, padded(output.tokens, 12)
    assert prompts.shape == (3, 24) and (prompts[:, 0] == 0).all() and (prompts[:, -1] != 0).all()
    expected = per_token_logps(model, prompts, completions)
    found = np.asarray(rollout.get_per_token_logps(jnp.asarray(prompts), jnp.asarray(completions)))
    assert output.logprobs is not None and found.shape == (3, 12)
    for row, (tokens, logprobs) in enumerate(zip(output.tokens, output.logprobs, strict=True)):
        np.testing.assert_allclose(found[row, : len(tokens)], expected[row, : len(tokens)], atol=1e-4)
        np.testing.assert_allclose(logprobs, expected[row, : len(tokens)], atol=1e-4)
        assert not found[row, len(tokens) :].any()


def test_a_seed_gives_the_same_again_and_differs_by_prompt(rollout: JaxLLMRollout) -> None:
    config = RolloutConfig(max_tokens_to_generate=9, temperature=1.0, seed=jax.random.key(5))
    first, again = (rollout.generate(PROMPTS, config) for _ in range(2))
    assert first.text == again.text and first.text[0] != first.text[2] and first.logprobs is None


def test_padding_that_ends_sequences_too_keeps_one_end(llm: LLM) -> None:
    rollout = JaxLLMRollout(llm, to_checkpoint)
    assert rollout.pad_id() == rollout.eos_id() == 2
    found = rollout.get_per_token_logps(jnp.array([[2, 2, 1, 7]]), jnp.array([[9, 8, 2, 2, 2]]))
    (score,) = llm.score([[1, 7]], [[9, 8, 2]], use_tqdm=False)
    np.testing.assert_allclose(np.asarray(found)[0], [*score.logprobs, 0, 0], atol=1e-6)


def test_new_weights_are_sampled_with(rollout: JaxLLMRollout, model: llama.Llama3) -> None:
    prompts = np.array([[1, 40, 50, 60]])
    completions = np.array([[70, 80, 90]])
    before = np.asarray(rollout.get_per_token_logps(prompts, completions))
    changed = jax.tree.map(lambda array: array * 1.1, nnx.state(model, nnx.Param))
    nnx.update(model, changed)
    rollout.update_params(changed, (nnx.Param,))
    after = np.asarray(rollout.get_per_token_logps(prompts, completions))
    assert rollout.llm.weight_version == "1" and np.abs(after - before).max() > 1e-2
    np.testing.assert_allclose(after, per_token_logps(model, prompts, completions), atol=1e-4)


def test_grpo_trains_through_the_engine(
    llm: LLM, model: llama.Llama3, folder: Path, mesh: jax.sharding.Mesh, tokenizer: TokenizerAdapter
) -> None:
    """By tunix's own learner and cluster: the engine is given each step's weights, and ends with the trainer's."""
    config = RolloutConfig(max_tokens_to_generate=6, max_prompt_length=16, temperature=1.0)
    cluster = RLCluster(
        actor=model,
        tokenizer=tokenizer,
        cluster_config=ClusterConfig(
            role_to_mesh=dict.fromkeys((Role.ACTOR, Role.REFERENCE, Role.ROLLOUT), mesh),
            rollout_engine=functools.partial(JaxLLMRollout, llm=llm, to_checkpoint=to_checkpoint),  # type: ignore[arg-type]
            offload_to_cpu=False,
            training_config=RLTrainingConfig(actor_optimizer=optax.sgd(0.1), eval_every_n_steps=100, max_steps=2),
            rollout_config=config,
        ),
    )
    learner = GRPOLearner(
        rl_cluster=cluster,
        reward_fns=lambda prompts, completions, **_: [float(len(text)) for text in completions],
        algo_config=GRPOConfig(num_generations=2, num_iterations=1, beta=0.0),
    )
    before = {name: np.array(array) for name, array in llm.params.items()}
    learner.train([{"prompts": np.array(PROMPTS[:2])}, {"prompts": np.array(PROMPTS[1:])}])
    assert llm.weight_version == "2"
    assert any(np.abs(np.asarray(array) - before[name]).max() > 0 for name, array in llm.params.items())
    prompts, completions = np.array([[1, 40, 50, 60]]), np.array([[70, 80, 90]])
    trained = per_token_logps(cluster.actor_trainer.model, prompts, completions)
    found = cluster.rollout.get_per_token_logps(prompts, completions)  # type: ignore[arg-type]
    np.testing.assert_allclose(np.asarray(found), trained, atol=1e-4)
    (output,) = llm.generate([[1, 40, 50]], SamplingParams(max_tokens=2), use_tqdm=False)
    assert output.outputs[0].weight_versions[0].version == "2"


def test_what_it_cannot_do_is_refused(rollout: JaxLLMRollout) -> None:
    with pytest.raises(ConfigError, match="only a LoRA is trained"):
        rollout.update_params({}, (nnx.LoRAParam,))
    with pytest.raises(InvalidRequestError, match=r"^generate has images; it takes prompts and a RolloutConfig"):
        rollout.generate(PROMPTS, RolloutConfig(), images=[])
