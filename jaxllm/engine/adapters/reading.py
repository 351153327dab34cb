"""From an adapter's file to its rows in the model's tables."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxllm.engine.adapters.base_weights import BaseWeights
from jaxllm.engine.adapters.product_rows import MERGE, ProductRows
from jaxllm.errors import CheckpointError
from jaxllm.models.options import AdapterSizes
from jaxllm.weights.adapters import Adapter, open_adapter
from jaxllm.weights.loader import ParamSpec
from jaxllm.weights.names import NameMap

Rows = tuple[np.ndarray, ...]
"""What an adapter has in each table, in the order of the tables."""


@dataclass(frozen=True)
class AdapterReader:
    """Reads adapters for one model.

    Attributes:
        tables: the model's: those of each product that adapters may add to, and of the adapters' own numbers.
        weights: the parameters of the model, by path.
        names: where a checkpoint of each format has the parameters: "peft" is named as Hugging Face's checkpoints.
        base: a way to the model's own weights, whose files the engine itself has closed.
    """

    tables: tuple[ParamSpec, ...]
    weights: dict[str, ParamSpec]
    names: dict[str, NameMap]
    sizes: AdapterSizes
    base: Callable[[], BaseWeights]

    def read(self, path: str) -> Rows:
        """An adapter's rows, in host memory.

        Raises:
            CheckpointError: the file cannot be read, its rank is too high, or it changes what this model cannot have
                changed; one line that names the file and the tensor.
        """
        adapter = open_adapter(Path(path))
        if adapter.rank > self.sizes.rank:
            raise CheckpointError(
                f"{adapter.path}: its rank is {adapter.rank}; accepted are ranks up to max_lora_rank, "
                f"which is {self.sizes.rank}"
            )
        gains = any(update.magnitude is not None for update in adapter.updates.values())
        found = {"adapter_gains": np.array(int(gains))}
        names, used = self.names[adapter.format], set[str]()
        with closing(self.base()) as base:
            for product in self._products:
                weight, bias = self.weights[f"{product}.weight"], self.weights.get(f"{product}.bias")
                rows, changed = ProductRows(adapter, weight, bias, names, base, self.sizes.rank).rows()
                found |= {f"{product}.low_rank.{name}": row for name, row in rows.items()}
                used |= changed
        _check_all_used(adapter, used, names)
        return tuple(
            found[table.path].astype(table.dtype) if table.path in found else np.zeros(table.shape[1:], table.dtype)
            for table in self.tables
        )

    @property
    def _products(self) -> list[str]:
        paths = (table.path.rpartition(".low_rank.")[0] for table in self.tables)
        return list(dict.fromkeys(path for path in paths if path))


def _check_all_used(adapter: Adapter, used: set[str], names: NameMap) -> None:
    """Raises CheckpointError where the adapter changes a tensor that is in no product which has tables."""
    changed = [("adds to", name) for name in adapter.updates] + [("replaces", name) for name in adapter.replaced]
    unused = next((change for change in changed if change[1] not in used), None)
    if unused is None:
        return
    verb, name = unused
    known = {source.name for options in names.values() for option in options for source in option}
    why = MERGE if name in known else "which this model has no tensor of that adapters could change"
    raise CheckpointError(f"{adapter.path}: it {verb} {name!r}, {why}")
