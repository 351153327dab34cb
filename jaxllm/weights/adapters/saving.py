"""Adapters that were made in this process, as files that an engine reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jaxllm.weights.adapters.peft_adapter import TENSORS_FILE
from jaxllm.weights.adapters.peft_settings import SETTINGS_FILE


def save_adapter(folder: Path, tensors: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Write arrays, named as PEFT names them, and what adapter_config.json says of them into a folder that is there."""
    (folder / SETTINGS_FILE).write_text(json.dumps({"peft_type": "LORA", **config}))
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, folder / TENSORS_FILE)
