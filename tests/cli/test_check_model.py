"""`jaxllm models --check`: of a config or a GGUF file, whether it is served, or what is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.reference.tiny import tiny_config, write_checkpoint
from tests.reference.tiny_gguf import write_gguf

PUBLISHED = Path(__file__).parents[1] / "reference" / "configs"


@pytest.fixture
def check(cli, tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """`check({"model_type": …})` -> the exit code and what is printed after the path."""

    def run(config: dict[str, Any]) -> tuple[int, str]:
        path = tmp_path / "any-name.json"
        path.write_text(json.dumps(config))
        code, out, err = cli("models", "--check", str(path))
        assert err == "" and out.count("\n") == 1
        return code, out.removeprefix(f"{path}: ").strip()

    return run


@pytest.mark.parametrize(
    ("name", "family"), [("gemma-4-E2B-it", "Gemma 4"), ("Kimi-K2-Instruct", "DeepSeek V3"), ("Qwen3.5-9B", "Qwen3.5")]
)
def test_a_published_config_is_served(check, name: str, family: str) -> None:
    assert check(json.loads((PUBLISHED / f"{name}.json").read_text())["config"]) == (0, f"served, as {family}")


def test_a_folder_and_a_gguf_file_are_served(cli, tmp_path: Path) -> None:
    folder = write_checkpoint("qwen3", tmp_path / "qwen3")
    file = write_gguf("gemma3_small", tmp_path / "model.gguf")
    for path, family in ((folder, "Qwen 3"), (file, "Gemma 3")):
        assert cli("models", "--check", str(path))[:2] == (0, f"{path}: served, as {family}\n")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"model_type": "deepseek_v32", "kv_lora_rank": 512, "index_topk": 2048, "num_experts": 8},
            "model_type is 'deepseek_v32'; it needs sparse attention with an indexer; the nearest family is "
            "DeepSeek V3",
        ),
        (
            {"model_type": "rwkv_hybrid", "num_experts": 8, "mamba_d_state": 16, "is_encoder_decoder": False},
            "model_type is 'rwkv_hybrid'; it needs state-space layers (Mamba); the nearest family is Mixtral",
        ),
        (
            {"model_type": "xyz", "kv_lora_rank": 8, "rope_scaling": {"mrope_section": [1, 2]}},
            "model_type is 'xyz'; the nearest family is DeepSeek V3",
        ),
        (
            {"model_type": "kimi_linear", "kv_lora_rank": 512, "linear_attn_config": {"head_dim": 128}},
            "model_type is 'kimi_linear'; it needs a gated delta rule whose channels fade by themselves (Kimi's linear "
            "attention); the nearest family is DeepSeek V3",
        ),
        ({"model_type": "xyz"}, "model_type is 'xyz'; the nearest family is Llama"),
        ({"model_type": "electra", "type_vocab_size": 2}, "model_type is 'electra'; the nearest family is BERT"),
        ({}, "model_type is None; the nearest family is Llama"),
        (
            tiny_config("gemma3_small") | {"attn_logit_softcapping": 50.0},
            "attn_logit_softcapping is 50.0; accepted is null, since Gemma 3 caps none; the nearest family is Gemma 3",
        ),
    ],
)
def test_what_is_missing_is_named_with_the_nearest_family(check, config: dict[str, Any], said: str) -> None:
    assert check(config) == (1, f"not served: {said}")


def test_a_gguf_file_of_another_architecture(cli, tmp_path: Path) -> None:
    path = write_gguf("llama_gqa", tmp_path / "model.gguf")
    data = path.read_bytes().replace(b"llama", b"zebra")  # which has as many letters
    path.write_bytes(data)
    code, out, _ = cli("models", "--check", str(path))
    assert (code, out) == (
        1, f"{path}: not served: general.architecture is 'zebra'; the nearest family is Llama\n",
    )  # fmt: skip


def test_as_json(cli, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "xyz", "ssm_cfg": {"layer": "x"}}))
    code, out, _ = cli("models", "--check", str(path), "--json")
    assert code == 1
    assert json.loads(out) == {
        "path": str(path), "served": False, "family": "Llama", "missing": ["state-space layers (Mamba)"],
        "reason": "model_type is 'xyz'",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--check", "nowhere.json"), "nowhere.json: no such file or directory"),
        (
            ("--check", "x.json", "--server", "http://a"),
            "--check is 'x.json' and --server is 'http://a'; accepted is one",
        ),
    ],
)
def test_what_cannot_be_checked_is_one_line(cli, arguments: tuple[str, ...], says: str) -> None:
    code, out, err = cli("models", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1) and says in err


def test_jax_has_no_device_of_it(tmp_path: Path) -> None:
    """Devices take seconds and memory, which a look at a file needs not."""
    path = write_checkpoint("llama_gqa", tmp_path)
    program = (
        "import sys\nfrom jaxllm.cli.main import main\n"
        f"try: main(['models', '--check', {str(path)!r}])\nexcept SystemExit as end: assert not end.code\n"
        "from jaxllm import compat\nassert not compat.backends_run()"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
