"""What families with state-space layers spell alike: keys of GGUF files, limits of config.json, names of tensors."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from jaxllm.errors import CheckpointError
from jaxllm.models.config import DecoderConfig
from jaxllm.models.gguf import GgufFile
from jaxllm.models.gguf_names import gguf_linear
from jaxllm.models.hf import hf_linear
from jaxllm.weights.fields import shown
from jaxllm.weights.names import Pattern, Source, without_middle_axis


def hf_time_step_limits(c: dict[str, Any]) -> dict[str, Any]:
    """What `time_step_limit` keeps a step's length within; transformers writes infinity as an object.

    Raises:
        CheckpointError: it is not two numbers in their order.
    """
    given = c.get("time_step_limit")
    if given is None:
        return {}
    limits: list[Any] = [one.get("__float__") if isinstance(one, dict) else one for one in given]
    limits = [float("inf") if one == "Infinity" else one for one in limits]
    if len(limits) != 2 or not all(type(one) in (int, float) for one in limits) or not 0 <= limits[0] < limits[1]:
        raise CheckpointError(
            f"time_step_limit is {shown(given)}; accepted are two numbers, the first of them 0 or more and the second "
            "greater"
        )
    least, most = map(float, limits)
    return {"dt_min": least, "dt_max": None if math.isinf(most) else most}


def check_activation(c: dict[str, Any], name: str) -> None:
    """Raises CheckpointError where the key `name` asks for another activation than silu."""
    if c.get(name, "silu") not in (None, "silu"):
        raise CheckpointError(f"{name} is {shown(c[name])}; accepted is 'silu' in a state-space layer")


def check_sizes(name: str, head_dim: int, heads: int, inner: int) -> None:
    """Raises CheckpointError where the `heads`, of `head_dim` channels under the key `name`, do not make `inner`."""
    if heads * head_dim != inner:
        raise CheckpointError(
            f"{name} is {head_dim}, which {heads} state-space heads have; accepted is a size with which these have "
            f"{inner} channels together"
        )


def gguf_ssd_head_dim(file: GgufFile) -> int:
    """Channels of a state-space head of a GGUF file. Raises CheckpointError where the sizes do not go together."""
    inner, heads = file("ssm.inner_size"), file("ssm.time_step_rank")
    if inner % heads:
        raise CheckpointError(f"ssm.inner_size is {inner}; accepted is a multiple of {heads} heads")
    return inner // heads


def hf_ssd_names(config: DecoderConfig, block: str) -> dict[str, Pattern]:
    """Tensors of the state-space layer `block` in a Hugging Face checkpoint."""
    return {
        **_input_names(config, f"{block}.in_proj"),
        "layers.*.ssd.taps": Source(f"{block}.conv1d.weight", without_middle_axis),
        "layers.*.ssd.conv_bias": f"{block}.conv1d.bias",
        "layers.*.ssd.fade": Source(f"{block}.A_log", _of_logarithm),
        "layers.*.ssd.dt_bias": f"{block}.dt_bias",
        "layers.*.ssd.skip": f"{block}.D",
        "layers.*.ssd.norm.weight": f"{block}.norm.weight",
        **hf_linear("layers.*.ssd.output", f"{block}.out_proj"),
    }


def gguf_ssd_names(config: DecoderConfig) -> dict[str, Pattern]:
    """Where all architectures of GGUF files keep the tensors of state-space layers."""
    return {
        **_input_names(config, "blk.*.ssm_in"),
        "layers.*.ssd.taps": Source("blk.*.ssm_conv1d.weight", without_middle_axis),
        "layers.*.ssd.conv_bias": "blk.*.ssm_conv1d.bias",
        "layers.*.ssd.fade": Source("blk.*.ssm_a", _negated),
        "layers.*.ssd.dt_bias": "blk.*.ssm_dt.bias",
        "layers.*.ssd.skip": Source("blk.*.ssm_d", _flat),
        "layers.*.ssd.norm.weight": Source("blk.*.ssm_norm.weight", _flat),
        **gguf_linear("ssd.output", "ssm_out"),
    }


def _input_names(config: DecoderConfig, tensor: str) -> dict[str, Pattern]:
    """The last rows of one tensor, one a head, are a product by themselves."""
    heads = config.ssd.heads if config.ssd else 0
    parts = {"input": partial(_rows, end=-heads), "dt": partial(_rows, begin=-heads)}
    return {
        f"layers.*.ssd.{path}.{kind}": Source(f"{tensor}.{kind}", rows, by_rows=kind == "weight")
        for path, rows in parts.items()
        for kind in ("weight", "bias")
    }


def _rows(array: np.ndarray, begin: int | None = None, end: int | None = None) -> np.ndarray:
    return array[begin:end]


def _of_logarithm(logarithm: np.ndarray) -> np.ndarray:
    return np.exp(np.asarray(logarithm, np.float32))


def _flat(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1)


def _negated(array: np.ndarray) -> np.ndarray:
    return -np.asarray(array, np.float32).reshape(-1)
