"""`jaxllm show`: what a model on this machine is."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Annotated, Any

from cyclopts import Parameter

from jaxllm.cli.settings import COMMAND_GROUP, takes_settings
from jaxllm.cli.table import print_table
from jaxllm.config import EngineConfig
from jaxllm.setting_values import format_bytes


@takes_settings(EngineConfig, only=("model", "download_dir"))
def show(
    config: EngineConfig,
    *,
    json_output: Annotated[bool, Parameter(name="--json", negative=(), group=COMMAND_GROUP)] = False,
) -> None:
    """Show what a model is: family, parameters, quantization, context, chat template, licence.

    Args:
        json_output: Print one JSON object instead of a table.
    """
    facts = describe(config)
    if json_output:
        print(json.dumps(facts, default=str))
        return
    print_table(("", ""), [(name.replace("_", " "), _readable(name, value)) for name, value in facts.items()])


def describe(config: EngineConfig) -> dict[str, Any]:
    """What is read off the model's files, of which nothing is loaded. Raises ModelNotFoundError, CheckpointError."""
    from jaxllm.models.registry import model_spec
    from jaxllm.text.tokenizer import has_chat_template
    from jaxllm.weights import open_checkpoint
    from jaxllm.weights.source import BUILTIN_MODELS, find_local

    model = find_local(config.model, config.download_dir)
    assert model.path is not None
    checkpoint = open_checkpoint(model.path)
    spec = model_spec(checkpoint)
    weights: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        weights[tensor.dtype] += math.prod(tensor.shape)
    built_in = BUILTIN_MODELS.get(config.model)
    stated = checkpoint.config.get("general.license") or checkpoint.config.get("license")
    checkpoint.close()
    return {
        "name": config.model,
        "path": model.path,
        "size_bytes": model.nbytes,
        "family": spec.family.name,
        "parameters": sum(weights.values()),
        "weights": dict(weights.most_common()),
        "context": spec.config.max_position_embeddings,
        "chat_template": has_chat_template(model.path),
        "licence": built_in.license if built_in else stated,
    }


def _readable(name: str, value: Any) -> str:
    match value:
        case bool():
            return "yes" if value else "no: it continues text"
        case int():
            return format_bytes(value) if name == "size_bytes" else f"{value:,}"
        case dict():
            total = sum(value.values())
            return ", ".join(f"{kind} {100 * count / total:.3g} %" for kind, count in value.items())
        case None:
            return "not stated in its files"
    return str(value)
