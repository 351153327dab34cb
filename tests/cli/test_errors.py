"""What a user gets wrong is said in one line, with exit code 2 and no traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import jaxllm.cli.main
from jaxllm.errors import CheckpointError, ConfigError

FLAGS = [
    (["serve", "--max-model-ln", "5"], "Unknown option: --max-model-ln. Did you mean --max-model-len?"),
    (["srve"], 'Unknown command "srve". Did you mean "serve"?'),
    (["serve", "a", "b"], "b"),
    (["serve", "--port"], "--port requires an argument"),
    (["profile", "--output"], "--output requires an argument"),
    (["profile"], "--output must be given"),
    (["convert"], "MODEL must be given"),
    (["convert", "smollm2-135m"], "DESTINATION must be given"),
    (["completion"], "SHELL must be given"),
    (["serve", "--block-size", "17"], "--block-size is '17': it must be 8, 16, 32, 64 or 128"),
    (["serve", "--dtype", "float8"], "--dtype is 'float8': it must be 'auto', 'float32', 'bfloat16' or 'float16'"),
    (["serve", "--port", "70000"], "--port is '70000': it must be at most 65535"),
    (["serve", "--max-num-seqs", "many"], "--max-num-seqs is 'many': it must be an integer"),
    (["serve", "--kv-cache-memory", "lots"], "--kv-cache-memory is 'lots': it must be a number of bytes, such as 4GiB"),
    (["serve", "--kv-cache-memory", "0"], "--kv-cache-memory is '0': it must be above 0"),
    (["serve", "--enforce-eager=perhaps"], "perhaps"),
    (["generate", "hi", "--top-p", "7"], "top_p is 7.0; it must be from 0 to 1"),
    (["generate", "hi", "--n", "two"], "--n is 'two': it must be an integer"),
    (["generate", "hi", "--logit-bias.yes", "1"], "token ids to numbers"),
    (
        ["generate", "hi", "--logit-bias", "foo"],
        "--logit-bias is 'foo': it must be a JSON object, such as --logit-bias",
    ),
    (["generate", "hi", "--logit-bias.42", "foo"], "--logit-bias.42 is 'foo': it must be a number"),
    (["generate", "hi", "--logit-bias", "[1]"], "--logit-bias is '[1]': it must be a JSON object"),
    (["generate", "hi", "--stop-token-ids", "x"], "--stop-token-ids is 'x': it must be an integer"),
    (["bench", "latency", "--batch-size", "many"], "--batch-size is 'many': it must be an integer"),
    (["completion", "tcsh"], "is 'tcsh': it must be 'bash', 'zsh' or 'fish'"),
    (["generate", "hi", "--raw", "--chat"], "--raw and --chat exclude each other"),
    (["generate", "hi", "--skip-tokenizer-init"], "needs the tokenizer"),
    (["generate", "hi", "--logprobs", "2"], "--logprobs needs --json"),
    (["generate", "hi", "--file", "x"], "not both"),
    (["generate", "--file", "/no/such/prompts"], "--file is '/no/such/prompts'"),
    (["chat", "--n", "2"], "--n is 2"),
    (["chat", "m", "hi", "--url", "http://127.0.0.1:9", "--dtype", "float32"], "dtype cannot be set with --url"),
    (["chat", "m", "hi", "--url", "http://127.0.0.1:9"], "no server answers at http://127.0.0.1:9 ("),
    (["bench", "throughput", "--output-len", "1"], "--output-len is 1: it must be at least 2"),
    (["bench", "throughput", "--num-prompts", "0"], "--num-prompts is '0': it must be 1 or more"),
    (["bench", "latency", "--json", "/no/such/directory/x.json"], "--json"),
    (["bench", "serve", "--url", "http://127.0.0.1:9", "--port", "1"], "port cannot be set with --url"),
    (["bench", "serve", "--url", "http://127.0.0.1:9"], "no server answers at http://127.0.0.1:9 ("),
    (["bench", "serve", "--base-url", "http://127.0.0.1:9"], "no server answers at http://127.0.0.1:9 ("),
]


@pytest.mark.parametrize(
    ("arguments", "message"), FLAGS, ids=lambda value: " ".join(value) if list is type(value) else ""
)
def test_a_wrong_argument(cli, echo, served, arguments: list[str], message: str) -> None:
    check(cli(*arguments), message)
    assert not echo.instances and not served


FILES = [
    ("max_model_ln: 5\n", "unknown setting 'max_model_ln'; did you mean 'max_model_len'?"),
    (
        "trust_remote_code: true\n",
        "config.yaml: trust_remote_code of vLLM is not available: no code that came with a model",
    ),
    ("swap-space: 4\n", "config.yaml: swap-space of vLLM is not available: pages that have lost"),
    ("max-model-len: 5\n", "unknown setting 'max-model-len'; did you mean 'max_model_len'?"),
    ("3: 5\n", "unknown setting 3"),
    ("port: eighty\n", "config.yaml: port is 'eighty': it must be an integer"),
    ("api_key: 12345\n", "config.yaml: api_key is 12345: it must be a string"),
    ("dtype: [float32]\n", 'config.yaml: dtype is ["float32"]: it must be'),
    ("- port\n", "holds a list; it must be a mapping"),
    ("port\n", "holds a text; it must be a mapping"),
    ("1\n", "holds a number; it must be a mapping"),
    ("true\n", "holds true or false; it must be a mapping"),
    ("max_model_len: yes\n", "max_model_len is true: it must be a number"),
    ("port: [1,\n", "is not valid YAML"),
    ("port: 1\nseed: 2\nport: 3\n", "config.yaml is not valid YAML: 'port' is set in line 1 and again in line 3"),
    ("isq_map:\n  a: q8_0\n  b: q4k\n  a: q6k\n", "'a' is set in line 2 and again in line 4"),
    ("\x00", "is not valid YAML"),
]


@pytest.mark.parametrize(("text", "message"), FILES)
def test_a_wrong_file(cli, served, tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    check(cli("serve", "--config", str(path)), message)
    assert not served


def test_a_missing_file(cli, served, tmp_path: Path) -> None:
    check(cli("serve", "--config", str(tmp_path / "none.yaml")), "none.yaml': no such file or directory")
    check(cli("serve", "--config", str(tmp_path)), "is a directory")


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("JAXLLM_PROT", "1", "unknown variable 'JAXLLM_PROT'; did you mean 'JAXLLM_PORT'?"),
        ("JAXLLM_PORT", "-1", "JAXLLM_PORT is '-1': it must be 0 or more"),
        (
            "JAXLLM_ENABLE_PREFIX_CACHING",
            "maybe",
            "JAXLLM_ENABLE_PREFIX_CACHING is 'maybe': it must be true or false",
        ),
    ],
)
def test_a_wrong_variable(cli, served, monkeypatch, variable: str, value: str, message: str) -> None:
    monkeypatch.setenv(variable, value)
    check(cli("serve"), message)
    assert not served


@pytest.mark.parametrize("error", [ConfigError("tp is 3;\n  must divide 4"), CheckpointError("m.gguf ends early")])
def test_what_the_engine_refuses(cli, monkeypatch, error: Exception) -> None:
    from tests.cli.conftest import stub_module

    def serve(config: object) -> None:
        raise error

    stub_module(monkeypatch, "jaxllm.serving.server", serve=serve)
    check(cli("serve"), " ".join(str(error).split()))


def test_a_bug_keeps_its_traceback(monkeypatch) -> None:
    from tests.cli.conftest import stub_module

    def serve(config: object) -> None:
        raise ZeroDivisionError

    stub_module(monkeypatch, "jaxllm.serving.server", serve=serve)
    with pytest.raises(ZeroDivisionError):
        jaxllm.cli.main.main(["serve"])


def test_an_interrupt_exits_with_130(cli, monkeypatch) -> None:
    from tests.cli.conftest import stub_module

    def serve(config: object) -> None:
        raise KeyboardInterrupt

    stub_module(monkeypatch, "jaxllm.serving.server", serve=serve)
    assert cli("serve") == (130, "", "")


def test_a_reader_that_leaves_early_is_no_error() -> None:
    talkative = "from jaxllm.cli.main import app, run; app.command(lambda: print('x' * 10**6), name='talk'); run()"
    pipeline = '"$0" -c "$1" talk | head -c 1; exit ${PIPESTATUS[0]}'
    ended = subprocess.run(["bash", "-c", pipeline, sys.executable, talkative], capture_output=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (141, b"x", b"")


def check(result: tuple[int, str, str], message: str) -> None:
    code, out, err = result
    assert code == 2 and out == ""
    assert err.startswith("jaxllm: error: ") and err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("models", "x"), "unexpected argument 'x'; see --help"),
        (("list", "extra"), "unexpected argument 'extra'; see --help"),
        (("generate", "--file", "/no/such"), "--file is '/no/such': no such file or directory"),
        (("compile", "--output", "/dev/null"), "--output is '/dev/null': file exists"),
    ],
)
def test_messages_have_no_words_of_pythons(cli, arguments: tuple[str, ...], message: str) -> None:
    result = cli(*arguments)
    assert result.code == 2 and result.err == f"jaxllm: error: {message}\n"
