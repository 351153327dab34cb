"""`jaxllm convert`, as it is typed."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxllm.config import EngineConfig
from tests.cli.conftest import stub_module


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[EngineConfig, Path, str]]:
    found: list[tuple[EngineConfig, Path, str]] = []
    stub_module(
        monkeypatch,
        "jaxllm.cli.convert.conversion",
        convert_model=lambda config, destination, to, on_progress, merge_lora: (
            found.append((config, destination, to, *merge_lora)) or ["it was 8 MiB", "it is 4 MiB"]
        ),
    )
    return found


def test_source_and_destination_are_positions(cli, conversions) -> None:
    result = cli("convert", "m", "out", "--isq", "q4k", "--to", "gguf")
    assert (result.out, result.err) == ("out\n", "it was 8 MiB\nit is 4 MiB\n")
    assert conversions == [(EngineConfig(model="m", isq="q4k"), Path("out"), "gguf")]


def test_orbax_is_the_default(cli, conversions) -> None:
    assert cli("convert", "m", "out", "--isq-map", "*.w=int8").code == 0
    assert conversions == [(EngineConfig(model="m", isq_map={"*.w": "int8"}), Path("out"), "orbax")]


def test_adapters_are_given_one_by_one(cli, conversions) -> None:
    assert cli("convert", "m", "out", "--merge-lora", "a=0.5", "--merge-lora", "b").code == 0
    assert conversions == [(EngineConfig(model="m"), Path("out"), "orbax", "a=0.5", "b")]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("convert",), "MODEL must be given"),
        (("convert", "m"), "DESTINATION must be given"),
        (("convert", "m", "out", "--to", "onnx"), "onnx"),
        (("convert", "m", "out", "--isq", "q9"), "--isq is 'q9'"),
        (("convert", "m", "out", "--port", "1"), "--port"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(arguments, said, cli, conversions) -> None:
    code, out, err = cli(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said.lower() in err.lower()
    assert conversions == []


@pytest.mark.parametrize("to", ["orbax", "safetensors"])
def test_a_gguf_file_is_not_made_a_directory(cli, tmp_path: Path, to: str) -> None:
    outcome = cli("convert", "m", str(tmp_path / "x.gguf"), "--to", to)
    assert outcome.code == 2 and f"--to {to} writes a directory; --to gguf writes a file" in outcome.err


@pytest.mark.parametrize("name", ["x", "x.orbax"])
def test_a_gguf_file_is_named_as_one(cli, tmp_path: Path, name: str) -> None:
    outcome = cli("convert", "m", str(tmp_path / name), "--to", "gguf")
    assert outcome.code == 2 and f"{name}'; --to gguf writes a file, whose name ends in .gguf" in outcome.err
