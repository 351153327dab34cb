"""jaxllm: an LLM inference engine compiled by JAX/XLA.

from jaxllm import LLM, SamplingParams

llm = LLM("smollm2-135m")
print(llm.generate("The capital of France is", SamplingParams(temperature=0))[0].outputs[0].text)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxllm.config import EngineConfig
    from jaxllm.engine.doors.async_llm import AsyncLLM
    from jaxllm.engine.doors.beams import BeamSearchParams
    from jaxllm.errors import (
        CheckpointError,
        ConfigError,
        ContextLengthError,
        EngineDeadError,
        EnginePausedError,
        InvalidRequestError,
        JaxLLMError,
        ModelNotFoundError,
        QueueFullError,
        StorageFullError,
    )
    from jaxllm.llm import LLM, generate
    from jaxllm.requests.logits_processors import LogitsState
    from jaxllm.requests.outputs import PoolingParams, RequestOutput
    from jaxllm.requests.sampling import SamplingParams
    from jaxllm.requests.steering import LoRARequest, Steer
    from jaxllm.requests.structured_outputs import StructuredOutputs
    from jaxllm.session.session import ResponsesSession

    __version__: str

_HOMES = {
    "LLM": "jaxllm.llm",
    "generate": "jaxllm.llm",
    "AsyncLLM": "jaxllm.engine.doors.async_llm",
    "EngineConfig": "jaxllm.config",
    "SamplingParams": "jaxllm.requests.sampling",
    "BeamSearchParams": "jaxllm.engine.doors.beams",
    "LoRARequest": "jaxllm.requests.steering",
    "LogitsState": "jaxllm.requests.logits_processors",
    "PoolingParams": "jaxllm.requests.outputs",
    "Steer": "jaxllm.requests.steering",
    "StructuredOutputs": "jaxllm.requests.structured_outputs",
    "RequestOutput": "jaxllm.requests.outputs",
    "ResponsesSession": "jaxllm.session.session",
    "JaxLLMError": "jaxllm.errors",
    "CheckpointError": "jaxllm.errors",
    "ConfigError": "jaxllm.errors",
    "ContextLengthError": "jaxllm.errors",
    "EngineDeadError": "jaxllm.errors",
    "EnginePausedError": "jaxllm.errors",
    "InvalidRequestError": "jaxllm.errors",
    "ModelNotFoundError": "jaxllm.errors",
    "QueueFullError": "jaxllm.errors",
    "StorageFullError": "jaxllm.errors",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "CheckpointError",
    "ConfigError",
    "ContextLengthError",
    "EngineConfig",
    "EngineDeadError",
    "EnginePausedError",
    "InvalidRequestError",
    "JaxLLMError",
    "LoRARequest",
    "LogitsState",
    "ModelNotFoundError",
    "PoolingParams",
    "QueueFullError",
    "RequestOutput",
    "ResponsesSession",
    "SamplingParams",
    "Steer",
    "StorageFullError",
    "StructuredOutputs",
    "__version__",
    "generate",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Public names load their modules (and JAX) when they are first used."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version  # takes as long to load as the rest of a process

        try:
            return version("jaxllm")
        except PackageNotFoundError:  # a source tree that was never installed
            return "0.0.0"
    raise AttributeError(f"module 'jaxllm' has no attribute {name!r}")
