"""Split GGUF files, as the gguf package writes them: loaded whole, or refused by the part that is wrong."""

from __future__ import annotations

import re
import shutil
import threading
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.cli.main import main
from jaxllm.errors import CheckpointError, ModelNotFoundError
from jaxllm.weights import folder, open_checkpoint
from jaxllm.weights.folder import reading_ahead
from jaxllm.weights.source import resolve_model
from tests.reference.tiny_gguf import write_gguf
from tests.support.sizes import FIELDS
from tests.weights.fake_hub import FakeHub

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3)


@pytest.fixture
def joined(tmp_path: Path) -> Path:
    (tmp_path / "joined").mkdir()
    return write_gguf("llama_gqa", tmp_path / "joined/m.gguf")


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    (tmp_path / "split").mkdir()
    write_gguf("llama_gqa", tmp_path / "split/m.gguf", split=9)
    return sorted((tmp_path / "split").iterdir())


def edit(path: Path, key: str, value: int) -> None:
    """Change a number in a file's metadata where it stands."""
    reader = gguf.GGUFReader(path, "r+")
    reader.fields[key].parts[-1][0] = value
    reader.data.flush()


def run(*arguments: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert not ended.value.code


def refused(path: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)


def answer(model: Path) -> tuple[list[int], list[dict[int, float]]]:
    with LLM(str(model), **FIELDS) as llm:
        completion = llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)[0].outputs[0]
    assert completion.logprobs is not None
    return list(completion.token_ids), [{i: p.logprob for i, p in step.items()} for step in completion.logprobs]


def test_every_part_and_the_folder_are_the_whole_model(joined: Path, parts: list[Path]) -> None:
    assert len(parts) > 2 and parts[1].name == f"m-00002-of-{len(parts):05}.gguf"
    whole = open_checkpoint(joined)
    for path in (*parts, parts[0].parent):
        split = open_checkpoint(resolve_model(str(path)))
        assert split.path == parts[0] and split.tensors == whole.tensors
        assert split.config["general.architecture"] == "llama"
    for name in whole.tensors:
        assert np.array_equal(split.read(name).expand(), whole.read(name).expand())


def test_it_answers_as_the_joined_file_does(joined: Path, parts: list[Path]) -> None:
    assert answer(parts[1]) == answer(joined)


def test_the_plan_counts_all_parts_and_convert_joins_them(
    joined: Path, parts: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ("--dtype", "float32", "--skip-tokenizer-init", "--max-model-len", "64", "--kv-cache-memory", "8MiB")
    sizes = []
    for model in (joined, parts[-1]):
        run("plan", str(model), *settings)
        sizes.append(re.findall(r"[\d.]+ [KM]i?B", capsys.readouterr().out))
    assert len(sizes[0]) > 2 and sizes[0][:14] == sizes[1][:14]  # what follows is measured
    made = tmp_path / "made.gguf"
    run("convert", str(parts[1]), str(made), "--to", "gguf", "--skip-tokenizer-init")
    assert open_checkpoint(made).tensors == open_checkpoint(joined).tensors
    assert not [key for key in open_checkpoint(made).config if key.startswith("split.")]


def test_all_parts_are_read_ahead(parts: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Path] = []
    whole = threading.Event()

    def opening(path: Path, *arguments: Any, **options: Any) -> Any:
        opened.append(path)
        if path == parts[-1]:
            whole.set()
        return open(path, *arguments, **options)

    monkeypatch.setattr(folder, "open", opening, raising=False)
    with reading_ahead(parts[0]):
        assert whole.wait(30)
    assert opened == parts


def test_a_part_from_the_hub_brings_the_others(
    parts: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with FakeHub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.add("org/tiny", {f"Q4/{part.name}": part.read_bytes() for part in parts})
        path = resolve_model(f"org/tiny:Q4/{parts[1].name}")
    assert path.name == parts[0].name
    assert len(open_checkpoint(path).tensors) == sum(len(gguf.GGUFReader(part).tensors) for part in parts)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_missing_part_is_named(parts: list[Path], lost: int) -> None:
    parts[lost].unlink()
    for named in (parts[2], parts[0].parent):
        with pytest.raises(ModelNotFoundError, match=rf"the part {parts[lost].name} is missing from"):
            resolve_model(str(named))
    refused(parts[2], f"the part {parts[lost].name} is missing")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("split.count", 7, r"m-00002-of-.*split\.count is 7; \d is expected"),
        ("split.no", 0, r"m-00002-of-.*split\.no is 0; 1 is expected"),
        ("split.tensors.count", 5, r"m-00002-of-.*split\.tensors\.count is 5; \d+ is expected"),
    ],
)
def test_a_part_of_another_model_is_refused(parts: list[Path], key: str, value: int, message: str) -> None:
    edit(parts[1], key, value)
    refused(parts[0], message)


def test_a_part_in_the_place_of_another_with_the_same_numbers_is_refused(parts: list[Path]) -> None:
    shutil.copy(parts[1], parts[2])
    edit(parts[2], "split.no", 2)
    refused(parts[0], r"is in several parts|split\.tensors\.count is \d+, but")


def test_a_part_that_lost_its_name_says_what_it_must_be(parts: list[Path]) -> None:
    renamed = parts[0].rename(parts[0].with_name("renamed.gguf"))
    refused(renamed, r"must keep the name that gguf-split gave it: NAME-00001-of-\d{5}\.gguf")


def test_a_whole_file_with_the_name_of_a_part_is_refused(joined: Path) -> None:
    for number in (1, 2):
        shutil.copy(joined, joined.with_name(f"m-0000{number}-of-00002.gguf"))
    refused(joined.with_name("m-00001-of-00002.gguf"), r"split\.count is missing; 2 is expected")


def test_two_split_models_in_a_folder_are_not_chosen_from(parts: list[Path]) -> None:
    for part in parts:
        shutil.copy(part, part.with_name(f"other{part.name}"))
    with pytest.raises(ModelNotFoundError, match=r"exactly one \.gguf file; it holds m-00001-of-.*, otherm-00001-of-"):
        resolve_model(str(parts[0].parent))
