from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from jaxllm.config import EngineConfig
from jaxllm.config.values import format_bytes
from jaxllm.engine.core.sizes import Buckets
from jaxllm.engine.start.schemes import known_gpu
from jaxllm.errors import DoesNotFitError
from tests.cli.conftest import stub_module


def test_pull_prints_where_the_model_is(cli, tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    assert cli("pull", str(model)) == (0, f"{model}\n", "")


def test_pull_lists_the_built_in_names(cli) -> None:
    out = cli("pull", "--list").out
    assert "smollm2-135m" in out and "gemma3-270m" in out and "93.81 MiB" in out


def test_an_unknown_model_is_refused_with_the_names_there_are(cli) -> None:
    code, out, err = cli("pull", "smollm3")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "'smollm3'" in err and "smollm2-135m" in err


@dataclass
class Plan:
    weight_bytes: int = 270 * 2**20
    kv_tokens: int = 65536
    buckets: Buckets = field(default_factory=lambda: Buckets((2, 4, 8), (64,), ()))
    device: str = "a device"
    num_shapes: int = 4
    why_not: str | None = None
    notes: list[str] = field(default_factory=list)

    def summary(self) -> str:
        return f"weights {format_bytes(self.weight_bytes)}, {self.kv_tokens:,} tokens"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Row:
    name: str
    tokens_per_second: float
    why_not: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[EngineConfig]:
    configs: list[EngineConfig] = []

    def plan_engine(config: EngineConfig, platform: Any) -> Plan:
        configs.append(config)
        if config.model == "large":
            raise DoesNotFitError("KV memory of 0 B a device holds no page")
        return Plan(why_not="it takes 9 GiB, and 8 GiB are free" if config.kv_cache_memory else None)

    stub_module(monkeypatch, "jaxllm.engine.start.blueprint", plan_engine=plan_engine)
    stub_module(
        monkeypatch,
        "jaxllm.engine.start.schemes",
        compare_schemes=lambda config, bandwidth, platform: [
            Row(platform.device if platform else "q4k", bandwidth / 1e6)
        ],
        known_gpu=known_gpu,
        measure_bandwidth=lambda nbytes: 2e9,
        table_rows=lambda rows: [(row.name, "", "", "", "", f"{row.tokens_per_second:g}") for row in rows],
    )
    return configs


def test_plan_says_first_that_the_model_fits(cli, planned) -> None:
    result = cli("plan", "m", "--max-num-seqs", "8")
    assert planned == [EngineConfig(model="m", max_num_seqs=8)]
    assert result.code == 0 and result.out.startswith("m fits on a device\nweights 270 MiB, 65,536 tokens\n")
    assert "4 shapes are compiled: decode 2, 4, 8; prefill 64\n" in result.out


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("large",), "KV memory of 0 B a device holds no page"),
        (("m", "--kv-cache-memory", "8GiB"), "it takes 9 GiB, and 8 GiB are free"),
    ],
)
def test_plan_says_what_would_make_a_model_fit(cli, planned, arguments: tuple[str, ...], why: str) -> None:
    result = cli("plan", *arguments)
    assert result.code == 1
    assert result.out.startswith(f"{arguments[0]} does not fit: {why}\nit fits with --isq q4k\n")
    result = cli("plan", *arguments, "--json")
    assert result.code == 1 and (json.loads(result.out)["fits"], json.loads(result.out)["why_not"]) == (False, why)


def test_plan_prints_json(cli, planned) -> None:
    found = json.loads(cli("plan", "--json").out)
    assert (found["weight_bytes"], found["kv_tokens"], found["fits"]) == (270 * 2**20, 65536, True)
    assert found["memory_bandwidth"] == 2e9
    assert found["schemes"] == [{"name": "q4k", "tokens_per_second": 2000.0, "why_not": None}]


def test_plan_takes_a_stated_bandwidth(cli, planned) -> None:
    out = cli("plan", "--memory-bandwidth", "900GB/s").out
    assert "900 GB/s (stated)" in out and "900000" in out
    code, _, err = cli("plan", "--memory-bandwidth", "fast")
    assert (code, err.count("\n")) == (2, 1)
    assert "--memory-bandwidth is 'fast'; it must be bytes a second, as 900GB" in err


def test_plan_for_a_gpu_that_is_not_there(cli, planned) -> None:
    out = cli("plan", "m", "--gpu", "RTX-4090").out
    assert "NVIDIA GeForce RTX 4090: 1,008 GB/s, says https://www.nvidia.com/" in out and "1.008e+06" in out
    found = json.loads(cli("plan", "m", "--gpu", "h100", "--memory-bandwidth", "2970GB", "--json").out)
    assert (found["gpu"], found["memory_bandwidth"]) == ("NVIDIA H100 SXM", 2970e9)
    assert found["schemes"] == [{"name": "NVIDIA H100 SXM", "tokens_per_second": 2970e3, "why_not": None}]
    code, _, err = cli("plan", "m", "--gpu", "h1000")
    assert (code, err.count("\n")) == (2, 1)
    assert "--gpu is 'h1000'" in err and "accepted are a10, a100-40gb," in err


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**30, "1 GiB"), (5 * 2**42, "20 TiB")]
)
def test_bytes_are_readable(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_the_families_are_listed_as_json(cli) -> None:
    families = {family["name"]: family for family in json.loads(cli("models", "--json").out)}
    assert "LlamaForCausalLM" in families["Llama"]["architectures"]
    assert "lfm2" in families["LFM2"]["gguf_architectures"]
