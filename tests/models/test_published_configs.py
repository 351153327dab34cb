"""Published models by their config.json alone: they parse, they plan, and a step of them has the shapes it should."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxllm import EngineConfig
from jaxllm.engine.core.keys import Key
from jaxllm.engine.start.blueprint import UNPAGED_LENGTH, make_blueprint
from jaxllm.engine.start.plan import Blueprint, step_functions
from jaxllm.engine.start.platform import Platform
from jaxllm.models.caches import CacheSpec, Paged, PerSlot, parts_of
from jaxllm.models.registry import FAMILIES, model_spec
from jaxllm.sharding.mesh import build_meshes
from jaxllm.weights import open_checkpoint
from tests.reference.tiny import tiny_config

CONFIGS = {path.stem: path for path in sorted((Path(__file__).parents[1] / "reference" / "configs").glob("*.json"))}
ROOMY = Platform("cpu", 1, 2**44, 2**44)
WINDOWS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size", "local": "window_size"}
"""Kinds of layers that do not see all, and the key that says how much."""
LENGTHS = ("model_max_length", "n_positions", "seq_length", "max_seq_len")
"""Keys of the longest context before the usual one."""
ACTIVATIONS = {"bloom": "gelu_new", "mpt": "gelu"}
"""Of families whose config does not say it."""
FOUR_TIMES = ("bloom", "mpt")
"""Families whose MLP is so much wider than the model."""
ROWS_OF_PADDING = ("opt", "biogpt")
"""Families whose table of positions has two rows more, which are not read."""
FIXED_EPS = ("opt", "biogpt", "olmo")
"""Families whose norms have transformers' or torch's default, whatever a config says."""
UNITS = {"M": 10**6, "B": 10**9}


def test_stablelm_ignores_a_head_dim_as_its_own_code_does(tmp_path):
    """transformers' StableLmAttention shares the hidden size out among the heads, whatever the config says."""
    configs = []
    for change in ({}, {"head_dim": 80}):
        (tmp_path / "config.json").write_text(json.dumps(tiny_config("stablelm") | change))
        configs.append(model_spec(open_checkpoint(tmp_path, "dummy")).config)
    assert configs[0] == configs[1]
    assert configs[1].head_dim == 96 // 4


@pytest.fixture(scope="module", params=CONFIGS)
def published(request) -> dict[str, Any]:
    """A file of tests/reference/configs."""
    return json.loads(CONFIGS[request.param].read_text())


@pytest.fixture(scope="module")
def blueprint(published, tmp_path_factory) -> Blueprint:
    directory = tmp_path_factory.mktemp("published")
    (directory / "config.json").write_text(json.dumps(published["config"]))
    config = EngineConfig(model=str(directory), load_format="dummy")
    return make_blueprint(config, open_checkpoint(directory, "dummy"), ROOMY)


def test_parameters_are_as_many_as_published(published, blueprint):
    config = published["config"]
    unread = 2 * config["hidden_size"] if config["model_type"] in ROWS_OF_PADDING else 0
    assert blueprint.plan.num_parameters == published["parameters"] - unread


def test_the_whole_context_is_planned(published, blueprint):
    config = published["config"].get("text_config", published["config"])
    longest = next((config[key] for key in LENGTHS if config.get(key)), None)
    longest = longest or config.get("max_position_embeddings", 131_072)  # Gemma 3's multimodal files leave it out
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") == "dynamic":
        longest = int(scaling["factor"] * longest)
    encoder = blueprint.spec.config.encoder
    longest -= encoder.first_position if encoder is not None else 0
    if not blueprint.spec.config.page_groups and encoder is None:  # a state has no longest context
        longest = UNPAGED_LENGTH
    assert blueprint.plan.max_model_len == longest
    assert not [note for note in blueprint.plan.notes if not note.startswith("dummy weights are not quantized")]
    assert blueprint.plan.weight_bytes >= 2 * published["parameters"]


def test_steps_have_the_shapes_of_the_model(blueprint):
    config, sizes = blueprint.spec.config, blueprint.sizes
    functions = step_functions(blueprint, build_meshes(1)[0])
    if config.encoder is not None:
        encode, arguments = functions.step(Key("encode", 16))
        (hidden,) = jax.eval_shape(encode, *arguments)
        assert hidden.shape == (sizes.max_num_batched_tokens, config.hidden_size) and not any(sizes.buffers)
        return
    prefill, prefill_args = functions.step(Key("backbone", 8))
    caches, _, hidden = jax.eval_shape(prefill, *prefill_args)
    assert hidden.shape == (sizes.max_num_batched_tokens, config.hidden_size)
    kept = [_buffers(spec) for spec in config.caches]
    assert [len(layer) for layer in caches] == kept and len(kept) == config.num_layers
    decode, decode_args = functions.step(Key("decode", 2))
    _, _, sampled = jax.eval_shape(decode, *decode_args)
    assert sampled.tokens.shape == (2 * sizes.decode_steps,)


def _buffers(spec: CacheSpec) -> int:
    """What a layer has of its own: nothing where it reads another's."""
    own = [part for part in parts_of([spec]) if isinstance(part, Paged | PerSlot)]
    return sum(len(part.dims) if isinstance(part, Paged) else len(part.shapes) for part in own)


def test_settings_are_those_that_transformers_reads(published, blueprint):
    """Written out or left to the family's defaults: sizes, norms, activation, windows and rotary bases."""
    if published["config"]["model_type"] == "baichuan":
        pytest.skip("transformers has no class of it")
    if "su" in str(published["config"].get("rope_scaling")):
        pytest.skip("transformers no longer reads this spelling")
    from transformers import AutoConfig

    config = {key: value for key, value in published["config"].items() if key != "quantization_config"}
    theirs, ours = AutoConfig.for_model(**config).get_text_config(), blueprint.spec.config
    acts = ("mlp_hidden_act", "hidden_activation", "hidden_act", "activation_function", "activation")
    act = next(
        (found for name in acts if (found := getattr(theirs, name, None))), ACTIVATIONS.get(theirs.model_type, "silu")
    )
    names = ("rms_norm_eps", "layer_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_epsilon")
    fixed = theirs.model_type in FIXED_EPS
    eps = 1e-5 if fixed else next(getattr(theirs, name) for name in names if hasattr(theirs, name))
    assert (ours.vocab_size, ours.hidden_size) == (theirs.vocab_size, theirs.hidden_size)
    adjusted = getattr(theirs, "block_auto_adjust_ff_dim", False)  # two thirds of the size that is stated
    if any(layer.dense for layer in ours.layers) and not adjusted:
        assert ours.intermediate_size == _mlp_size(theirs)
    if ours.attends:
        assert ours.num_heads == theirs.num_attention_heads
        assert list(map(ours.num_kv_heads_of, ours.layers)) == _kv_heads(theirs, ours.num_layers)
    assert (ours.norm_eps, ours.hidden_act) == (eps, act)
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    kinds = getattr(theirs, "layer_types", None) or getattr(theirs, "attention_layers", None)
    kinds = kinds or [_kind_of_all_layers(theirs)] * ours.num_layers
    own = int(ours.encoder is not None)  # an encoder's window counts the token itself, transformers' what is beside it
    assert [layer.window for layer in ours.layers] == [
        getattr(theirs, WINDOWS[kind]) + own if kind in WINDOWS else None for kind in kinds
    ]
    for layer, kind in zip(ours.layers, kinds, strict=True):
        if layer.rope is not None and hasattr(theirs, "rope_parameters"):
            rope = theirs.rope_parameters.get(kind, theirs.rope_parameters)
            if not rope.get("alpha"):  # with which the base is another, and nothing else is
                assert (layer.rope.theta, layer.rope.kind) == (rope["rope_theta"], rope["rope_type"])


def _mlp_size(config: Any) -> int:
    """Of dense MLPs, under the names that families have for it."""
    if config.model_type in ("opt", "falcon"):
        return config.ffn_dim if config.model_type == "opt" else config.ffn_hidden_size
    if hasattr(config, "n_inner"):
        return config.n_inner or 4 * config.n_embd
    if config.model_type in FOUR_TIMES:
        return 4 * config.hidden_size
    return getattr(config, "intermediate_size_mlp", None) or config.intermediate_size or 4 * config.hidden_size


def _kv_heads(config: Any, layers: int) -> list[int]:
    """Of each layer: a config whose layers differ refuses to say one number."""
    if config.model_type in ("gpt2", "falcon"):
        return [config.n_head if config.model_type == "gpt2" else 1] * layers
    each = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config] * layers
    return [getattr(one, "num_key_value_heads", one.num_attention_heads) for one in each]


def _kind_of_all_layers(config: Any) -> str:
    """Of families without layer_types: a window, where there is one, is on every layer."""
    slides = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return "sliding_attention" if slides else "full_attention"


@pytest.mark.parametrize("name", CONFIGS)
def test_counts_are_the_published_figures(name):
    """What transformers counts rounds to what the model's authors say."""
    file = json.loads(CONFIGS[name].read_text())
    figure, unit = file["published"][:-1], UNITS[file["published"][-1]]
    digits = len(figure.partition(".")[2])
    assert f"{file['parameters'] / unit:.{digits}f}" == figure


def test_every_family_has_a_published_model():
    wrapped = {path: json.loads(path.read_text())["config"] for path in CONFIGS.values()}
    types = {c.get("text_config", c)["model_type"] for c in wrapped.values()}
    assert [family.name for family in FAMILIES if not types & set(family.model_types)] == []
