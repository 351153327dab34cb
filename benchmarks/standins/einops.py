"""Where einops is not installed: `rearrange`, as far as the engine uses it."""

from __future__ import annotations

import math
import re
from itertools import chain
from typing import Any


def rearrange(array: Any, pattern: str, **sizes: int) -> Any:
    """Split, transpose and merge axes: `rearrange(q, "token (kv group) dim -> kv (token group) dim", kv=2)`."""
    if "..." in pattern:
        rest = array.ndim - len(_groups(pattern.partition("->")[0])) + 1
        pattern = pattern.replace("...", " ".join(f"_{axis}" for axis in range(rest)))
    given, wanted = map(_groups, pattern.split("->"))
    for names, size in zip(given, array.shape, strict=True):
        unknown = [name for name in names if name not in sizes]
        known = math.prod(sizes[name] for name in names if name in sizes)
        if len(unknown) > 1 or size % known or (not unknown and size != known):
            raise ValueError(f"{pattern!r} does not fit {array.shape} with {sizes}")
        sizes |= {name: size // known for name in unknown}
    flat, order = list(chain(*given)), list(chain(*wanted))
    split = array.reshape([sizes[name] for name in flat]).transpose([flat.index(name) for name in order])
    return split.reshape([math.prod(sizes[name] for name in names) for names in wanted])


def _groups(side: str) -> list[list[str]]:
    """'a (b c)' -> [['a'], ['b', 'c']]."""
    return [(inner or name).split() for inner, name in re.findall(r"\(([^)]*)\)|(\S+)", side)]
