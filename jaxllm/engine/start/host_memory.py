"""Whether a plan fits into the memory that this process may use of the host."""

from __future__ import annotations

import logging

from jaxllm.engine.start.plan import EnginePlan
from jaxllm.engine.start.platform import Platform
from jaxllm.errors import ConfigError
from jaxllm.setting_values import format_bytes

logger = logging.getLogger(__name__)

PROCESS_BYTES = 600 * 2**20
"""What Python, JAX, compiled steps and the tokenizer of a process take besides weights and caches, at least."""


def check_host_memory(plan: EnginePlan, platform: Platform) -> None:
    """Raises ConfigError where the plan needs more than this process may ever use of the host: on a CPU all of it, and
    elsewhere experts that are left in host memory.

    The system would end the process without a word. What is in use now may be given back until then: a warning.
    """
    if platform.host_memory is None:
        return
    if platform.memory_limit is not None:
        if plan.host_weight_bytes and PROCESS_BYTES + plan.host_weight_bytes > platform.host_memory:
            raise ConfigError(
                f"{plan.model} needs {format_bytes(plan.host_weight_bytes)} of host memory for experts, and this "
                f"process may have {format_bytes(platform.host_memory)}; lower num_experts_offload_per_rank, or "
                "quantize the weights (isq)"
            )
        return
    needed = PROCESS_BYTES + plan.planned_bytes + plan.host_weight_bytes
    weights = format_bytes(plan.weight_bytes + plan.host_weight_bytes)
    room = f"{format_bytes(PROCESS_BYTES)} for the program itself, {weights} of weights, "
    room += f"{format_bytes(plan.kv_bytes)} of KV cache and {format_bytes(plan.workspace_bytes)} to compute in"
    if needed > platform.host_memory:
        raise ConfigError(
            f"{plan.model} needs {format_bytes(needed)} of memory ({room}), and this process may have "
            f"{format_bytes(platform.host_memory)}; raise the container's limit, lower kv_cache_memory, max_model_len "
            "or max_num_seqs, or quantize the weights (isq)"
        )
    if needed > platform.free_host_memory:
        free = format_bytes(platform.free_host_memory)
        logger.warning("%s of memory are free, and %s will be needed: %s", free, format_bytes(needed), room)
