"""`jaxllm models`: which model families there are."""

from __future__ import annotations

import json
from typing import Annotated

from cyclopts import Parameter

from jaxllm.cli.documentation import documented

FIELDS = ("name", "models", "architectures", "model_types", "layer_types", "gguf_architectures")
"""What a family says about itself; its other fields are functions."""


@documented
def models(*, json_output: Annotated[bool, Parameter(name="--json", negative=())] = False) -> None:
    """List the model families: what they serve, their Hugging Face classes, and the formats they load from.

    Args:
        json_output: Print a JSON array instead of a table.
    """
    from jaxllm.models.registry import FAMILIES

    if json_output:
        print(json.dumps([{name: getattr(family, name) for name in FIELDS} for family in FAMILIES]))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("family", "models", "Hugging Face class", "GGUF architecture")
    for family in FAMILIES:
        gguf = "\n".join(family.gguf_architectures) or "–"
        table.add_row(family.name, family.models, "\n".join(family.architectures), gguf)
    Console().print(table)
