"""`jaxllm convert`: a model in another format, quantized or as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from jaxllm.cli.settings import COMMAND_GROUP, takes_settings
from jaxllm.config import EngineConfig
from jaxllm.folders import in_home

SETTINGS = (
    "model", "tokenizer", "revision", "download_dir", "load_format", "dtype", "skip_tokenizer_init", "dequantize",
    "isq", "isq_map", "imatrix", "tensor_parallel_size",
)  # fmt: skip


@takes_settings(EngineConfig, only=SETTINGS)
def convert(
    config: EngineConfig,
    destination: Annotated[Path, Parameter(group=COMMAND_GROUP)],
    *,
    to: Annotated[Literal["orbax", "safetensors", "gguf"], Parameter(group=COMMAND_GROUP)] = "orbax",
    merge_lora: Annotated[list[str] | None, Parameter(group=COMMAND_GROUP, negative="")] = None,
) -> None:
    """Write a model anew: for a faster start, quantized once and for all, or for other programs.

    Args:
        destination: The directory, or .gguf file, to write. It must not exist.
        to: orbax is read by jaxllm, in any quantization; safetensors holds floats; gguf takes its block types.
        merge_lora: PATH or PATH=SCALE of a LoRA adapter that is added to the weights; may be given several times.
    """
    from jaxllm.cli.convert.conversion import convert_model
    from jaxllm.progress import progress_bar

    with progress_bar(f"Loading {config.model}") as on_progress:
        convert_model(config, in_home(destination), to, on_progress, merge_lora or ())
    print(destination)
