"""What is converted: a model's parameters and how each is to be kept, on one device and in nobody's tiles."""

from __future__ import annotations

from dataclasses import dataclass

from jaxllm.config import EngineConfig
from jaxllm.engine.start.options import DTYPES, check_imatrix
from jaxllm.models.abstract import abstract_model
from jaxllm.models.options import BuildOptions
from jaxllm.models.registry import ModelSpec, model_spec
from jaxllm.weights.checkpoint import Checkpoint
from jaxllm.weights.kinds import KindChooser
from jaxllm.weights.loader import ParamSpec


@dataclass(frozen=True)
class ConversionPlan:
    """A model and its parameters.

    Attributes:
        notes: what is quantized once more, one sentence each.
    """

    spec: ModelSpec
    params: list[ParamSpec]
    notes: list[str]


def plan_conversion(config: EngineConfig, checkpoint: Checkpoint) -> ConversionPlan:
    """Choose the kinds as an engine would whose kernels take any.

    Blocks are of a size that `tensor_parallel_size` devices can share. Raises ConfigError, CheckpointError.
    """
    check_imatrix(config)
    spec = model_spec(checkpoint)
    kinds = KindChooser(
        checkpoint,
        spec.names,
        config.tensor_parallel_size,
        packed=not config.dequantize,
        isq=config.isq,
        isq_map=config.isq_map or {},
    )
    _, params = abstract_model(spec, BuildOptions(DTYPES[config.dtype]), kinds)
    return ConversionPlan(spec, params, kinds.notes)
