"""jaxllm: an LLM inference engine compiled by JAX/XLA.

from jaxllm import LLM, SamplingParams

llm = LLM("smollm2-135m")
print(llm.generate("The capital of France is", SamplingParams(temperature=0))[0].outputs[0].text)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxllm.chat.decisions import Decision, Question
    from jaxllm.config import EngineConfig
    from jaxllm.engine.doors.async_llm import AsyncLLM
    from jaxllm.engine.doors.beams import BeamSearchParams
    from jaxllm.errors import (
        CheckpointError,
        ConfigError,
        ContextLengthError,
        DoesNotFitError,
        EngineDeadError,
        EnginePausedError,
        InvalidRequestError,
        JaxLLMError,
        ModelNotFoundError,
        QueueFullError,
        StorageFullError,
    )  # fmt: skip
    from jaxllm.llm import LLM, generate
    from jaxllm.requests.logits_processors import LogitsState
    from jaxllm.requests.outputs import PoolingParams, RequestOutput
    from jaxllm.requests.sampling import RepetitionDetectionParams, SamplingParams
    from jaxllm.requests.steering import LoRARequest, Steer
    from jaxllm.requests.structured_outputs import StructuredOutputs
    from jaxllm.session.session import ResponsesSession

    __version__: str

_HOMES = {
    "jaxllm.llm": ("LLM", "generate"),
    "jaxllm.chat.decisions": ("Decision", "Question"),
    "jaxllm.config": ("EngineConfig",),
    "jaxllm.engine.doors.async_llm": ("AsyncLLM",),
    "jaxllm.engine.doors.beams": ("BeamSearchParams",),
    "jaxllm.requests.sampling": ("RepetitionDetectionParams", "SamplingParams"),
    "jaxllm.requests.logits_processors": ("LogitsState",),
    "jaxllm.requests.steering": ("LoRARequest", "Steer"),
    "jaxllm.requests.structured_outputs": ("StructuredOutputs",),
    "jaxllm.requests.outputs": ("PoolingParams", "RequestOutput"),
    "jaxllm.session.session": ("ResponsesSession",),
    "jaxllm.errors": (
        "JaxLLMError", "CheckpointError", "ConfigError", "ContextLengthError", "DoesNotFitError", "EngineDeadError",
        "EnginePausedError", "InvalidRequestError", "ModelNotFoundError", "QueueFullError", "StorageFullError",
    ),
}  # fmt: skip

__all__ = [
    "LLM", "AsyncLLM", "BeamSearchParams", "CheckpointError", "ConfigError", "ContextLengthError", "Decision",
    "DoesNotFitError", "EngineConfig", "EngineDeadError", "EnginePausedError", "InvalidRequestError", "JaxLLMError",
    "LoRARequest", "LogitsState", "ModelNotFoundError", "PoolingParams", "Question", "QueueFullError",
    "RepetitionDetectionParams", "RequestOutput",
    "ResponsesSession", "SamplingParams", "Steer", "StorageFullError", "StructuredOutputs", "__version__", "generate",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Public names load their modules (and JAX) when they are first used."""
    if (home := next((module for module, names in _HOMES.items() if name in names), None)) is not None:
        return getattr(import_module(home), name)
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version  # takes as long to load as the rest of a process

        try:
            return version("jaxllm")
        except PackageNotFoundError:  # a source tree that was never installed
            return "0.0.0"
    raise AttributeError(f"module 'jaxllm' has no attribute {name!r}")
