"""--help and --version, as a new user meets them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib.metadata import version

import pytest

from jaxllm.cli.main import COMMON, takes_help_all
from jaxllm.config import EngineConfig, ServeConfig
from jaxllm.requests.sampling import SamplingParams

COMMANDS = [
    "serve",
    "generate",
    "chat",
    "pull",
    "plan",
    "bench throughput",
    "bench latency",
    "bench serve",
    "bench startup",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_every_setting_with_its_docstring_and_default(cli, command: str) -> None:
    result = cli(*command.split(), "--help-all")
    assert result.code == 0 and "more settings" not in result.out
    text = " ".join(re.sub(r"[│╭╮╰╯─]", " ", result.out).split())
    schema = ServeConfig if command.endswith("serve") else EngineConfig
    for name, field in schema.model_fields.items():
        if command == "pull" and name not in ("model", "tokenizer", "revision", "download_dir"):
            assert f"--{name.replace('_', '-')}" not in text
            continue
        assert f"--{name.replace('_', '-')}" in text
        assert field.description and field.description.replace("`", "") in text
        if field.default is not None:
            assert f"[default: {field.default}]" in text
    assert "--config" in text


@pytest.mark.parametrize("command", ["serve", "generate", "chat", "plan", "bench latency"])
def test_help_shows_common_settings_and_says_how_many_others_there_are(cli, command: str) -> None:
    common, everything = cli(*command.split(), "--help"), cli(*command.split(), "--help-all")
    assert common.code == everything.code == 0
    flags = [set(re.findall(r"--(?!no-|help)[a-z][a-z0-9.-]*", page.out)) for page in (common, everything)]
    assert {"model", "max-model-len", "isq", "tensor-parallel-size"} <= {flag.removeprefix("--") for flag in flags[0]}
    assert "--decode-buckets" in flags[1] - flags[0]
    (count,) = re.findall(r"^(\d+) more settings are shown by --help-all\.$", common.out, flags=re.MULTILINE)
    assert int(count) == len(flags[1]) - len(flags[0])


@pytest.mark.parametrize("command", ["pull", "convert", "ps", "rm", "models"])
def test_help_of_commands_with_few_flags_shows_all(cli, command: str) -> None:
    assert cli(command, "--help").out == cli(command, "--help-all").out


def test_every_name_that_help_shows_is_a_setting() -> None:
    assert {*ServeConfig.model_fields, *SamplingParams.__dataclass_fields__} >= COMMON


def test_help_all_behind_two_dashes_is_a_text() -> None:
    assert takes_help_all(["generate", "--", "--help-all"]) == (["generate", "--", "--help-all"], False)


def test_help_is_grouped(cli) -> None:
    out = cli("serve", "--help-all").out
    panels = re.split(r"^╭─ (\w+) ─", out, flags=re.MULTILINE)[1:]
    shown = dict(zip(panels[::2], panels[1::2], strict=True))
    engine = ["Model", "Quantization", "Scheduling", "Memory", "Parallelism", "Execution"]
    assert list(shown) == ["Command", *engine, "Server", "Access", "API", "Storage", "Logging", "Monitoring", "Ray"]
    for flag, title in (("max-num-seqs", "Scheduling"), ("port", "Server"), ("score-method", "API")):
        assert [name for name, panel in shown.items() if re.search(rf"--{flag}\b", panel)] == [title]
    generate = re.findall(r"^╭─ (\w+) ─", cli("generate", "--help-all").out, flags=re.MULTILINE)
    assert generate == ["Command", "Sampling", *engine]


def test_help_lists_the_accepted_values(cli) -> None:
    assert "One of: 8, 16, 32, 64, 128." in cli("serve", "--help-all").out


def test_help_says_in_words_what_a_value_is(cli) -> None:
    """And not how our code spells its type."""
    out = cli("serve", "--help-all").out
    words = set(re.findall(r"--[a-z-]+\s+(?:│\n│\s+)?([A-Z]{2,})\b", out))
    assert words == {"TEXT", "NUMBER", "NUMBERS", "SIZE", "PATH", "NAME", "CHOICE", "JSON"}
    assert "One of: q4_0, q4_1," in " ".join(re.sub("[│]", " ", out).split())


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands_and_flags(cli, shell: str) -> None:
    script = cli("completion", shell).out
    assert "max-model-len" in script and "perplexity" in script
    if program := shutil.which(shell):
        checked = subprocess.run([program, "-n"], input=script, text=True, capture_output=True, timeout=30)
        assert checked.returncode == 0, checked.stderr


def test_help_lists_the_commands(cli) -> None:
    out = cli("--help").out
    assert all(command in out for command in ("serve", "generate", "chat", "pull", "convert", "plan", "bench"))
    assert all(command in cli("bench", "--help").out for command in ("throughput", "latency", "serve", "startup"))


def test_sampling_flags_come_with_their_documentation(cli) -> None:
    out = cli("generate", "--help-all").out
    assert "Keep tokens with at least this fraction of the most likely token's probability" in out
    assert "--no-skip-special-tokens" in out


@pytest.mark.parametrize("command", ["serve", "generate", "models", "bench latency"])
def test_help_is_the_same_without_docstrings(command: str) -> None:
    shown = [
        subprocess.run([sys.executable, *flags, "-m", "jaxllm", *command.split(), "--help"], capture_output=True)
        for flags in ([], ["-OO"])
    ]
    assert [ended.returncode for ended in shown] == [0, 0]
    assert shown[0].stdout == shown[1].stdout and len(shown[0].stdout) > 100


def test_version(cli) -> None:
    assert cli("--version") == (0, f"jaxllm {version('jaxllm')}\n", "")


def test_the_command_line_starts_without_jax_or_any_other_heavy_library() -> None:
    heavy = "{'jax', 'flax', 'transformers', 'fastapi', 'httpx', 'numpy'}"
    code = f"import sys, jaxllm.cli.main; sys.exit(' '.join({heavy} & set(sys.modules)))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.stderr.strip() == ""
