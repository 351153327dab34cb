"""LLM with encoders: vectors as sentence-transformers makes them, classes, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxllm import LLM
from jaxllm.config import EngineConfig
from jaxllm.engine.start.blueprint import plan_engine
from jaxllm.errors import CheckpointError, ConfigError, InvalidRequestError
from jaxllm.requests.outputs import PoolingParams
from tests.reference import load_golden
from tests.reference.tiny import write_checkpoint
from tests.reference.tiny_configs.encoders import SECOND_TEXT
from tests.serving.pooling.test_encoders import ids as letter_ids
from tests.serving.pooling.test_encoders import write_tokenizer

NAME, CLASSIFIER = "modernbert", "bert_classifier"
GOLDEN = load_golden(NAME)
IDS = GOLDEN.prompt_token_ids
HIDDEN = GOLDEN.logits.astype(np.float64)
SETTINGS: dict[str, Any] = {
    "dtype": "float32", "max_num_seqs": 6, "max_num_batched_tokens": 96, "prefill_buckets": (32, 96),
    "skip_tokenizer_init": True, "enforce_eager": True,
}  # fmt: skip
RNG = np.random.default_rng(0)
SIZE = HIDDEN.shape[1]
WIDE, WIDE_BIAS = RNG.standard_normal((80, SIZE), np.float32) / 8, RNG.standard_normal(80, np.float32)
LAST = RNG.standard_normal((24, 80), np.float32) / 8


def sentence_folder(path: Path, *kinds: str, name: str = NAME, **files: Any) -> Path:
    """A checkpoint with sentence-transformers' files; Dense modules are WIDE with tanh, then LAST."""
    write_checkpoint(name, path)
    modules, dense = [], 0
    for i, kind in enumerate(kinds):
        folder = "" if i == 0 else f"{i}_{kind}"
        modules.append({"idx": i, "path": folder, "type": f"sentence_transformers.models.{kind}"})
        if kind == "Dense":
            place = path / folder
            place.mkdir()
            matrix, bias = (LAST, None) if dense else (WIDE, WIDE_BIAS)
            activation = "linear.Identity" if dense else "activation.Tanh"
            config = {
                "in_features": matrix.shape[1], "out_features": matrix.shape[0], "bias": bias is not None,
                "activation_function": f"torch.nn.modules.{activation}",
            }  # fmt: skip
            (place / "config.json").write_text(json.dumps(config))
            tensors = {"linear.weight": matrix} | ({} if bias is None else {"linear.bias": bias})
            save_file(tensors, place / "model.safetensors")
            dense += 1
    files = {"modules": modules, "1_Pooling__config": {"pooling_mode_mean_tokens": True}} | files
    for file, content in files.items():
        place = path / f"{file.replace('__', '/')}.json"
        place.parent.mkdir(exist_ok=True)
        place.write_text(json.dumps(content))
    return path


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = write_checkpoint(NAME, tmp_path_factory.mktemp("tiny"))
    with LLM(str(path), **SETTINGS) as llm:
        yield llm


def test_many_texts_in_steps_of_several(llm: LLM) -> None:
    lengths = [1 + (7 * i) % 60 for i in range(40)]
    outputs = llm.pool([IDS[:n] for n in lengths], PoolingParams(kind="mean"), use_tqdm=False)
    alone = {n: llm.pool(IDS[:n], PoolingParams(kind="mean"), use_tqdm=False)[0].values for n in (1, 8, 57)}
    for output, length in zip(outputs, lengths, strict=True):
        if length in alone:
            np.testing.assert_allclose(output.values, alone[length], atol=2e-5)
    stats = llm.stats()
    assert 40 // 6 <= stats.num_steps < 30, "texts share steps"
    assert (stats.num_pages, llm.info.num_pages, stats.num_running, stats.num_waiting) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("cls", HIDDEN[0]), ("last", HIDDEN[-1]), ("mean", HIDDEN.mean(0))],
    ids=["cls", "last", "mean"],
)
def test_pool(llm: LLM, kind: Any, expected: np.ndarray) -> None:
    (output,) = llm.pool(IDS, PoolingParams(kind=kind), use_tqdm=False)
    np.testing.assert_allclose(output.values, expected, atol=1e-4)


def test_without_files_a_vector_is_the_mean_of_unit_length(llm: LLM) -> None:
    (output,) = llm.embed([IDS], use_tqdm=False)
    mean = HIDDEN.mean(0)
    np.testing.assert_allclose(output.outputs.embedding, mean / np.linalg.norm(mean), atol=1e-5)


def test_nothing_is_generated(llm: LLM) -> None:
    message = "this model is an encoder, which generates no text; use /v1/embeddings, /score and /rerank"
    for ask in (lambda: llm.generate([IDS], use_tqdm=False), lambda: llm.chat([{"role": "user", "content": "Hi"}])):
        with pytest.raises(InvalidRequestError, match=message):
            ask()
    with pytest.raises(InvalidRequestError, match="kind is 'logits'; this model is an encoder"):
        llm.pool(IDS, PoolingParams(kind="logits"))


def test_a_text_that_no_step_has_room_for_is_refused(llm: LLM) -> None:
    assert llm.info.max_model_len == 96
    (full,) = llm.embed([[5] * 96], use_tqdm=False)
    assert np.isfinite(full.outputs.embedding).all()
    with pytest.raises(InvalidRequestError, match="prompt has 97 tokens; it must fit the context of 96 tokens"):
        llm.embed([[5] * 97])


def test_dense_modules_follow_the_mean(tmp_path: Path) -> None:
    path = sentence_folder(tmp_path, "Transformer", "Pooling", "Dense", "Dense", "Normalize")
    with LLM(str(path), **SETTINGS) as llm:
        found = [o.outputs.embedding for o in llm.embed([IDS[:9], IDS], use_tqdm=False)]
        assert llm.info.hidden_size == len(found[1]) == 24
        expected = LAST.astype(np.float64) @ np.tanh(WIDE.astype(np.float64) @ HIDDEN.mean(0) + WIDE_BIAS)
        np.testing.assert_allclose(found[1], expected / np.linalg.norm(expected), atol=1e-5)
        with pytest.raises(InvalidRequestError, match="kind is 'last'; it must be 'mean', which this model's Dense"):
            llm.pool(IDS, PoolingParams(kind="last"))


def test_prompts_by_name(tmp_path: Path) -> None:
    prompts = {"prompts": {"query": "find ", "document": "read "}, "default_prompt_name": "document"}
    path = sentence_folder(tmp_path, "Transformer", "Pooling", name="bert", config_sentence_transformers=prompts)
    write_tokenizer(path)
    with LLM(str(path), **SETTINGS | {"skip_tokenizer_init": False}) as llm:
        for given, text in (({}, "read a tea"), ({"prompt_name": "query"}, "find a tea")):
            asked = ["a tea", {"prompt": "a tea"}, [7, 8]] if not given else ["a tea", {"prompt": "a tea"}]
            found = [output.prompt_token_ids for output in llm.embed(asked, use_tqdm=False, **given)]
            assert found == [[2, *letter_ids(text), 3]] * 2 + [[7, 8]] * (len(asked) - 2)
        with pytest.raises(InvalidRequestError, match="prompt_name is 'passage'; accepted are query, document"):
            llm.embed("a tea", prompt_name="passage")
        with pytest.raises(InvalidRequestError, match="prompt_name goes with texts, not with token ids"):
            llm.embed([[7, 8]], prompt_name="query")


def test_classes_of_a_pair_of_texts(tmp_path: Path) -> None:
    golden = load_golden(CLASSIFIER)
    ids = golden.prompt_token_ids
    with LLM(str(write_checkpoint(CLASSIFIER, tmp_path)), **SETTINGS) as llm:
        logits = PoolingParams(kind="logits")
        pair, same, short = llm.pool([ids, ids, ids[:5]], logits, use_tqdm=False, second_texts=[SECOND_TEXT, 0, 2])
        np.testing.assert_allclose(pair.values, golden.logits, atol=1e-4)
        assert np.abs(same.values - golden.logits).max() > 1e-2 and short.values.shape == (3,)
        with pytest.raises(InvalidRequestError, match=r"it classifies .as glad, sad, angry.; use /classify"):
            llm.generate([ids])
        with pytest.raises(InvalidRequestError, match=r"gives classes .glad, sad, angry. and no vectors"):
            llm.embed([ids])
        with pytest.raises(InvalidRequestError, match="second_texts has 5 for a prompt of 5 tokens"):
            llm.pool(ids[:5], logits, second_texts=[5])


def test_the_plan_has_no_pages_and_as_much_room_as_the_longest_text(tmp_path: Path) -> None:
    path = sentence_folder(tmp_path, "Transformer", "Pooling", sentence_bert_config={"max_seq_length": 128})
    plan = plan_engine(EngineConfig(model=str(path)))
    assert (plan.max_model_len, plan.kv_bytes, plan.kv_tokens, plan.buckets.decode) == (128, 0, 0, ())
    assert "an encoder" in plan.summary() and "texts of up to 128 tokens" in plan.summary()
    longer = plan_engine(EngineConfig(model=str(path), max_model_len=200))
    assert (longer.max_model_len, longer.max_num_batched_tokens) == (200, 512)
    shorter = plan_engine(EngineConfig(model=str(path), max_num_batched_tokens=64))
    assert shorter.max_model_len == 64 and "texts have up to 64 tokens instead of 128" in shorter.notes[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 128, "max_num_batched_tokens": 64}, "max_num_batched_tokens is 64 and max_model_len is 128"),
        ({"decode_steps": 2}, "decode_steps is set, but this model is an encoder"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype is 'int8', but this model is an encoder"),
        ({"max_model_len": 500}, "max_model_len is 500; this model's positions end at 256"),
    ],
)
def test_settings_without_a_meaning_are_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    path = write_checkpoint(NAME, tmp_path)
    with pytest.raises(ConfigError, match=message):
        plan_engine(EngineConfig(model=str(path), **settings))


@pytest.mark.parametrize(
    ("kinds", "files", "message"),
    [
        (
            ("Transformer", "Pooling", "Normalize", "Dense"),
            {},
            "modules are Transformer, Pooling, Normalize, Dense; supp",
        ),
        (("Transformer", "Dense", "Pooling"), {}, "modules are Transformer, Dense, Pooling; supported are"),
        (("Transformer", "Pooling", "LSTM"), {}, "has a module 'LSTM'; supported are Transformer, Pooling, Dense"),
        (("Transformer", "Pooling"), {"1_Pooling__config": {"pooling_mode_max_tokens": True}}, "pools by"),
        (
            ("Transformer", "Pooling"),
            {"1_Pooling__config": {"pooling_mode_mean_tokens": True, "include_prompt": False}},
            "include_prompt is false; accepted is true",
        ),
        (
            ("Transformer", "Pooling"),
            {"sentence_bert_config": {"do_lower_case": True}},
            "do_lower_case is true; accepted",
        ),
        (
            ("Transformer", "Pooling", "Dense"),
            {"2_Dense__config": {"out_features": 80, "activation_function": "torch.nn.Softplus"}},
            "activation_function is 'torch.nn.Softplus'; supported are identity, tanh",
        ),
        (
            ("Transformer", "Pooling"),
            {"config_sentence_transformers": {"prompts": {"query": "q: "}, "default_prompt_name": "document"}},
            "default_prompt_name is 'document'; accepted are query",
        ),
    ],
)
def test_modules_that_are_not_computed_are_refused(
    tmp_path: Path, kinds: tuple[str, ...], files: dict[str, Any], message: str
) -> None:
    path = sentence_folder(tmp_path, *kinds, **files)
    with pytest.raises(CheckpointError, match=message):
        LLM(str(path), **SETTINGS)


def test_dense_modules_behind_a_decoder_are_refused(tmp_path: Path) -> None:
    path = sentence_folder(tmp_path, "Transformer", "Pooling", "Dense", name="qwen3_embedding")
    with pytest.raises(CheckpointError, match="has Dense modules, which are supported behind encoders only"):
        plan_engine(EngineConfig(model=str(path)))
