from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from jaxllm.config import EngineConfig
from jaxllm.requests.sampling import SamplingDefaults


def test_one_prompt_streams_to_stdout_and_statistics_go_to_stderr(cli, echo) -> None:
    result = cli("generate", "hello there", "--raw")
    assert (result.code, result.out) == (0, "HELLO THERE \n")
    assert "2 prompt tokens (0 cached), 2 generated" in result.err
    assert echo.instances[0].is_shut_down


def test_a_chat_model_sees_the_prompt_as_a_message(cli, echo) -> None:
    assert cli("generate", "hello").out == "<USER> HELLO <ASSISTANT> \n"


def test_a_base_model_continues_the_prompt(cli, echo) -> None:
    echo.chat_template = None
    assert cli("generate", "hello").out == "HELLO \n"


def test_chat_needs_a_template(cli, echo) -> None:
    echo.chat_template = None
    result = cli("generate", "hello", "--chat", "--model", "base")
    assert (result.code, result.err) == (2, "jaxllm: error: --chat: base has no chat template\n")
    assert echo.instances[0].is_shut_down


def test_the_first_argument_may_be_the_model(cli, echo, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder, file = tmp_path / "saved", tmp_path / "x.gguf"
    folder.mkdir()
    file.touch()
    for model in ("gemma3-270m", "saved", str(folder), str(file), "missing.gguf", "org/name"):
        assert cli("generate", model, "hello there", "--raw").out == "HELLO THERE \n"
        assert echo.instances[-1].config.model == model
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\n")
    assert cli("generate", "gemma3-270m", "--file", str(prompts), "--raw").out == "ONE \n"
    assert echo.instances[-1].config.model == "gemma3-270m"


@pytest.mark.parametrize("text", ["a/b c", "yes or no?", "x" * 5000, "~nobody-of-this-name/x", "\0"])
def test_other_first_arguments_are_prompts(cli, echo, text: str) -> None:
    assert cli("generate", text, "hello", "--raw").code == 0
    assert echo.instances[-1].config.model == EngineConfig().model and len(echo.instances[-1].prompts) == 2


def test_a_model_alone_may_be_a_prompt(cli, echo) -> None:
    result = cli("generate", "gemma3-270m")
    assert result.code == 2 and len(result.err.splitlines()) == 1
    assert "'gemma3-270m' names a model" in result.err and "--model gemma3-270m" in result.err
    assert not echo.instances
    assert cli("generate", "--model", "base", "gemma3-270m", "--raw").out == "GEMMA3-270M \n"
    assert cli("generate", "--model", "base", "gemma3-270m", "b").code == 2


def test_several_prompts_are_printed_in_order(cli, echo) -> None:
    assert cli("generate", "a b c d", "e", "f g", "--raw").out == "A B C D \nE \nF G \n"


def test_prompts_from_a_file(cli, echo, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\ntwo words\n")
    assert cli("generate", "--raw", "--file", str(file)).out == "ONE \nTWO WORDS \n"


@pytest.mark.parametrize("arguments", [[], ["--file", "-"]])
def test_prompts_from_standard_input(cli, echo, monkeypatch, arguments: list[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    assert cli("generate", "--raw", *arguments).out == "ONE \nTWO \n"


def test_standard_input_stands_before_the_prompt(cli, echo, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    assert cli("generate", "--raw", "sum up").out == "ONE TWO SUM UP \n"


def test_no_prompt_at_all(cli, echo, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    result = cli("generate")
    assert (result.code, result.err) == (2, "jaxllm: error: no prompt: standard input is empty\n")
    assert not echo.instances


def test_json_has_one_object_a_prompt(cli, echo) -> None:
    lines = cli("generate", "a b", "c", "--raw", "--json", "--n", "2").out.splitlines()
    first, second = (json.loads(line) for line in lines)
    assert (first["prompt"], second["prompt"]) == ("a b", "c")
    assert [choice["text"] for choice in first["outputs"]] == ["A B ", "A B "]


def test_json_names_the_parts_of_a_logprob(cli, echo) -> None:
    choice = json.loads(cli("generate", "a", "--raw", "--json", "--logprobs", "1").out)["outputs"][0]
    assert choice["logprobs"] == [{"0": {"logprob": -0.5, "rank": 1, "decoded_token": "x", "token_bytes": [120]}}]


def test_flags_win_over_the_models_recommendation_and_that_over_the_default(cli, echo) -> None:
    echo.recommended = SamplingDefaults(temperature=0.5, top_k=40, top_p=0.9)
    cli(
        "generate", "a", "--temperature", "0", "--max-tokens", "7", "--stop", "x", "--stop", "y", "--logit-bias.5", "-2"
    )
    params = echo.instances[0].params[0]
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0, 40, 0.9, 0.0)
    assert (params.max_tokens, params.stop, params.logit_bias) == (7, ("x", "y"), {5: -2.0})
