"""An engine of a tiny model with random weights, in the sizes that tests share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxllm import LLM
from tests.reference.tiny import write_checkpoint
from tests.support.sizes import FIELDS


def tiny_engine(name: str, folder: Path, **fields: Any) -> LLM:
    """An LLM of the model `name` of tests/reference/tiny_configs, written to `folder`; `fields` go over the sizes."""
    return LLM(write_checkpoint(name, folder), **FIELDS | fields)
