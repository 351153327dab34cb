"""Tiny encoders against transformers: alone, packed with others, classifiers, several devices, other names."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from jaxllm.errors import CheckpointError
from jaxllm.models.registry import model_spec
from jaxllm.models.tasks import read_tasks
from jaxllm.weights import open_checkpoint
from tests.models.encoder_harness import EncoderHarness
from tests.reference import TinyGolden, load_golden
from tests.reference.oracle import encoder_output, load_oracle
from tests.reference.tiny import save_checkpoint, tiny_config, tiny_weights, write_checkpoint
from tests.reference.tiny_configs import ENCODERS
from tests.reference.tiny_configs.encoders import SECOND_TEXT
from tests.reference.tiny_gguf import write_gguf

TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=ENCODERS)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(name, tmp_path_factory) -> EncoderHarness:
    return EncoderHarness(write_checkpoint(name, tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="module")
def golden(name) -> TinyGolden:
    return load_golden(name)


def second_text(name: str) -> int:
    return SECOND_TEXT if tiny_config(name).get("type_vocab_size", 0) > 1 else 0


def test_a_text_alone(name, model, golden):
    """A classifier has its text's scores in the row of each token."""
    (found,) = model.run([golden.prompt_token_ids], [second_text(name)])
    assert np.abs(found - golden.logits).max() <= TOLERANCE


def test_texts_beside_each_other_do_not_see_each_other(name, model, golden):
    """The golden's text lies across tiles of attention, between others of one token and of many."""
    ids = golden.prompt_token_ids
    others = [ids[::-1] + ids[:31], ids[:1], ids[5:20], ids[:50] * 2]
    texts = [others[0], others[1], ids, others[2], others[3]]
    seconds = [0, 0, second_text(name), 9, 0]
    together = model.run(texts, seconds)
    assert np.abs(together[2] - golden.logits).max() <= TOLERANCE
    for text, second, found in zip(texts, seconds, together, strict=True):
        (alone,) = model.run([text], [second])
        np.testing.assert_allclose(found, alone, atol=2e-5)


def test_transformers_agrees_today(name, tmp_path: Path, golden):
    pytest.importorskip("torch")
    oracle = load_oracle(name, write_checkpoint(name, tmp_path))
    np.testing.assert_allclose(encoder_output(oracle, golden.prompt_token_ids), golden.logits, atol=TOLERANCE)


OLDER_NAMES = {
    "bert": (
        (r"^", "bert."),
        (r"LayerNorm\.weight", "LayerNorm.gamma"),
        (r"LayerNorm\.bias", "LayerNorm.beta"),
    ),
    "modernbert": ((r"^", "model."),),
    "nomic_bert": ((r"^", "nomic_bert."),),
}


@pytest.mark.parametrize("name", OLDER_NAMES)
def test_names_and_keys_of_the_first_published_files(name: str, tmp_path: Path):
    weights, config = {}, tiny_config(name)
    for tensor, value in tiny_weights(name).items():
        for pattern, replacement in OLDER_NAMES[name]:
            tensor = re.sub(pattern, replacement, tensor)
        weights[tensor] = value
    if name == "nomic_bert":
        keys = {
            "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
            "intermediate_size": "n_inner", "max_position_embeddings": "n_positions",
            "layer_norm_eps": "layer_norm_epsilon",
        }  # fmt: skip
        config = {keys.get(key, key): value for key, value in config.items()}
        config["rotary_emb_base"] = config.pop("rope_parameters")["rope_theta"]
        config["activation_function"] = "swiglu"
    golden = load_golden(name)
    (found,) = EncoderHarness(save_checkpoint(config, weights, tmp_path)).run(
        [golden.prompt_token_ids], [second_text(name)]
    )
    assert np.abs(found - golden.logits).max() <= TOLERANCE


def test_nomic_bert_under_the_names_of_transformers(tmp_path: Path):
    names = (
        ("encoder.", ""), ("emb_ln", "embeddings.LayerNorm"), ("attn.out_proj", "self_attn.o_proj"),
        ("fc11", "up_proj"), ("fc12", "gate_proj"), ("fc2", "down_proj"),
        ("norm1", "post_attention_layernorm"), ("norm2", "post_mlp_layernorm"),
    )  # fmt: skip
    weights: dict[str, np.ndarray] = {}
    for tensor, value in tiny_weights("nomic_bert").items():
        for old, new in names:
            tensor = tensor.replace(old, new)
        if "Wqkv" in tensor:
            for part, rows in zip("qkv", np.split(value, 3), strict=True):
                weights[tensor.replace("attn.Wqkv", f"self_attn.{part}_proj")] = rows.copy()
        else:
            weights[tensor] = value
    golden = load_golden("nomic_bert")
    model = EncoderHarness(save_checkpoint(tiny_config("nomic_bert"), weights, tmp_path))
    (found,) = model.run([golden.prompt_token_ids], [SECOND_TEXT])
    assert np.abs(found - golden.logits).max() <= TOLERANCE


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("bert", {"is_decoder": True}, "is_decoder is True; accepted is False"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'; accepted is"),
        ("modernbert", {"norm_bias": True}, "norm_bias is True; accepted is false"),
        ("modernbert", {"local_attention": 1}, "local_attention is 1"),
        ("nomic_bert", {"prenorm": True}, "prenorm is True; accepted is False"),
        ("nomic_bert", {"rotary_scaling_factor": 2}, "rotary_scaling_factor is 2; accepted is None"),
    ],
)
def test_what_is_not_computed_is_refused(name: str, change: dict, message: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(name) | change))
    with pytest.raises(CheckpointError, match=message):
        model_spec(open_checkpoint(tmp_path, "dummy"))


def test_a_decoder_that_is_to_see_later_tokens_is_refused(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("qwen3") | {"is_causal": False}))
    with pytest.raises(CheckpointError, match="is_causal is False; accepted is True or null, since this family is not"):
        model_spec(open_checkpoint(tmp_path, "dummy"))


def test_embedding_gemmas_dense_modules_in_gguf(tmp_path: Path):
    rng = np.random.default_rng(3)
    dense = {f"dense_{i}.weight": rng.standard_normal(shape, np.float32) for i, shape in ((2, (80, 64)), (3, (24, 80)))}
    plain = write_gguf("embedding_gemma", tmp_path / "plain.gguf")
    path = write_gguf("embedding_gemma", tmp_path / "dense.gguf", also_tensors=dense)
    text = load_golden("embedding_gemma").prompt_token_ids[:30]
    (states,), (vectors,) = EncoderHarness(plain).run([text]), EncoderHarness(path).run([text])
    expected = dense["dense_3.weight"] @ (dense["dense_2.weight"] @ states.astype(np.float64).mean(0))
    np.testing.assert_allclose(vectors, np.tile(expected, (len(text), 1)), rtol=1e-4, atol=1e-3)
    tasks = [read_tasks(open_checkpoint(file), encodes=True) for file in (plain, path)]
    assert [(one.pooling, one.projects) for one in tasks] == [("mean", False), ("mean", True)]


def test_a_classifier_of_modernbert_in_gguf_is_refused(tmp_path: Path):
    head = {"cls.output.weight": np.zeros((2, 60), np.float32)}
    path = write_gguf("modernbert", tmp_path / "model.gguf", also_tensors=head)
    with pytest.raises(CheckpointError, match=r"'cls.output.weight' is a classification head, and GGUF files of"):
        model_spec(open_checkpoint(path))


def test_a_classifier_of_roberta_in_gguf(tmp_path: Path):
    """Its head has both products there; BERT's lacks the first one, and is refused for that."""
    rng = np.random.default_rng(4)
    head = {"cls.weight": (72, 72), "cls.bias": (72,), "cls.output.weight": (2, 72), "cls.output.bias": (2,)}
    tensors = {name: rng.standard_normal(shape, np.float32) / 8 for name, shape in head.items()}
    path = write_gguf("bert", tmp_path / "model.gguf", also_tensors=tensors)
    ids = load_golden("bert").prompt_token_ids
    (states,) = EncoderHarness(write_gguf("bert", tmp_path / "plain.gguf")).run([ids])
    (scores,) = EncoderHarness(path).run([ids])
    hidden = np.tanh(tensors["cls.weight"] @ states[0].astype(np.float64) + tensors["cls.bias"])
    np.testing.assert_allclose(scores[0], tensors["cls.output.weight"] @ hidden + tensors["cls.output.bias"], atol=1e-5)
    lacks = {name: value for name, value in tensors.items() if name.startswith("cls.output")}
    with pytest.raises(CheckpointError, match=r"tensor 'cls\.bias' is missing"):
        EncoderHarness(write_gguf("bert", tmp_path / "lacks.gguf", also_tensors=lacks))
