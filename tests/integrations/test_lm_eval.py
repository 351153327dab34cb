"""`--model jaxllm` of lm-evaluation-harness scores and generates as its `hf` model does; needs `pip install lm_eval`,
and for the comparison torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxllm import ConfigError, InvalidRequestError
from tests.serving.mixed_requests import write_model

pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install lm_eval")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from jaxllm.integrations.lm_eval import JaxLM

FIELDS: dict[str, Any] = {
    "dtype": "float32", "enforce_eager": True, "max_model_len": 200, "max_num_seqs": 4, "max_num_batched_tokens": 64,
    "kv_cache_memory": "16MiB", "block_size": 8,
}  # fmt: skip

QUESTIONS = [
    {"text": "The engine runs in a", "endings": ["thread of its own", "process", "cache"], "answer": 0},
    {"text": "A page holds so many", "endings": ["tokens", "engines", "tokens of one sequence alone"], "answer": 1},
    {"text": "The server answers", "endings": ["requests", "a"], "answer": 0},
    {"text": "The server answers", "endings": ["with an error body", "requests that come"], "answer": 1},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def ours(folder: Path) -> Iterator[JaxLM]:
    model = JaxLM.create_from_arg_obj({"model": str(folder)} | FIELDS, {"batch_size": 1, "device": None})
    yield model
    model.llm.shutdown()


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    pytest.importorskip("torch", reason="torch is not installed, which lm_eval's hf model needs")
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(folder), dtype="float32", device="cpu", batch_size=2, max_length=200)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> TaskManager:
    """A task like hellaswag, one that measures perplexity, and one that generates, of a local file."""
    here = tmp_path_factory.mktemp("tasks")
    (here / "questions.jsonl").write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    common = f"dataset_path: json\ndataset_kwargs:\n  data_files: {here}/questions.jsonl\ntest_split: train\n"
    (here / "choose.yaml").write_text(
        f"task: local_choose\n{common}output_type: multiple_choice\ndoc_to_text: text\ndoc_to_target: answer\n"
        "doc_to_choice: endings\nmetric_list:\n  - metric: acc\n  - metric: acc_norm\n"
    )
    (here / "roll.yaml").write_text(
        f"task: local_roll\n{common}output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: text\n"
        "metric_list:\n  - metric: word_perplexity\n  - metric: byte_perplexity\n"
    )
    (here / "write.yaml").write_text(
        f"task: local_write\n{common}output_type: generate_until\ndoc_to_text: text\n"
        "doc_to_target: '{{endings[0]}}'\n"
        "generation_kwargs:\n  until: ['e']\n  max_gen_toks: 12\nmetric_list:\n  - metric: exact_match\n"
    )
    return TaskManager(include_path=str(here), include_defaults=False)


def evaluate(model: Any, tasks: TaskManager, *names: str, **more: Any) -> dict[str, Any]:
    found = simple_evaluate(model, tasks=[*names], task_manager=tasks, bootstrap_iters=0, verbosity="ERROR", **more)
    assert found is not None
    return found


def answers(found: dict[str, Any], name: str) -> list[Any]:
    """What the model said to each request of a task, in order."""
    samples = sorted(found["samples"][name], key=lambda sample: sample["doc_id"])
    return [answer for sample in samples for answer in sample["filtered_resps"]]


@pytest.mark.parametrize("shots", [0, 2])
def test_choices_are_scored_as_transformers_scores_them(
    ours: JaxLM, theirs: Any, tasks: TaskManager, shots: int
) -> None:
    found, expected = (evaluate(model, tasks, "local_choose", num_fewshot=shots) for model in (ours, theirs))
    assert found["results"]["local_choose"]["acc,none"] == expected["results"]["local_choose"]["acc,none"]
    assert found["results"]["local_choose"]["acc_norm,none"] == expected["results"]["local_choose"]["acc_norm,none"]
    pairs = [*zip(answers(found, "local_choose"), answers(expected, "local_choose"), strict=True)]
    assert len(pairs) == sum(len(question["endings"]) for question in QUESTIONS)  # type: ignore[arg-type]
    for (score, greedy), (expected_score, expected_greedy) in pairs:
        assert float(score) == pytest.approx(float(expected_score), abs=1e-3) and greedy == expected_greedy


def test_perplexities_are_those_of_transformers(ours: JaxLM, theirs: Any, tasks: TaskManager) -> None:
    found, expected = (evaluate(model, tasks, "local_roll") for model in (ours, theirs))
    assert answers(found, "local_roll") == pytest.approx(
        [float(value) for value in answers(expected, "local_roll")], abs=1e-3
    )
    for metric in ("word_perplexity,none", "byte_perplexity,none"):
        assert found["results"]["local_roll"][metric] == pytest.approx(
            expected["results"]["local_roll"][metric], rel=1e-4
        )


def test_texts_are_those_of_transformers(ours: JaxLM, theirs: Any, tasks: TaskManager) -> None:
    found, expected = (evaluate(model, tasks, "local_write") for model in (ours, theirs))
    texts = answers(found, "local_write")
    assert texts == answers(expected, "local_write") and len(texts) == len(QUESTIONS)
    assert any(texts) and not any("e" in text for text in texts)


def test_a_chat_is_rendered_by_the_models_template(ours: JaxLM, theirs: Any) -> None:
    chat = [{"role": "user", "content": "Hi"}]
    assert ours.apply_chat_template(chat) == theirs.apply_chat_template(chat)
    assert ours.chat_template(True) == theirs.chat_template(True)
    for text in (ours.apply_chat_template(chat), "<s>begun", "plain"):
        assert ours.tok_encode(text) == theirs.tok_encode(text)


def ask(kind: str, *arguments: Any) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)  # type: ignore[arg-type]


def test_texts_without_a_context_follow_the_first_token(ours: JaxLM, theirs: Any) -> None:
    requests = [ask("loglikelihood", "", " the engine")]
    ((score, greedy),) = ours.loglikelihood(requests, disable_tqdm=True)
    ((expected, expected_greedy),) = theirs.loglikelihood(requests, disable_tqdm=True)
    assert score == pytest.approx(expected, abs=1e-3) and greedy == expected_greedy


def test_a_long_text_is_scored_in_windows_each_token_once(ours: JaxLM) -> None:
    text = " ".join(str(number) for number in range(200))
    ids = ours.tok_encode(text)
    assert len(ids) > 2 * ours.max_length
    scored: list[int] = []
    score = ours.llm.score

    def noting(contexts: Any, continuations: Any, use_tqdm: bool) -> Any:
        for context, continuation in zip(contexts, continuations, strict=True):
            assert len(context) + len(continuation) < ours.max_length
            scored.extend(continuation)
        return score(contexts, continuations, use_tqdm)

    ours.llm.score = noting  # type: ignore[method-assign]
    try:
        (total,) = ours.loglikelihood_rolling([ask("loglikelihood_rolling", text)], disable_tqdm=True)
    finally:
        del ours.llm.score
    assert scored == ids and total < 0


def test_a_context_that_is_too_long_keeps_its_end(ours: JaxLM) -> None:
    text = " the" * 300
    (cut,), (whole,) = (
        ours.loglikelihood([ask("loglikelihood", text[-size:], " engine")], disable_tqdm=True)
        for size in (len(text), 4 * (ours.max_length - 1))
    )
    assert cut == whole


def test_what_cannot_be_meant_is_refused(ours: JaxLM) -> None:
    with pytest.raises(ConfigError, match="--model_args must have one of model and pretrained"):
        JaxLM()
    with pytest.raises(InvalidRequestError, match=r"^generation_kwargs has num_beams; accepted are until"):
        ours.generate_until([ask("generate_until", "a", {"until": ["."], "num_beams": 3})], disable_tqdm=True)


@pytest.mark.slow
def test_the_harness_runs_it_by_name(folder: Path, tmp_path: Path) -> None:
    """As docs/embeddings.md says."""
    arguments = ",".join(f"{name}={value}" for name, value in (FIELDS | {"model": folder}).items())
    command = [
        sys.executable, "-m", "jaxllm.integrations.lm_eval", "run", "--model", "jaxllm", "--model_args", arguments,
        "--include_path", "examples/lm_eval", "--tasks", "capitals,capitals_generated", "--output_path", str(tmp_path),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    assert "capitals_generated" in done.stdout and [*tmp_path.rglob("results_*.json")]
