"""How tokens choose their experts (Shazeer et al. 2017, arXiv:1701.06538), for all families."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from jaxllm.errors import CheckpointError
from jaxllm.models.layers.mlp import ClampedSwiglu
from jaxllm.models.layers.norm import RMSNorm
from jaxllm.models.layers.params import param, weight
from jaxllm.models.options import BuildOptions

SCORING: dict[str, Callable[[jax.Array], jax.Array]] = {
    "softmax": partial(jax.nn.softmax, axis=-1),
    "sigmoid": jax.nn.sigmoid,
}
"""What turns a token's logits into its experts' scores."""


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """How tokens choose their experts, and how large those are.

    Attributes:
        hidden: the size of one expert's MLP; `shared_hidden` that of the MLP every token passes (0: none).
        scoring: "softmax" over all experts, or each expert's own "sigmoid".
        correction_bias: a bias on the scores that counts for the choice only, not for the weights.
        num_groups, top_groups: only the experts of the best `top_groups` groups may be chosen.
        group_score: what ranks a group: its best expert ("max"), or its two best together ("top2_sum").
        renormalize: the chosen scores are divided by their sum plus `renormalize_eps`.
        scale: factor on the weights, after that.
        shared_gate: the shared MLP's output is multiplied by the sigmoid of one more logit.
        scale_inputs: an expert's weight is on what it gets and not on what it gives.
        router_bias: on the logits.
        expert_scale: a learnt factor on the weight of each expert, after all else.
        beside_dense: a dense MLP runs beside the experts, each between norms of its own, and the router reads what
            comes before these, through a norm of its own.
        expert_bias: on all products of the experts.
        swiglu: what the experts' gates do; None is `act(gate) * up`.
        gated: experts, shared ones too, have a gate; otherwise they are `down(act(up(x)))`.
        latent: channels that tokens are projected to for the routed experts, and back from; 0 is no projection.

    The published routers:

        Mixtral (arXiv:2401.04088)       softmax, renormalize
        Qwen 2 MoE, Qwen 3 MoE           softmax, renormalize where `norm_topk_prob` says so
        DeepSeek V2 (arXiv:2405.04434)   softmax, groups by max (Lite: one group), scale
        gpt-oss (arXiv:2508.10925)       softmax over the chosen, which is softmax and renormalize; router_bias
        DeepSeek V3 (arXiv:2412.19437)   sigmoid, correction_bias, groups by top2_sum, renormalize with 1e-20, scale
        Llama 4                          sigmoid, scale_inputs
        Gemma 4                          softmax, renormalize, expert_scale, beside_dense

    Raises:
        CheckpointError: groups or top_k that the experts do not allow.
    """

    num_experts: int
    top_k: int
    hidden: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    correction_bias: bool = False
    num_groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top2_sum"] = "max"
    renormalize: bool = False
    renormalize_eps: float = 0.0
    scale: float = 1.0
    shared_hidden: int = 0
    shared_gate: bool = False
    scale_inputs: bool = False
    router_bias: bool = False
    expert_scale: bool = False
    beside_dense: bool = False
    expert_bias: bool = False
    swiglu: ClampedSwiglu | None = None
    gated: bool = True
    latent: int = 0

    def __post_init__(self) -> None:
        if self.num_experts < 1:
            raise CheckpointError(f"the number of experts is {self.num_experts}; accepted is 1 or more")
        if self.num_groups < 1 or self.num_experts % self.num_groups:
            raise CheckpointError(
                f"the number of expert groups is {self.num_groups}; accepted are divisors of {self.num_experts} experts"
            )
        if not 1 <= self.top_groups <= self.num_groups:
            raise CheckpointError(
                f"the number of expert groups a token may use is {self.top_groups}; accepted are 1 … {self.num_groups}"
            )
        most = self.top_groups * (self.num_experts // self.num_groups)
        if not 1 <= self.top_k <= most:
            raise CheckpointError(f"the number of experts a token uses is {self.top_k}; accepted are 1 … {most}")
        if self.group_score == "top2_sum" and self.num_experts < 2 * self.num_groups:
            raise CheckpointError(
                f"the number of expert groups is {self.num_groups}, ranked by their two best of {self.num_experts} "
                f"experts; accepted are 1 … {self.num_experts // 2}"
            )


def route(
    logits: Float[Array, "T X"], config: MoEConfig, bias: Float[Array, "X"] | None = None
) -> tuple[Float[Array, "T k"], Int[Array, "T k"]]:
    """The weight, float32, and the number of every expert that each token uses, best first.

    Args:
        logits: the router's output.
        bias: the correction bias of a config that has one.
    """
    scores = SCORING[config.scoring](logits.astype(jnp.float32))
    choice = scores if bias is None else scores + bias
    if config.top_groups < config.num_groups:
        choice = _best_groups_only(choice, config)
    experts = lax.top_k(choice, config.top_k)[1]
    weights = jnp.take_along_axis(scores, experts, axis=1)
    if config.renormalize:
        weights = weights / (weights.sum(axis=1, keepdims=True) + config.renormalize_eps)
    return weights * config.scale, experts


def _best_groups_only(choice: Float[Array, "T X"], config: MoEConfig) -> Float[Array, "T X"]:
    """`choice`, with -inf for the experts of all but each token's best groups."""
    groups = choice.reshape(choice.shape[0], config.num_groups, -1)
    best = lax.top_k(groups, 2 if config.group_score == "top2_sum" else 1)[0].sum(axis=-1)
    chosen = lax.top_k(best, config.top_groups)[1]
    allowed = (chosen[:, :, None] == jnp.arange(config.num_groups)).any(axis=1)
    return jnp.where(allowed[:, :, None], groups, -jnp.inf).reshape(choice.shape)


class Router(nnx.Module):
    """Logits of all experts, in float32 on every device, and the correction bias of the choice if there is one."""

    def __init__(self, size: int, config: MoEConfig, options: BuildOptions, norm_eps: float | None = None):
        self.norm = None if norm_eps is None else RMSNorm(size, norm_eps, options.kernels)
        self.weight = weight((config.num_experts, size), jnp.float32)
        self.bias = param((config.num_experts,), jnp.float32) if config.router_bias else None
        self.correction_bias = param((config.num_experts,), jnp.float32) if config.correction_bias else None
        self.expert_scale = param((config.num_experts,), jnp.float32) if config.expert_scale else None
        self.kernels = options.kernels

    def __call__(self, x: Float[Array, "T E"]) -> tuple[Float[Array, "T X"], Float[Array, "X"] | None]:
        x = x if self.norm is None else self.norm(x.astype(jnp.float32))
        logits = self.kernels.linear(x, self.weight.get_value())
        correction = None if self.correction_bias is None else self.correction_bias[...]
        return logits if self.bias is None else logits + self.bias[...], correction

    def scaled(self, weights: Float[Array, "T k"], experts: Int[Array, "T k"]) -> Float[Array, "T k"]:
        """The experts' weights, with the factor of each."""
        return weights if self.expert_scale is None else weights * self.expert_scale[...][experts]
