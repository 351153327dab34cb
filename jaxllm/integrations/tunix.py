"""An engine as the rollout of tunix's trainers: it samples with the weights of each training step.

ClusterConfig(rollout_engine=functools.partial(JaxLLMRollout, llm=llm, to_checkpoint=…), …)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput

from jaxllm.errors import ConfigError, InvalidRequestError
from jaxllm.llm import LLM
from jaxllm.requests.sampling import SamplingParams

ToCheckpoint = Callable[[Any], Mapping[str, Any]]
"""A trainer's parameters -> arrays by the names that `LLM.update_weights` takes."""


class JaxLLMRollout(BaseRollout):
    """tunix's rollout interface over an `LLM` in the same process.

    `logprobs` of outputs are those of the model's raw distribution, from which tokens are sampled at temperature 1
    without top_p and top_k. Completions keep the token that ended them.
    """

    def __init__(
        self,
        llm: LLM,
        to_checkpoint: ToCheckpoint,
        *,
        tokenizer: Any = None,
        rollout_actor: Any = None,
        mesh: Any = None,
        rollout_config: RolloutConfig | None = None,
    ):
        """tunix gives the arguments after `to_checkpoint`, of which `tokenizer` is read: its pad_id and eos_id."""
        self.llm = llm
        self._to_checkpoint = to_checkpoint
        self._tokenizer = tokenizer

    def generate(self, prompts: list[str], rollout_config: RolloutConfig, **kwargs: Any) -> RolloutOutput:
        """A completion of each prompt. Raises InvalidRequestError if there are `kwargs`, for other engines."""
        if kwargs:
            raise InvalidRequestError(f"generate has {', '.join(sorted(kwargs))}; it takes prompts and a RolloutConfig")
        ids = [self._encode(prompt) for prompt in prompts]
        outputs = self.llm.generate(ids, self._sampling(rollout_config, len(ids)), use_tqdm=False)
        found = [output.outputs[0] for output in outputs]
        width = max([rollout_config.max_prompt_length or 0, *map(len, ids)])
        padded = np.full((len(ids), width), self.pad_id(), np.int32)
        for row, prompt in zip(padded, ids, strict=True):
            row[width - len(prompt) :] = prompt
        logprobs = None
        if rollout_config.return_logprobs:
            logprobs = [
                np.array([step[token].logprob for token, step in zip(one.token_ids, one.logprobs or (), strict=True)])
                for one in found
            ]
        return RolloutOutput(
            text=[one.text for one in found],
            logits=[],
            tokens=[np.array(one.token_ids, np.int32) for one in found],
            left_padded_prompt_tokens=padded,
            logprobs=logprobs,
        )

    def get_per_token_logps(self, prompt_tokens: jax.Array, completion_tokens: jax.Array) -> jax.Array:
        """float32 `[B, C]`: the log-probabilities of `completion_tokens` `[B, C]`, which are padded on the right, after
        `prompt_tokens` `[B, P]`, which are padded on the left; 0 where there is padding.
        """
        prompts = [_without_padding(row, self.pad_id(), left=True) for row in np.asarray(prompt_tokens).tolist()]
        completions = [self._completion(row) for row in np.asarray(completion_tokens).tolist()]
        found = np.zeros(np.shape(completion_tokens), np.float32)
        rows = [row for row, completion in enumerate(completions) if completion]
        scores = self.llm.score([prompts[row] for row in rows], [completions[row] for row in rows], use_tqdm=False)
        for row, score in zip(rows, scores, strict=True):
            found[row, : len(score.logprobs)] = score.logprobs
        return jnp.asarray(found)

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Sample with other weights from the next step on. Raises ConfigError for a LoRA's weights alone."""
        if filter_types is not None and nnx.Param not in filter_types:
            raise ConfigError("only a LoRA is trained; JaxLLMRollout takes whole weights: merge it in to_checkpoint")
        arrays = self._to_checkpoint(params)
        with jax.transfer_guard("allow"):  # tunix forbids the host to look at arrays here, on a CPU too
            self.llm.update_weights(arrays)

    def pad_id(self) -> int:
        return self.eos_id() if self._tokenizer is None else int(self._tokenizer.pad_id())

    def eos_id(self) -> int:
        if self._tokenizer is None:
            return self.llm.get_tokenizer().eos_token_ids[0]
        return int(self._tokenizer.eos_id())

    def model(self) -> None:
        """None: no module of tunix's shares weights with the engine, which keeps them in a layout of its own."""

    def _encode(self, prompt: str) -> list[int]:
        """A rendered chat begins with the beginning of a sequence already."""
        tokenizer = self.llm.get_tokenizer()
        begins = tokenizer.special_tokens.get("bos_token")
        return tokenizer.encode(prompt, add_special_tokens=not (begins and prompt.startswith(begins)))

    def _sampling(self, config: RolloutConfig, count: int) -> list[SamplingParams]:
        settings: dict[str, Any] = {
            "max_tokens": config.max_tokens_to_generate,
            "temperature": config.temperature,
            "top_p": 1.0 if config.top_p is None else config.top_p,
            "top_k": max(config.top_k or 0, 0),
            "logprobs": 0 if config.return_logprobs else None,
            "stop_token_ids": tuple(config.eos_tokens or (self.eos_id(),)),
        }
        if config.seed is None:
            return [SamplingParams(**settings)] * count
        return [SamplingParams(**settings, seed=_number(config.seed) + index) for index in range(count)]

    def _completion(self, row: list[int]) -> list[int]:
        tokens = _without_padding(row, self.pad_id(), left=False)
        ended = self.pad_id() == self.eos_id() and len(tokens) < len(row)
        return tokens + [self.eos_id()] * ended


def _without_padding(row: list[int], pad: int, *, left: bool) -> list[int]:
    kept = [index for index, token in enumerate(row) if token != pad]
    if not kept:
        return []
    return row[kept[0] :] if left else row[: kept[-1] + 1]


def _number(seed: Any) -> int:
    if isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        seed = jax.random.key_data(seed)
    return int(np.asarray(seed).ravel()[-1])
