"""Mixture of experts: the layer, for all families."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float

from jaxllm.models.layers.experts import Experts, MoEConfig, Router, route
from jaxllm.models.layers.host_experts import ExpertPlaces
from jaxllm.models.layers.linear import Linear
from jaxllm.models.layers.mlp import MLP, GatedMLP
from jaxllm.models.layers.norm import RMSNorm
from jaxllm.models.options import BuildOptions
from jaxllm.pallas_kernels import Later, Mixture, Norm, Residual, StepMetadata, late_sum
from jaxllm.sharding import mesh


class MoE(nnx.Module):
    """A router, experts, and the shared experts where there are any.

    Over the tensor axis either every expert's hidden size is divided, or (`expert_parallel`) the experts themselves.
    Activations are whole on every device, so that both end in one sum over the axis. Where several batches run side by
    side, experts are divided over the data axis as well: a device is given the rows of all batches, and each batch gets
    its own rows back.
    """

    def __init__(
        self, size: int, config: MoEConfig, activation: str, options: BuildOptions, norm_eps: float | None = None
    ):
        """`norm_eps` is of the router's own norm, in a model that has one."""
        self.router = Router(size, config, options, norm_eps)
        self.latent_down = Linear(size, config.latent, options) if config.latent else None
        self.experts = Experts(config.latent or size, config, activation, options)
        self.latent_up = Linear(config.latent, size, options) if config.latent else None
        shared = GatedMLP if config.gated else MLP
        self.shared = shared(size, config.shared_hidden, activation, options) if config.shared_hidden else None
        self.shared_gate = Linear(size, 1, options) if config.shared_gate else None
        self.kernels = options.kernels
        self.config = config

    def __call__(
        self, x: Float[Array, "T E"], meta: StepMetadata, *, norm: Norm | None = None,
        residual: Float[Array, "T E"] | None = None,
    ) -> Float[Array, "T E"]:  # fmt: skip
        """The layer's output, added to `residual` if there is one. Padding visits no expert: it costs no weights."""
        before, x = x, x if norm is None else norm(x)
        out = self._mixed(x, meta, before)
        part = late_sum(out)
        out = mesh.sum_over_tensor(part if self.kernels.wide_sums else part.astype(x.dtype)).astype(x.dtype)
        return out if residual is None else residual + out

    def unsummed(self, x: Float[Array, "T E"], meta: StepMetadata) -> Mixture | Float[Array, "T E"]:
        """The layer's output, where kernels and one device have it as a mixture that is yet to be summed."""
        out = self._mixed(x, meta, x) if mesh.tensor_size() * mesh.data_size() == 1 else self(x, meta)
        return out if isinstance(out, Mixture) else out.astype(x.dtype)

    def _mixed(
        self, x: Float[Array, "T E"], meta: StepMetadata, before: Float[Array, "T E"]
    ) -> Mixture | Float[Array, "T E"]:
        """This device's part of the output, in float32; `x` is the norm of what is `before` it."""
        with jax.named_scope("router"):
            logits, bias = self.router(before if self.config.beside_dense else x)
        here = self.experts.here
        first = mesh.device_rank() * here if here < self.config.num_experts else 0
        with jax.named_scope("experts"):
            rows = x if self.latent_down is None else self.latent_down(x)
            if self.experts.serve_all_batches:
                every = mesh.gather_over_data((rows, logits, meta.seq_ids))
                rows, logits, sequences = (a.reshape(-1, *a.shape[2:]) for a in every)  # one batch after the other
                meta = replace(meta, seq_ids=sequences)  # they say which rows are padding
            out: Any = None
            if not (self.config.expert_scale or self.config.scale_inputs):
                out = self.experts.mixture(rows, logits, bias, self.config, first, meta)
            if out is None:
                weights, experts = route(logits, self.config, bias)
                scaled, at_inputs = self.router.scaled(weights, experts), self.config.scale_inputs
                out = self.experts.routed(rows, scaled, experts, first, meta.live, scale_inputs=at_inputs)
            if self.experts.serve_all_batches:
                out = mesh.share_out_over_data(late_sum(out))
            if self.latent_up is not None:
                out = self.latent_up.partial(late_sum(out).astype(x.dtype))
        if self.shared is None:
            return out
        with jax.named_scope("shared_experts"):
            shared = self.shared.partial(x)
            if self.shared_gate is not None:
                shared = shared * jax.nn.sigmoid(self.shared_gate.partial(x))
        return replace(out, shared=shared) if isinstance(out, Mixture) else out + shared


class DenseBesideMoE(nnx.Module):
    """A dense MLP and experts side by side (Gemma 4): `norm(dense(norm(x))) + norm(experts(norm(x)))`."""

    def __init__(
        self, size: int, hidden: int, config: MoEConfig, activation: str, norm_eps: float, options: BuildOptions
    ):
        self.dense = GatedMLP(size, hidden, activation, options)
        self.dense_post_norm = RMSNorm(size, norm_eps, options.kernels)
        self.moe_norm = RMSNorm(size, norm_eps, options.kernels)
        self.moe = MoE(size, config, activation, options, norm_eps)
        self.moe_post_norm = RMSNorm(size, norm_eps, options.kernels)

    def __call__(
        self, x: Float[Array, "T E"], meta: StepMetadata, *, norm: Norm | None = None, residual: Residual = None
    ) -> Float[Array, "T E"]:
        dense = self.dense_post_norm(self.dense(x, meta, norm=norm))
        out = dense + self.moe_post_norm(self.moe(x, meta, norm=self.moe_norm.traced))
        return out if residual is None or isinstance(residual, Later) else residual + out


def places_of_layer(mlp: Any, count: int, tp: int) -> ExpertPlaces | None:
    """Buffers of `count` places for the experts of a layer that are in host memory; None where it has none."""
    moe = mlp.moe if isinstance(mlp, DenseBesideMoE) else mlp
    return moe.experts.places(count, tp) if isinstance(moe, MoE) else None
