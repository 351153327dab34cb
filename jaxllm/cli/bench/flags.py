"""Types of the flags that the benchmarks share; the names are vLLM's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter
from cyclopts.validators import Number

LOAD_GROUP = Group("Load", sort_key=0)


def _writable(_: type, file: Path | None) -> None:
    """Refuse at the door a result file that could not be written after minutes of measuring."""
    if file is not None and (file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK)):
        raise ValueError("it cannot be written to")


Count = Annotated[int, Parameter(group=LOAD_GROUP, validator=Number(gte=1))]


def counts(*names: str) -> Parameter:
    """A flag of one number or several, each of at least 1."""
    return Parameter(name=names, group=LOAD_GROUP, consume_multiple=True, negative=(), validator=Number(gte=1))


Rate = Annotated[float, Parameter(group=LOAD_GROUP, validator=Number(gt=0))]
JsonFile = Annotated[Path | None, Parameter(name="--json", group=LOAD_GROUP, validator=_writable)]
