"""Where a step's drafts come from, as the engine's sizes say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx

from jaxllm.engine.device.drafts.draft_model import AbstractDraft, ModelDrafter
from jaxllm.engine.device.drafts.drafter import Drafter
from jaxllm.engine.device.drafts.module import ModuleDrafter
from jaxllm.engine.device.drafts.ngrams import NgramDrafter
from jaxllm.engine.device.sizes import ModelDrafts, ModuleDrafts, StepSizes, with_rows
from jaxllm.models.decoder import Decoder


class DraftSource:
    """Makes a step's Drafter, while the step is traced."""

    def __init__(self, sizes: StepSizes, draft: AbstractDraft | None):
        self._sizes = sizes
        self._graph: Any = None
        if draft is not None:
            self._graph, state = nnx.split(draft.model)
            self._tree = jax.tree.structure(state)

    def drafter(
        self, rows: int, model: Callable[[], Decoder], parameters: Callable[[], Sequence[jax.Array]]
    ) -> Drafter | None:
        """The one for `rows` sequences; None where no drafts are tried.

        `model` is the one that it drafts for, without adapters, and `parameters` those of the one that drafts, if any.
        """
        sizes = self._sizes
        if sizes.drafts is None:
            return None
        rule, count = with_rows(sizes.drafts, rows), len(sizes.caches)

        def drafting() -> Any:
            return nnx.merge(self._graph, jax.tree.unflatten(self._tree, parameters()))

        if isinstance(rule, ModuleDrafts):
            return ModuleDrafter(drafting, model, rule.num_tokens, count, sizes.page_size, rule.layers)
        if isinstance(rule, ModelDrafts):
            return ModelDrafter(drafting, rule.num_tokens, count, sizes.vocab_size, sizes.page_size)
        return NgramDrafter(rule)
