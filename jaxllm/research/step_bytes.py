"""How many bytes of weights and caches a step has to read of a device's memory."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

from jaxllm.engine.core.handle import RanExecutable, RanSequence
from jaxllm.engine.core.keys import Kind
from jaxllm.engine.core.sizes import StepSizes
from jaxllm.engine.features.readout.pooling import SUMS
from jaxllm.engine.start.memory import weight_bytes
from jaxllm.models.abstract import ModelParts
from jaxllm.models.caches import CacheSpec, Joined, Paged, Shared, parts_of
from jaxllm.models.config import DecoderConfig
from jaxllm.weights.loader import ParamSpec

RUNS_LAYERS: tuple[Kind, ...] = ("decode", "verify", "backbone", "encode")
RUNS_HEAD: tuple[Kind, ...] = ("decode", "verify", "head", "read")
_TABLES = ("embed.weight", "*.embed.weight", "positions")
_EXPERTS = "*.experts.*"


def weights_read(model: ModelParts, executable: RanExecutable) -> int:
    """Bytes of weights that an executable reads of a device, each once for every time that it runs the model.

    Of tables of embeddings a row for each token; of experts those of one token, which is the least that any number of
    tokens need.
    """
    kind, total = executable.key.kind, 0
    for param in model.params:
        if kind in RUNS_LAYERS and not _is_head(param, model.spec.config, alone=True):
            total += _layers_read(param, model, executable.used or 0)
        if kind in RUNS_HEAD and executable.key != SUMS and _is_head(param, model.spec.config):
            total += weight_bytes([param], model.options.tp)
    return total * executable.times


def _is_head(param: ParamSpec, config: DecoderConfig, *, alone: bool = False) -> bool:
    """Whether the head reads it; `alone`: and nothing else does."""
    if config.encoder is not None:
        return False
    if param.path == "embed.weight":
        return config.tie_word_embeddings and not alone
    return param.path.split(".")[0] in ("head", "norm")


def _layers_read(param: ParamSpec, model: ModelParts, tokens: int) -> int:
    whole = weight_bytes([param], model.options.tp)
    if any(fnmatch.fnmatchcase(param.path, table) for table in _TABLES):
        return whole // param.shape[0] * min(tokens, param.shape[0])
    moe = model.spec.config.moe
    if moe and fnmatch.fnmatchcase(param.path, _EXPERTS):
        return whole * moe.top_k // moe.num_experts
    return whole


def caches_read(sizes: StepSizes, executable: RanExecutable, sequences: Sequence[RanSequence]) -> int:
    """Bytes of keys, values and states that an executable reads of a device's caches, each once a run of the model."""
    if executable.key.kind not in ("decode", "verify", "backbone"):
        return 0
    grown = [RanSequence(each.length, each.context + step) for each in sequences for step in range(executable.times)]
    return sum(_read(sizes, part, grown) for spec in sizes.caches for part in _parts(sizes.caches, spec))


def _parts(specs: Sequence[CacheSpec], spec: CacheSpec) -> list[CacheSpec]:
    """What a layer reads, of its own or of an earlier layer's."""
    if isinstance(spec, Shared):
        return _parts(specs, specs[spec.layer])
    return list(parts_of([spec])) if isinstance(spec, Joined) else [spec]


def _read(sizes: StepSizes, part: CacheSpec, sequences: Sequence[RanSequence]) -> int:
    layout = sizes.cache_layout
    if isinstance(part, Paged):
        return layout.page_bytes([part]) * sum(_seen(part, each) for each in sequences) // sizes.page_size
    return layout.state_bytes([part]) * len(sequences)


def _seen(part: Paged, sequence: RanSequence) -> int:
    """Tokens whose keys some token of the step's sees."""
    if part.window is None:
        return sequence.context
    first = sequence.context - sequence.length
    if part.chunked:
        return sequence.context - first // part.window * part.window
    return min(sequence.context, part.window + sequence.length - 1)
