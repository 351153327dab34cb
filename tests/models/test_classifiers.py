"""Classification heads against transformers, and what a checkpoint's files say of its use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm.errors import CheckpointError
from jaxllm.models.tasks import read_tasks
from jaxllm.requests.outputs import ModelTasks
from jaxllm.weights import open_checkpoint
from tests.models.harness import Chunk, Harness
from tests.reference import load_golden
from tests.reference.oracle import load_oracle, oracle_logits
from tests.reference.tiny import save_checkpoint, tiny_config, tiny_weights, write_checkpoint
from tests.reference.tiny_configs import CLASSIFIERS
from tests.reference.tiny_gguf import write_gguf

TOLERANCE = 1e-4
YES, NO = 31, 17


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path):
    golden = load_golden(name)
    ids = golden.prompt_token_ids
    model = Harness(write_checkpoint(name, tmp_path))
    parts = [model.run([ids], [Chunk(0, a, b)])[0] for a, b in ((0, 11), (11, 12), (12, len(ids)))]
    np.testing.assert_allclose(np.concatenate(parts), golden.logits, atol=TOLERANCE)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_transformers_agrees_today(name: str, tmp_path: Path):
    pytest.importorskip("torch")
    golden = load_golden(name)
    oracle = load_oracle(name, write_checkpoint(name, tmp_path))
    np.testing.assert_allclose(oracle_logits(oracle, golden.prompt_token_ids), golden.logits, atol=TOLERANCE)


def test_a_head_of_another_size_is_refused(tmp_path: Path):
    config = tiny_config("qwen3_classifier") | {"id2label": {"0": "no", "1": "yes"}}
    with pytest.raises(CheckpointError, match=r"'score.weight' is \(3, 72\); expected \(2, 72\)"):
        Harness(save_checkpoint(config, tiny_weights("qwen3_classifier"), tmp_path))


def test_a_reranker_in_gguf_gives_the_logits_of_yes_and_no(tmp_path: Path):
    """llama.cpp's conversion keeps two rows of the output head and drops the rest, where it is not tied."""
    ids = load_golden("qwen3_tied").prompt_token_ids
    path = write_reranker(tmp_path / "reranker.gguf")
    (ours,) = Harness(path).run([ids], [Chunk(0, 0, len(ids))])
    np.testing.assert_allclose(ours, load_golden("qwen3_tied").logits[:, [YES, NO]], atol=TOLERANCE)
    assert read_tasks(open_checkpoint(path)) == ModelTasks(labels=("yes", "no"), judges_pairs=True)


def write_reranker(path: Path) -> Path:
    rows = tiny_weights("qwen3_tied")["model.embed_tokens.weight"][[YES, NO]]
    keys = {"qwen3.pooling_type": 4, "qwen3.classifier.output_labels": ["yes", "no"]}
    return write_gguf("qwen3_tied", path, also_keys=keys, also_tensors={"cls.output.weight": rows})


@pytest.mark.parametrize(("kind", "pooling"), [(1, "mean"), (2, "cls"), (3, "last")])
def test_gguf_pooling(tmp_path: Path, kind: int, pooling: str):
    path = write_gguf("qwen3_embedding", tmp_path / "embedding.gguf", also_keys={"qwen3.pooling_type": kind})
    assert read_tasks(open_checkpoint(path)) == ModelTasks(pooling=pooling)  # type: ignore[arg-type]


def directory(path: Path, config: dict[str, Any] | None = None, **files: Any) -> Path:
    """A checkpoint's directory without weights; `a__b` is the file b.json in the folder a."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(tiny_config("qwen3") | (config or {})))
    for name, content in files.items():
        file = path / f"{name.replace('__', '/')}.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(content))
    return path


def tasks(path: Path) -> ModelTasks:
    return read_tasks(open_checkpoint(path, "dummy"))


def modules(*kinds: str) -> list[dict[str, str]]:
    folders = [("" if i == 0 else f"{i}_{kind}", kind) for i, kind in enumerate(kinds)]
    return [{"path": folder, "type": f"sentence_transformers.models.{kind}"} for folder, kind in folders]


EMBEDDING = modules("Transformer", "Pooling", "Normalize")


def test_a_plain_language_model(tmp_path: Path):
    assert tasks(directory(tmp_path)) == ModelTasks()


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False, "include_prompt": True}, "last"),
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode": "lasttoken", "embedding_dimension": 1024}, "last"),
        ({"pooling_mode": ["mean"]}, "mean"),
    ],
)
def test_sentence_transformers_pooling(tmp_path: Path, pooling: dict[str, Any], expected: str):
    path = directory(tmp_path, modules=EMBEDDING, **{"1_Pooling__config": pooling})
    assert tasks(path) == ModelTasks(pooling=expected)  # type: ignore[arg-type]


def test_sentence_transformers_without_normalize(tmp_path: Path):
    path = directory(tmp_path, modules=EMBEDDING[:2], **{"1_Pooling__config": {"pooling_mode": "mean"}})
    assert tasks(path) == ModelTasks(pooling="mean", normalize=False)


def test_what_is_not_supported_is_named(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"modules.json: has a module 'LSTM'; supported are Transformer, Pool"):
        tasks(directory(tmp_path / "a", modules=[*EMBEDDING, *modules("", "LSTM")[1:]]))
    both = {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}
    with pytest.raises(CheckpointError, match=r"pools by .*mean_tokens.*max_tokens"):
        tasks(directory(tmp_path / "b", modules=EMBEDDING, **{"1_Pooling__config": both}))
    with pytest.raises(CheckpointError, match=r"torch.nn.ReLU"):
        tasks(directory(tmp_path / "c", CLASSIFIER | {"sbert_ce_default_activation_function": "torch.nn.ReLU"}))
    with pytest.raises(CheckpointError, match=r"holds no 1_Pooling/config\.json"):
        tasks(directory(tmp_path / "d", modules=EMBEDDING))


CLASSIFIER = {"architectures": ["Qwen3ForSequenceClassification"]}


@pytest.mark.parametrize(
    ("config", "labels", "activation"),
    [
        ({}, ("LABEL_0", "LABEL_1"), "softmax"),
        ({"id2label": {"1": "b", "10": "c", "0": "a"}}, ("a", "b", "c"), "softmax"),
        ({"id2label": {"0": "relevant"}}, ("relevant",), "sigmoid"),
        ({"problem_type": "multi_label_classification"}, ("LABEL_0", "LABEL_1"), "sigmoid"),
        ({"num_labels": 1, "problem_type": "regression"}, ("LABEL_0",), "identity"),
        ({"num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.Identity"}}, ("LABEL_0",), "identity"),
    ],
)
def test_labels_and_activation(tmp_path: Path, config: dict[str, Any], labels: tuple[str, ...], activation: str):
    found = tasks(directory(tmp_path, CLASSIFIER | config))
    assert (found.labels, found.activation) == (labels, activation)


def test_rerankers_are_recognised(tmp_path: Path):
    by_card = directory(tmp_path / "a")
    (by_card / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Qwen3-Reranker-0.6B\n")
    by_module = directory(tmp_path / "b", modules=modules("Transformer", "LogitScore"))
    by_flag = directory(tmp_path / "c", CLASSIFIER | {"num_labels": 1, "is_original_qwen3_reranker": True})
    by_name = directory(tmp_path / "models--Qwen--Qwen3-Reranker-0.6B" / "snapshots" / "x")
    assert all(tasks(path).judges_pairs for path in (by_card, by_module, by_flag, by_name))
    other = directory(tmp_path / "Qwen3-Reranker-copy-of-a-llama", {"model_type": "llama"})
    assert not tasks(other).judges_pairs and not tasks(directory(tmp_path / "d")).judges_pairs
