"""From a checkpoint to its model family, its config, its tensors' names and the model with abstract weights."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, NamedTuple

import jax
import msgspec
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.folders import in_home
from jaxllm.models import families
from jaxllm.models.config import DecoderConfig, Projection, check_decoder, check_direction
from jaxllm.models.decoder import Decoder
from jaxllm.models.encoder import Encoder
from jaxllm.models.family import Family
from jaxllm.models.gguf import GgufFile, as_stored, gguf_config
from jaxllm.models.hf_fields import check_hf
from jaxllm.models.layers.linear import AdapterTable
from jaxllm.models.names import hf_renaming, linear
from jaxllm.models.options import AdapterSizes, BuildOptions
from jaxllm.models.tasks import DENSE_MODULES, GGUF_HEAD, class_labels, gguf_pooling, read_sentence_files
from jaxllm.models.vision.tower import Tower, TowerConfig
from jaxllm.quantization.weight import DenseKind, Weight, WeightKind
from jaxllm.weights import overridden
from jaxllm.weights.checkpoint import Checkpoint
from jaxllm.weights.fields import shown
from jaxllm.weights.gguf_file import WeighedCheckpoint, read_imatrix
from jaxllm.weights.loader import ParamSpec
from jaxllm.weights.names import NameMap, Pattern, expand, renamed
from jaxllm.weights.saved import SavedCheckpoint
from jaxllm.wording import did_you_mean

_MODULES = [import_module(f"{families.__name__}.{file.name}") for file in iter_modules(families.__path__)]
_FOUND = {value.name: value for module in _MODULES for value in vars(module).values() if isinstance(value, Family)}

FAMILIES = tuple(_FOUND[name] for name in sorted(_FOUND, key=str.casefold))  # of all files of `families/`

GGUF_FAMILIES = {  # the architectures of GGUF files, and the family of one that no other owns
    name: family
    for family in FAMILIES
    if family.gguf is not None and family.owns is None
    for name in family.gguf_architectures
}

WRAPPERS = {wrapper: family for family in FAMILIES for wrapper in family.wrappers}
"""Multimodal `model_type`s whose `text_config` is served, and the family of one that does not say its own type."""

IGNORED_TENSORS: tuple[str, ...] = (
    "*rotary_emb.inv_freq", "rope_freqs.weight", "rope_factors_*.weight", "*.k_scale", "*.v_scale", "model.mtp_*",
    "*.masked_bias", "h.*.attn.bias", "transformer.h.*.attn.bias", "gpt_neox.layers.*.attention.bias", "mtp.*",
)  # fmt: skip
"""Tensors that the config makes superfluous, scales of quantized keys and values, and modules that predict tokens."""

IMAGE_TENSORS = (  # tensors of a wrapper for images and sounds, besides its language model
    "*vision_tower.*", "*multi_modal_projector.*", "*mm_projector.*", "*audio_tower.*", "*embed_vision.*",
    "*embed_audio.*", "*vision_embedder.*", "*vision_model.*", "*visual.*", "*vision_encoder.*",
    "*vision_projection.*", "model.connector.*", "mlp1.*", "mlp_AR.*", "*vqmodel.*", "*vocabulary_mapping.*",
)  # fmt: skip


@dataclass(frozen=True)
class ModelSpec:
    """A checkpoint's model: its family, its parsed config, and where its tensors are."""

    family: Family
    config: DecoderConfig
    names: NameMap
    ignored: tuple[str, ...]

    def build(self, options: BuildOptions) -> Decoder | Encoder:
        return (Decoder if self.config.encoder is None else Encoder)(self.config, options)

    @property
    def shape(self) -> Any:
        return self.config


@contextmanager
def read_of(path: Path, lacks: str) -> Iterator[None]:
    """Name the file in errors, and a key that it `lacks`."""
    try:
        yield
    except KeyError as error:
        raise CheckpointError(f"{path}: {lacks} {shown(error.args[0])}") from None
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


def model_spec(checkpoint: Checkpoint) -> ModelSpec:
    """Find a checkpoint's family and parse its config. Raises CheckpointError for unknown ones and missing keys."""
    if isinstance(checkpoint, SavedCheckpoint):
        return _saved_spec(checkpoint)
    return _gguf_spec(checkpoint) if checkpoint.format == "gguf" else _hf_spec(checkpoint)


def _saved_spec(checkpoint: SavedCheckpoint) -> ModelSpec:
    c = checkpoint.config
    family = _find(checkpoint, "family", c["family"], {family.name: family for family in FAMILIES})
    try:
        config = msgspec.convert(c["decoder"], DecoderConfig)
        check_decoder(config)
    except (msgspec.ValidationError, CheckpointError) as error:
        raise CheckpointError(f"{checkpoint.path}: decoder: {error}") from None
    return ModelSpec(family, config, checkpoint.names, ())


def _gguf_spec(checkpoint: Checkpoint) -> ModelSpec:
    kind = _find(checkpoint, "general.architecture", checkpoint.config.get("general.architecture"), GGUF_FAMILIES)
    file = GgufFile(checkpoint)
    with read_of(checkpoint.path, "its metadata have no"):
        kin = [family for family in FAMILIES if file.architecture in family.gguf_architectures]
        family = next((one for one in kin if one.owns is not None and one.owns(file)), kind)
        file = GgufFile(checkpoint, family.fields)
        read = gguf_config(file, family.gguf or {})
        if unknown := sorted(checkpoint.overrides.keys() - read.keys() - {"rope_scaling", "rope_parameters"}):
            raise CheckpointError(f"hf_overrides has {unknown[0]!r}, which is not read of a GGUF file")
        config = as_stored(file, family.from_hf(overridden(read, checkpoint.overrides)))
        check_decoder(config)
        labels = class_labels(checkpoint)
    patterns = family.names("gguf", config)
    if labels:
        config = _classifier(config, len(labels))
        patterns |= {"head.weight": GGUF_HEAD} if config.encoder is None else {}
    config, more = _gguf_projections(config, checkpoint, file)
    further = tuple(f"blk.{config.num_layers + i}.*" for i in range(file.further_layers))
    ignored = (*IGNORED_TENSORS, *further, *_unused("blk.{}.attn_{}*", config))
    return ModelSpec(family, config, expand(patterns | more, config.num_layers), ignored)


def _gguf_projections(
    config: DecoderConfig, checkpoint: Checkpoint, file: GgufFile
) -> tuple[DecoderConfig, dict[str, Pattern]]:
    """The same encoder with the Dense modules of a file, which are there if they were asked for when it was made."""
    names = [name for name in DENSE_MODULES if file.has(name)]
    if config.encoder is None or not names:
        return config, {}
    projections = tuple(Projection(file.rows(name), bias=False) for name in names)
    encoder = replace(config.encoder, pooling=gguf_pooling(checkpoint, "mean"), projections=projections)
    return replace(config, encoder=encoder), {f"projections.products.{i}.weight": name for i, name in enumerate(names)}


def _unused(pattern: str, config: DecoderConfig) -> list[str]:
    """Keys and values of layers that attend to those of others: files have some all the same."""
    sharing = [index for index, layer in enumerate(config.layers) if layer.shares_kv_of is not None]
    return [pattern.format(index, part) for index in sharing for part in ("k", "v")]


def _hf_spec(checkpoint: Checkpoint) -> ModelSpec:
    c, ignored = checkpoint.config, IGNORED_TENSORS
    kind, text = c.get("model_type"), c.get("text_config")
    if isinstance(kind, str) and kind in WRAPPERS:
        if not isinstance(text, dict | None):
            raise CheckpointError(f"{checkpoint.path}: text_config is {shown(text)}; accepted is an object")
        ignored += IMAGE_TENSORS
        tied = {"tie_word_embeddings": c["tie_word_embeddings"]} if "tie_word_embeddings" in c else {}
        if checkpoint.tensors and not any(name.endswith("lm_head.weight") for name in checkpoint.tensors):
            tied = {"tie_word_embeddings": True}  # files may rely on the default of their wrapper
        # Older files have the language model's keys beside the wrapper's own.
        kinds = WRAPPERS[kind].model_types
        own = {"model_type": f"{kind}_text" if f"{kind}_text" in kinds else kinds[0]}
        c = c | own | tied if text is None else own | text | tied
    known = {name: family for family in FAMILIES for name in family.model_types}
    family = _find(checkpoint, "model_type", c.get("model_type"), known)
    with read_of(checkpoint.path, "its config.json has no"):
        check_hf(c, family.layer_types, family.fields)
        if c.get("sliding_window") == 0:  # as transformers saves a model without windows
            c = c | {"sliding_window": None}
        config = family.from_hf(c)
        check_direction(c, config)
        check_decoder(config)
        labels = class_labels(checkpoint)
    ignored += family.ignored
    ignored += checkpoint.zero_biases
    rename = hf_renaming(checkpoint.tensors)
    patterns = family.names("safetensors", config)
    if labels:
        config = _classifier(config, len(labels))
        if config.encoder is None:
            patterns["head.weight"] = "score.weight"
        else:
            patterns.setdefault("classifier.output.weight", "score.weight")
    config, more = with_projections(config, checkpoint.path)
    patterns |= more
    names = renamed(expand(patterns, config.num_layers), rename)
    head, tensors = rename("lm_head.weight"), checkpoint.tensors
    if config.tie_word_embeddings and head in tensors:
        embedding = next((source.name for (source,) in names["embed.weight"] if source.name in tensors), None)
        if embedding is not None and _same(checkpoint, head, embedding):
            ignored += (head,)
        else:
            config = replace(config, tie_word_embeddings=False)
    # Layers past the last predict further tokens (DeepSeek V3's MTP), which is a module of its own.
    further = c.get("num_nextn_predict_layers") or 0
    ignored += tuple(rename(f"model.layers.{config.num_layers + i}.*") for i in range(further))
    ignored += tuple(map(rename, _unused("model.layers.{}.self_attn.{}_*", config)))
    return ModelSpec(family, config, names, ignored)


def _same(checkpoint: Checkpoint, a: str, b: str) -> bool:
    numbers = (checkpoint.read(name).expand().view(np.uint8) for name in (a, b))
    return checkpoint.tensors[a] == checkpoint.tensors[b] and np.array_equal(next(numbers), next(numbers))


def adapter_names(spec: ModelSpec) -> dict[str, NameMap]:
    """By the format of an adapter, where a checkpoint of that format has the model's parameters."""
    config, names = spec.config, spec.family.names
    formats = {"peft": "safetensors", "gguf": "gguf"}
    return {kind: expand(names(format, config), config.num_layers) for kind, format in formats.items()}


def _classifier(config: DecoderConfig, num_labels: int) -> DecoderConfig:
    """The same decoder under a classification head, which transformers gives no bias, softcap or scale."""
    return replace(
        config, num_labels=num_labels, tie_word_embeddings=False, head_bias=False, logit_softcap=None, logit_scale=1.0
    )


def with_projections(config: DecoderConfig, path: Path) -> tuple[DecoderConfig, dict[str, Pattern]]:
    """The same encoder with the Dense modules of sentence-transformers' files, and their tensors."""
    files = read_sentence_files(path)
    if not files.projections:
        return config, {}
    if config.encoder is None or files.pooling is None:
        raise CheckpointError(f"{path / 'modules.json'}: has Dense modules, which are supported behind encoders only")
    projections = tuple(projection for _, projection in files.projections)
    encoder = replace(config.encoder, pooling=files.pooling, projections=projections)
    names: dict[str, Pattern] = {}
    for index, (folder, _) in enumerate(files.projections):
        names |= linear(f"projections.products.{index}", f"{folder}.linear")
    return replace(config, encoder=encoder), names


def _find(checkpoint: Checkpoint, key: str, kind: Any, known: dict[str, Family]) -> Family:
    if not isinstance(kind, str) or kind not in known:
        supported = [*known, *(WRAPPERS if key == "model_type" else ())]
        hint = did_you_mean(str(kind)[:60], supported)
        raise CheckpointError(f"{checkpoint.path}: {key} is {shown(kind)}; supported are {', '.join(supported)}{hint}")
    return known[kind]


logger = logging.getLogger(__name__)


def with_importance(checkpoint: Checkpoint, spec: ModelSpec, imatrix: Path | None) -> Checkpoint:
    """`checkpoint`, its tensors with their importance; as it is where there is no `imatrix`.

    Raises:
        CheckpointError: the file is not readable.
        ConfigError: it is of another model, or the model's tensors have no names that GGUF knows.
    """
    if imatrix is None:
        return checkpoint
    given = read_imatrix(in_home(imatrix))
    names = _gguf_names(checkpoint, spec)
    found = {name: given[theirs] for name, theirs in names.items() if theirs in given}
    if not found:
        raise ConfigError(
            f"imatrix is {str(imatrix)!r}, none of whose {len(given)} entries is a weight of {checkpoint.path}"
        )
    matrices = [name for name, info in checkpoint.tensors.items() if len(info.shape) > 1]
    logger.info("imatrix: %d of %d matrices have an entry", len(found), len(matrices))
    return WeighedCheckpoint(checkpoint, found)


def _gguf_names(checkpoint: Checkpoint, spec: ModelSpec) -> dict[str, str]:
    if checkpoint.format == "gguf":
        return {name: name for name in checkpoint.tensors}
    if checkpoint.format != "safetensors" or not spec.family.gguf_architectures:
        raise ConfigError(
            f"imatrix is set, but the tensors of {checkpoint.path} have no names in GGUF; "
            "accepted with a GGUF file, or a Hugging Face model of a family that llama.cpp has"
        )
    import gguf

    architectures = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    table = gguf.get_tensor_name_map(architectures[spec.family.gguf_architectures[0]], spec.config.num_layers)
    plain = {name: re.sub(r"^(model\.)?language_model\.(model\.)?", "model.", name) for name in checkpoint.tensors}
    found = {name: table.get_name(known, try_suffixes=(".weight", ".bias")) for name, known in plain.items()}
    return {name: theirs for name, theirs in found.items() if theirs is not None}


def abstract_model(
    spec: ModelSpec, options: BuildOptions, kinds: Callable[[ParamSpec], tuple[WeightKind, ...]] | None = None
) -> tuple[Decoder | Encoder, list[ParamSpec]]:
    """The module with abstract weights, and its parameters in the order of `nnx.split`'s leaves.

    `kinds` says what each weight is kept as: one kind, or one a segment; without it all are dense, as declared.

    Raises CheckpointError if a shard would part numbers that a kind stores together.
    """
    model = spec.build(options)
    return model, with_kinds(model, options, kinds)


def abstract_tower(
    config: TowerConfig, options: BuildOptions, kinds: Callable[[ParamSpec], tuple[WeightKind, ...]] | None = None
) -> tuple[Tower, list[ParamSpec]]:
    """A tower for images, as `abstract_model`."""
    tower = Tower(config, options)
    return tower, with_kinds(tower, options, kinds)


def with_kinds(
    model: nnx.Module, options: BuildOptions, kinds: Callable[[ParamSpec], tuple[WeightKind, ...]] | None
) -> list[ParamSpec]:
    """The parameters of a module, which has weights of these kinds then."""
    _, state = nnx.split(model)
    specs = []
    for path, variable in _variables(state):
        declared = param_spec(path, variable)
        if declared.kinds and (kinds is not None or declared.host is not None):
            declared = replace(declared, kinds=declared.kinds if kinds is None else kinds(declared))
            declared.check_shards(options.tp)
            variable.set_value(declared.abstract())
        specs.append(declared)
    nnx.update(model, state)
    return specs


@dataclass(frozen=True)
class AdaptedModel:
    """A model that adds what adapters give, without its parameters and tables.

    Attributes:
        tables: those arrays, `[places, ...]`, in the order in which `merged` takes them.
    """

    graph: Any
    tree: Any
    tables: tuple[ParamSpec, ...]

    def merged(self, parameters: Any, tables: Sequence[jax.Array]) -> Decoder:
        """The model with the parameters that `nnx.split` gives of the model without adapters, and with tables."""
        model: Decoder = nnx.merge(self.graph, parameters, jax.tree.unflatten(self.tree, tables))
        return model


def adapted_model(spec: ModelSpec, options: BuildOptions, sizes: AdapterSizes) -> AdaptedModel:
    split: Any = nnx.split  # whose result mypy cannot take apart
    graph, _, tables = split(spec.build(replace(options, adapters=sizes)), nnx.Param, AdapterTable)
    return AdaptedModel(graph, jax.tree.structure(tables), tuple(param_spec(*found) for found in _variables(tables)))


def _variables(state: Any) -> Iterator[tuple[str, nnx.Variable]]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    return ((".".join(str(key.key) for key in path), variable) for path, variable in leaves)


def param_spec(path: str, variable: nnx.Variable) -> ParamSpec:
    value, metadata = variable.get_value(), variable.get_metadata()
    if not isinstance(value, Weight):
        return ParamSpec(path, value.shape, np.dtype(value.dtype), metadata["axes"], metadata["layout"])
    dtype = np.dtype(jax.tree.leaves(value)[0].dtype)
    kinds = (DenseKind(dtype),)
    return ParamSpec(path, value.shape, dtype, metadata["axes"], metadata["layout"], kinds, metadata["host"])


class ModelParts(NamedTuple):
    """A model as an engine runs it, but for its weights."""

    spec: ModelSpec
    options: BuildOptions
    params: Sequence[ParamSpec]
    mesh: Mesh


class LiveModel(NamedTuple):
    """A model that an engine runs."""

    parts: ModelParts
    arrays: Callable[[], Sequence[jax.Array]]  # leaves of all parameters, in the order of `parts.params`
